"""A run becomes a pretrained model of the package; those of the package are what they say."""

import dataclasses
import json
import re
import types

import numpy as np
import pytest

import ngrammer_jax
from ngrammer_jax import config, errors, runs
from ngrammer_jax.runs import pretrained
from studies import model_card, ship_model
from tests.checks import bad_input, data_root
from tests.loops import each
from tests.training.helpers import write_config

SCORES = {
  'bits_per_byte': 8.5,
  'nll_nats_per_token': 5.25,
  'perplexity': 190.5,
  'top1_accuracy': 0.125,
}


def baseline_of(run, *, tokens=1, parameters=1, bits=8.5, **model):
  """A Transformer that was trained as a run, without files; its numbers are multiples."""
  plain = dataclasses.replace(run.config.model, **{'ngram': None} | model)
  leaf = np.zeros(int(ship_model._parameters(run) * parameters), np.int8)
  state = types.SimpleNamespace(step=run.restored.step * tokens, params={'w': leaf})
  return types.SimpleNamespace(
    config=dataclasses.replace(run.config, model=plain),
    workdir=run.workdir,
    restored=state,
    evaluate=lambda split: SCORES | {'bits_per_byte': bits, 'split': split},
  )


@pytest.fixture
def run(trained, one_device, tmp_path, monkeypatch):
  """A run whose text has a licence; the package has no models."""
  source = model_card.Source('words', 'nowhere', 'none', 'It repeats itself.')
  monkeypatch.setitem(model_card.SOURCES, 'text', source)
  monkeypatch.setattr(pretrained, 'FOLDER', tmp_path / 'weights')
  monkeypatch.setattr(ship_model, 'SAMPLE_TOKENS', 10)
  return runs.load_run(trained)


@pytest.fixture
def ship(run, tmp_path, monkeypatch):
  """A function that ships the run, compared with a baseline."""
  file = write_config(tmp_path / 'config.py', run.config)

  def ship(baseline, command=f'--config={file}', name='tiny'):
    load_run = lambda path, *step: baseline if path == 'plain' else runs.load_run(path, *step)
    fake = types.SimpleNamespace(load_run=load_run, Run=runs.Run)
    monkeypatch.setattr(ship_model, 'runs', fake)
    texts = ('--description=Six words.', '--hardware=1 core', f'--command={command}')
    places = (f'--name={name}', f'--workdir={run.workdir}', '--baseline=plain')
    return ship_model.main([*places, *texts])

  return ship


def check_card(folder):
  """The card of a model has the numbers, the command and the samples of its JSON."""
  model = json.loads((folder / 'model.json').read_text(encoding='utf-8'))
  card = (folder / 'MODEL_CARD.md').read_text(encoding='utf-8')
  assert card == model_card.format_card(model)
  for scores in (model['test'], model['baseline']['test']):
    assert f'| {scores["bits_per_byte"]:.4f} | {scores["nll_nats_per_token"]:.4f} |' in card
  for count in (
    model['parameters'],
    model['baseline']['parameters'],
    model['bytes'],
    model['training']['steps'],
    model['training']['tokens'],
    model['context'],
  ):
    assert re.search(rf'\b{count:,}\b', card), count
  assert f'`{model["training"]["command"]}`' in card
  assert model['description'] in card and model_card.SOURCES[model['corpus']].licence in card
  assert len(model['samples']) == 5
  for sample in model['samples']:
    assert all(f'    {line}' in card for line in sample.split('\n'))
  ship_model.check_loss(model)
  return model


@pytest.mark.slow
def test_a_run_is_shipped(run, ship, capsys):
  assert ship(baseline_of(run)) == 0
  folder = pretrained.FOLDER / 'tiny'
  assert capsys.readouterr().out == f'wrote {folder}\n'
  assert [path.name for path in folder.parent.iterdir()] == ['tiny']
  assert ngrammer_jax.pretrained() == {'tiny': 'Six words.'}
  shipped = ngrammer_jax.load_pretrained('tiny')
  model = check_card(folder)
  # No path of this machine, but all that the model needs.
  assert shipped.config.data.path is None and shipped.config.model == run.config.model
  assert all(str(run.workdir.parent) not in text for text in map(str, (model, shipped.config)))
  assert model['test']['protocol']['whole_split']
  assert model['samples'] == [c.text for c in shipped.generate([''] * 5, tokens=10)]
  # The numbers are those of the rounded parameters.
  data = dataclasses.replace(shipped.config.data, path=run.config.data.path)
  shipped = dataclasses.replace(shipped, config=dataclasses.replace(shipped.config, data=data))
  assert shipped.evaluate('test') == model['test'] != run.evaluate('test')
  with bad_input(f'--name=tiny exists: delete {folder} first'):
    ship(baseline_of(run))


@pytest.fixture
def no_results(monkeypatch):
  """Evaluations and samples are made up."""
  monkeypatch.setattr(runs.Run, 'evaluate', lambda run, split: SCORES)
  monkeypatch.setattr(runs.Run, 'generate', lambda *_: [])


@pytest.mark.full
@each(
  'changes, problem',
  [
    ({'bits': 1.0}, 'the model has 8.'),
    ({'tokens': 2}, 'was trained on 3,072 tokens, expected 1,536'),
    ({'parameters': 1.02}, 'parameters, expected '),
    ({'persistent': config.PersistentConfig()}, 'it is no baseline'),
  ],
)
def test_a_baseline_that_does_not_compare_is_refused(run, ship, no_results, changes, problem):
  with pytest.raises(errors.BadInput, match=re.escape(problem)):
    ship(baseline_of(run, **changes))
  assert not list(ship_model.pretrained.FOLDER.glob('*'))


@pytest.mark.full
def test_too_many_bytes_are_refused(run, ship, no_results, monkeypatch):
  monkeypatch.setattr(ship_model, 'MAX_BYTES', 10_000)
  with pytest.raises(errors.BadInput, match='bytes with this one, at most 10,000 are allowed'):
    ship(baseline_of(run))
  assert not list(pretrained.FOLDER.iterdir())


@pytest.mark.full
def test_another_command_is_refused(run, ship, tmp_path):
  command = f'--config={tmp_path}/config.py --config.training.steps=13'
  with bad_input(f'--command={command} trains with training.steps=13, the run has 12'):
    ship(baseline_of(run), command)
  with pytest.raises(errors.BadInput, match='expected --config=FILE and --config.KEY=VALUE'):
    ship(baseline_of(run), '--workdir=run')
  with pytest.raises(errors.BadInput, match='expected a-z, 0-9 and _'):
    ship(baseline_of(run), name='../tiny')


@each(
  'section, key, value, problem',
  [
    ('data', 'corpus', 'cbt', "data.corpus='cbt', whose licence is unknown"),
    ('data', 'vocabulary_path', 'their.model', 'data.vocabulary_path=their.model, whose licence'),
    (None, 'init_from', 'runs/theirs', 'init_from=runs/theirs, whose licence'),
    (None, 'finetune', True, 'is fine-tuned'),
  ],
)
def test_a_run_of_unknown_origin_is_refused(run, section, key, value, problem):
  changes = {key: value}
  if section is not None:
    changes = {section: dataclasses.replace(getattr(run.config, section), **changes)}
  run = dataclasses.replace(run, config=dataclasses.replace(run.config, **changes))
  with pytest.raises(errors.BadInput, match=re.escape(problem)):
    ship_model.check_run(run)


def test_an_unfinished_run_is_refused(run, trained):
  training = dataclasses.replace(run.config.training, steps=20)
  run = dataclasses.replace(run, config=dataclasses.replace(run.config, training=training))
  with bad_input(f'{trained} has 12 of 20 steps: train it to the end'):
    ship_model.check_run(run)


def test_models_of_the_package_are_whole_and_small():
  size, descriptions = 0, pretrained.pretrained()
  for name in pretrained.names():
    folder = pretrained.find(name)  # verifies the checksums
    model = check_card(folder)
    assert (model['name'], model['description']) == (name, descriptions[name])
    assert model['bytes'] == (folder / 'model.safetensors').stat().st_size
    size += sum(path.stat().st_size for path in folder.iterdir())
  assert size <= ship_model.MAX_BYTES


def test_models_of_other_packages_have_cards():
  for name in pretrained.external_names():
    folder = pretrained.FOLDER / name
    model = json.loads((folder / 'model.json').read_text(encoding='utf-8'))
    card = (folder / 'MODEL_CARD.md').read_text(encoding='utf-8')
    assert model['name'] == name and model['package']['install'] in card
    for words in (model['licence'], f'{model["parameters"]:,}', f'{model["bytes"]:,}'):
      assert words in card
    assert sorted(path.name for path in folder.iterdir()) == ['MODEL_CARD.md', 'model.json']


@pytest.mark.parametrize('name', pretrained.names())
def test_commands_of_cards_train_the_models_of_the_package(name):
  folder = pretrained.FOLDER / name
  model = json.loads((folder / 'model.json').read_text(encoding='utf-8'))
  command = model['training']['command'].removeprefix('python -m ngrammer_jax.train ')
  trained = config.load(folder / 'config.json')
  resolved = ship_model.resolve_command(f'{command} --config.data.path=/data')
  data = dataclasses.replace(resolved.data, path=None, matched_vocabulary_size=None)
  # Three defaults have changed. Without a weight decay, nothing decays.
  unchanged = {name: getattr(trained.model, name) for name in ('scan_layers', 'remat')}
  model = dataclasses.replace(resolved.model, **unchanged)
  assert trained.optimizer.weight_decay == 0
  optimizer = dataclasses.replace(resolved.optimizer, weight_decay_on='all')
  changed = dataclasses.replace(resolved, data=data, model=model, optimizer=optimizer)
  assert changed == trained


@pytest.mark.slow
@pytest.mark.parametrize('name', pretrained.names())
def test_models_of_the_package_have_the_results_of_their_cards(name):
  run = ngrammer_jax.load_pretrained(name)
  model = json.loads((run.workdir / 'model.json').read_text(encoding='utf-8'))
  path = None if model['corpus'] == 'sotu' else str(data_root('data'))
  data = dataclasses.replace(run.config.data, path=path)
  run = dataclasses.replace(run, config=dataclasses.replace(run.config, data=data))
  expected = model['test']['bits_per_byte']
  assert run.evaluate('test')['bits_per_byte'] == pytest.approx(expected, rel=1e-4)
