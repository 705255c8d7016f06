"""The models of the package: names, checksums and commands, with none and with a tiny one."""

import dataclasses
import hashlib
import importlib
import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ngrammer_jax
from ngrammer_jax import (
  command_line,
  errors,
  evaluate,
  export,
  flags,
  generate,
  runs,
)
from ngrammer_jax.inference import language_modeling
from ngrammer_jax.runs import pretrained
from ngrammer_jax.training import init_from
from tests.checks import bad_input
from tests.loops import each


@pytest.fixture(scope='session')
def tiny_weights(tmp_path_factory):
  """A folder for the models of the package, which `weights` fills once."""
  return tmp_path_factory.mktemp('weights')


@pytest.fixture
def weights(trained, tiny_weights, one_device, monkeypatch):
  """The only model of the package is `tiny`, which must not be changed."""
  folder = tiny_weights / 'tiny'
  if not folder.exists():
    export.main([f'--workdir={trained}', f'--output={folder}', '--dtype=bfloat16'])
    (folder / 'model.json').write_text('{"description": "A tiny N-Grammer."}\n')
    (folder / 'SHA256SUMS').write_text(pretrained.compute_checksums(folder))
  monkeypatch.setattr(pretrained, 'FOLDER', tiny_weights)
  return folder


@pytest.fixture
def damaged(tmp_path, monkeypatch):
  """Another model without variables, to be damaged."""
  folder = tmp_path / 'weights' / 'other'
  folder.mkdir(parents=True)
  for name in ('config.json', 'model.safetensors', 'model.json'):
    (folder / name).write_text(f'{{"description": "{name}"}}')
  (folder / 'SHA256SUMS').write_text(pretrained.compute_checksums(folder))
  monkeypatch.setattr(pretrained, 'FOLDER', folder.parent)
  return folder


def test_an_installation_without_models_says_so(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(pretrained, 'FOLDER', tmp_path / 'none')
  assert ngrammer_jax.pretrained() == {}
  with bad_input('no pretrained model has the name tiny: available: none in this installation'):
    ngrammer_jax.load_pretrained('tiny')
  with pytest.raises(SystemExit):
    generate.main(['--help'])
  assert 'model of the package: none in this installation' in capsys.readouterr().out
  assert pretrained.format_list().endswith('\n  none in this installation')


def test_models_are_listed_without_jax(weights, capsys):
  assert ngrammer_jax.pretrained() == {'tiny': 'A tiny N-Grammer.'}
  with pytest.raises(SystemExit):
    command_line.parse(flags.make_parser('train', ''), ['--list'])
  assert capsys.readouterr().out.endswith('--pretrained=NAME\n  tiny: A tiny N-Grammer.\n')
  code = (
    'import sys, ngrammer_jax; ngrammer_jax.pretrained(); '
    "sys.exit(str({'jax', 'flax', 'numpy', 'orbax'} & set(sys.modules)))"
  )
  result = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
  assert result.stderr == 'set()\n'


@each(
  'name, hint',
  [
    ('tinny', 'did you mean tiny?'),
    ('enwik8', 'available: tiny'),
    ('../tiny', 'did you mean tiny'),
  ],
)
def test_an_unknown_name_is_answered_with_the_nearest(weights, name, hint):
  with pytest.raises(errors.BadInput) as caught:
    ngrammer_jax.load_pretrained(name)
  assert str(caught.value).startswith(f'no pretrained model has the name {name}: {hint}')


def test_a_model_is_the_run_that_was_exported(trained, weights):
  run, shipped = runs.load_run(trained), ngrammer_jax.load_pretrained('tiny')
  assert shipped.config == run.config and int(shipped.state.step) == 12

  def assert_rounded(exact, loaded):
    assert loaded.dtype == exact.dtype == jnp.float32
    np.testing.assert_array_equal(loaded, np.asarray(exact).astype(jnp.bfloat16))

  jax.tree.map(assert_rounded, run.state.params, shipped.state.params)
  jax.tree.map(np.testing.assert_array_equal, run.state.codebook, shipped.state.codebook)
  count = sum(leaf.size for leaf in jax.tree.leaves(run.state.params))
  codebook = sum(leaf.nbytes for leaf in jax.tree.leaves(run.state.codebook))
  size = (weights / 'model.safetensors').stat().st_size
  assert 2 * count + codebook < size < 2 * count + codebook + 10_000
  with bad_input(f'--step=8: {weights} has only step 12'):
    _ = flags.load_run(parse('--pretrained=tiny', '--step=8')).state


def parse(*arguments):
  parser = flags.make_parser('subcommand', '')
  flags.add_run(parser)
  return parser.parse_args(arguments)


@each('arguments', [(), ('--workdir=run', '--pretrained=tiny')])
def test_either_a_workdir_or_a_pretrained_model(capsys, arguments):
  with pytest.raises(SystemExit):
    parse(*arguments)
  assert '--pretrained' in capsys.readouterr().err.splitlines()[-1]


def change(name, content):
  return lambda folder: (folder / name).write_bytes(content)


@each(
  'damage, problem',
  [
    (change('model.safetensors', b'{'), 'model.safetensors differs from SHA256SUMS; '),
    (change('model.json', b'x'), 'model.json differs from SHA256SUMS; '),
    (lambda folder: (folder / 'config.json').unlink(), 'config.json differs from SHA256SUMS; '),
    (change('vocabulary.json', b'{}'), 'vocabulary.json differs from SHA256SUMS; '),
    (change('SHA256SUMS', b''), 'config.json differs from SHA256SUMS; '),
    (change('SHA256SUMS', b'\xff' * 9), "'utf-8' codec can't decode byte 0xff in position 0"),
  ],
)
def test_damage_is_one_sentence(damaged, damage, problem):
  files = {path: path.read_bytes() for path in damaged.iterdir()}
  assert pretrained.find('other') == damaged
  damage(damaged)
  with pytest.raises(errors.BadInput) as caught:
    pretrained.find('other')
  message = str(caught.value)
  assert message.startswith(f'the pretrained model in {damaged} is damaged: {problem}')
  assert message.endswith('; install ngrammer_jax again')
  for path in damaged.iterdir():
    path.unlink()
  for path, content in files.items():
    path.write_bytes(content)


def test_damaged_descriptions_are_named(damaged):
  (damaged / 'model.json').write_text('[')
  with pytest.raises(errors.BadInput, match='other is damaged: Expecting value: line 1 '):
    ngrammer_jax.pretrained()
  (damaged / 'model.json').write_text('{}')
  with pytest.raises(errors.BadInput, match="other is damaged: no 'description'; install"):
    ngrammer_jax.pretrained()


@pytest.fixture
def external(damaged, monkeypatch):
  """A model of another package, which cannot be imported; returns the folder of that package."""
  folder = damaged.parent.parent / 'site' / 'foreign_weights'
  folder.mkdir(parents=True)
  (folder / '__init__.py').write_text('raise RuntimeError("imported")')
  (folder / 'model.gguf').write_bytes(b'weights')
  digest = hashlib.sha256(b'weights').hexdigest()
  package = {'module': 'foreign_weights', 'file': 'model.gguf', 'sha256': digest, 'install': 'pip'}
  (damaged.parent / 'foreign').mkdir()
  description = json.dumps({'description': 'Foreign.', 'package': package})
  (damaged.parent / 'foreign' / 'model.json').write_text(description)
  monkeypatch.syspath_prepend(str(folder.parent))
  return folder


def test_a_model_of_another_package(external):
  assert pretrained.find('foreign') == external / 'model.gguf'
  assert ngrammer_jax.pretrained() == {'other': 'model.json', 'foreign': 'Foreign.'}
  assert pretrained.names() == ['other']
  with bad_input('no pretrained model has the name foreigm: did you mean foreign?'):
    pretrained.find('foreigm')
  (external / 'model.gguf').write_bytes(b'other')
  with pytest.raises(errors.BadInput, match='is not the file of foreign: its SHA-256 is'):
    pretrained.find('foreign')
  (external / 'model.gguf').unlink()
  message = 'the weights of foreign are in another package, not installed: pip'
  with bad_input(message):
    ngrammer_jax.load_pretrained('foreign')
  shutil.rmtree(external)
  importlib.invalidate_caches()
  with bad_input(message):
    pretrained.find('foreign')


@pytest.mark.skipif(shutil.which('sha256sum') is None, reason='sha256sum is not installed')
def test_checksums_are_those_of_the_usual_tool(damaged):
  command = ['sha256sum', '--check', '--strict', 'SHA256SUMS']
  subprocess.run(command, cwd=damaged, check=True, capture_output=True)


@pytest.mark.full
def test_a_pretrained_model_scores_a_text(weights, trained, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  text = tmp_path / 'speech.txt'
  text.write_text('the union is strong\n' * 20)
  arguments = ['--pretrained=tiny', f'--text={text}', '--config.evaluation.streams=1']
  assert evaluate.main(arguments) == 0
  table = capsys.readouterr().out
  assert table.splitlines()[1].split()[:2] == ['text_speech', '400'] and 'wrote' not in table
  assert sorted(path.name for path in tmp_path.iterdir()) == ['speech.txt']
  assert evaluate.main([*arguments, '--output=results']) == 0
  assert capsys.readouterr().out == f'{table}wrote results/text_speech.json\n'
  result = json.loads((tmp_path / 'results' / 'text_speech.json').read_text())
  (score,) = ngrammer_jax.load_pretrained('tiny').score(text.read_text())
  assert result['text'] == str(text) and result['tokens'] == len(score.tokens) == 400
  assert result['step'] == 12 and result['bits_per_byte'] == pytest.approx(score.bits_per_byte)


@pytest.mark.full
def test_a_short_text_is_one_stream(weights, tmp_path):
  text, run = tmp_path / 'short.txt', ngrammer_jax.load_pretrained('tiny')
  text.write_text('the union')
  assert run.config.evaluation.streams > 1
  result, (score,) = run.evaluate_file(text), run.score(text.read_text())
  assert result['protocol']['streams'] == 1
  long = dataclasses.replace(run.config.evaluation, segment_length=2048)
  run = dataclasses.replace(run, config=dataclasses.replace(run.config, evaluation=long))
  again = run.evaluate_file(text)
  assert again['protocol']['segment_length'] == 128  # not 2048
  assert again['nll_nats_per_token'] == pytest.approx(result['nll_nats_per_token'])
  assert result['bits_per_byte'] == pytest.approx(score.bits_per_byte)


def test_where_the_corpus_is_may_be_set(weights, trained, tmp_path, monkeypatch):
  copy, calls = tmp_path / 'moved.txt', []
  monkeypatch.setenv('NGRAMMER_JAX_CACHE', str(tmp_path / 'cache'))
  copy.write_bytes((trained.parent / 'text.txt').read_bytes())
  record = lambda engine, variables, split, *_: calls.append(split)
  monkeypatch.setattr(language_modeling, 'evaluate', record)
  with pytest.raises(TypeError):  # there is no result
    evaluate.main(['--pretrained=tiny', f'--config.data.path={copy}'])
  assert bytes(calls[0].tokens.astype('u1')) == copy.read_bytes()[-len(calls[0].tokens) :]
  copy.write_text('the union is strong\n' * 100)
  with pytest.raises(errors.BadInput, match=f'another text: data.path={copy} has the content hash'):
    evaluate.main(['--pretrained=tiny', f'--config.data.path={copy}'])


@each(
  'content, problem',
  [(None, ': no such file; expected a text file'), (b'', ' is empty; expected text')],
)
def test_texts_that_cannot_be_scored(weights, tmp_path, content, problem):
  text = tmp_path / 'text.txt'
  if content is not None:
    text.write_bytes(content)
  with bad_input(f'{text}{problem}'):
    evaluate.main(['--pretrained=tiny', f'--text={text}'])
  with bad_input('--text cannot be combined with --cloze: omit one of them'):
    evaluate.main(['--pretrained=tiny', f'--text={text}', '--cloze=questions'])


def test_a_pretrained_model_continues_a_prompt(weights, monkeypatch, capsys):
  def completions(
    run, prompts, config, tokens, seed, context, on_text, stop, chat, special, system
  ):
    assert run.workdir == weights and not chat and not special and system is None
    for _ in range(tokens):
      on_text(0, ' union')
    yield

  monkeypatch.setattr(runs.Run, 'completions', completions)
  generate.main(['--pretrained=tiny', '--prompt=the', '--tokens=2'])
  assert capsys.readouterr().out == 'the union union\n'
  with bad_input('no pretrained model has the name tin: did you mean tiny?'):
    generate.main(['--pretrained=tin', '--prompt=the'])


def test_the_config_of_a_pretrained_model_has_its_vocabulary(damaged):
  config = {'data': {'corpus': 'text', 'vocabulary': 'sentencepiece', 'vocabulary_size': 300}}
  (damaged / 'config.json').write_text(json.dumps(config))
  load = lambda: command_line.load_file('pretrained:other')
  with pytest.raises(errors.BadInput, match=r'^--config=pretrained:other: .* is damaged: config'):
    load()
  (damaged / 'SHA256SUMS').write_text(pretrained.compute_checksums(damaged))
  assert load() == config
  (damaged / 'vocabulary.model').write_text('pieces')
  (damaged / 'SHA256SUMS').write_text(pretrained.compute_checksums(damaged))
  path = {'vocabulary_path': str(damaged / 'vocabulary.model'), 'vocabulary_size': None}
  assert load() == {'data': config['data'] | path}
  with bad_input(
    '--config=pretrained:othr: no pretrained model has the name othr: did you mean other?'
  ):
    command_line.load_file('pretrained:othr')


@pytest.mark.full
def test_a_training_starts_from_a_pretrained_model(weights, tiny, tmp_path):
  config = tiny(init_from='pretrained:tiny')
  start = init_from.Start(config, tmp_path)
  start.check_vocabulary(ngrammer_jax.load_pretrained('tiny').vocabulary)
  source = ngrammer_jax.load_pretrained('tiny').state
  new = source.replace(step=0, params=jax.tree.map(jnp.zeros_like, source.params), opt_state='new')
  for _ in range(2):  # and again with the recorded step
    state = start(new)
    jax.tree.map(np.testing.assert_array_equal, state.params, source.params)
    assert state.step == 0 and state.opt_state == 'new'
    record = json.loads((tmp_path / 'begun_with.json').read_text())
    assert record == {'init_from': 'pretrained:tiny', 'step': 12}
  with bad_input(
    'init_from=pretrained:tinny: no pretrained model has the name tinny: did you mean tiny?'
  ):
    init_from.Start(tiny(init_from='pretrained:tinny'), tmp_path)
  with pytest.raises(errors.BadInput, match='use --config=pretrained:tiny, or omit init_from$'):
    init_from.Start(tiny({'gated': False}, init_from='pretrained:tiny'), tmp_path)
