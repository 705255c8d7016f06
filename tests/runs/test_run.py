"""The commands `evaluate` and `analyze`, and errors of runs."""

import dataclasses
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from ngrammer_jax import analyze, errors, evaluate, runs
from ngrammer_jax.analysis import gates, report_page
from ngrammer_jax.checkpoints import workdirs
from ngrammer_jax.data import mixture
from tests import published_folders
from tests.checks import bad_input


def change(workdir, **sections):
  """Changes values in the stored config of a run."""
  fields = json.loads((workdir / 'config.json').read_text())
  for section, values in sections.items():
    fields[section] |= values
  (workdir / 'config.json').write_text(json.dumps(fields))
  return workdir


def test_evaluate_writes_json_and_a_table(trained_copy, capsys):
  # The limit of validation in training does not apply to the command.
  run = change(trained_copy, evaluation={'max_tokens': 40})
  evaluate.main([f'--workdir={run}', '--split=test'])
  result = json.loads((run / 'evaluation' / 'test.json').read_text())
  tokens = mixture.prepare(runs.load_run(run).config.data).split('test').tokens
  assert result['tokens'] == len(tokens) > 40
  assert result['step'] == 12
  assert {'nll_nats_per_token', 'perplexity', 'bits_per_byte', 'top1_accuracy', 'protocol'} < set(
    result
  )
  out = capsys.readouterr().out
  assert f'{result["bits_per_byte"]:.4f}' in out


@pytest.mark.full
def test_evaluate_writes_a_result_for_each_part(trained_copy, tmp_path, capsys):
  parts = []
  for name, text in (('first', 'of the union\n'), ('second', 'strong states\n')):
    (tmp_path / f'{name}.txt').write_text(text * 60)
    parts.append({'path': str(tmp_path / f'{name}.txt'), 'weight': 1 + len(parts)})
  run = change(trained_copy, data={'path': None, 'mixture': parts})
  (run / 'corpus.json').write_text('{"content_hash": null}')
  evaluate.main([f'--workdir={run}', '--split=validation', f'--output={tmp_path}/results'])
  names = ('validation_first', 'validation_second', 'validation')
  first, second, mean = (
    json.loads((tmp_path / 'results' / f'{name}.json').read_text()) for name in names
  )
  losses = [result['nll_nats_per_token'] for result in (first, second)]
  assert mean['nll_nats_per_token'] == pytest.approx((losses[0] + 2 * losses[1]) / 3)
  assert mean['parts'] == {'first': first, 'second': second} and losses[0] != losses[1]
  assert (first['split'], mean['split'], mean['step']) == ('validation/first', 'validation', 12)
  assert mean['tokens'] == first['tokens'] + second['tokens']
  assert 'validation/second' in capsys.readouterr().out
  assert len(runs.load_run(run).split('validation').tokens) == mean['tokens'] + 1
  with bad_input(
    '--split=test/third: data.mixture has no such split to evaluate; available: train, validation, '
    'test, train/first, validation/first, test/first, train/second, validation/second, test/second'
  ):
    evaluate.main([f'--workdir={run}', '--split=test/third'])


def test_a_run_is_printed_in_one_line(trained):
  assert repr(runs.load_run(trained, 12)) == f'Run(workdir={trained!r}, step=12)'


def test_all_results_of_an_analysis_are_beside_its_figure(trained, tmp_path, monkeypatch):
  result = {'step': 12, 'split': 'validation', 'tokens': 0, 'gates': []}
  monkeypatch.setattr(gates, 'analyze', lambda run, split, text: result | {'texts': [text]})
  monkeypatch.setattr(gates, 'check_applicable', lambda run: None)
  monkeypatch.setattr(gates, 'elements', lambda result: [])
  monkeypatch.setattr(gates, 'plot', lambda result, axes: None)
  monkeypatch.setattr(report_page, 'format_gates', lambda result: f'of {result["texts"]}')
  figure = tmp_path / 'other' / 'g.svg'
  analyze.main(['gates', f'--workdir={trained}', '--text=b', f'--figure={figure}'])
  assert {path.name for path in figure.parent.iterdir()} == {'g.svg', 'g.json', 'g.html'}
  assert (figure.parent / 'g.html').read_text() == "of ['b']"
  assert not list(trained.glob('gates.*'))


def test_only_evaluation_options_can_be_overridden(trained, monkeypatch):
  run, calls = trained, []

  def stop(self, split, max_tokens):
    calls.append((split, max_tokens, self.config.evaluation.protocol))
    raise InterruptedError

  with monkeypatch.context() as patch:
    patch.setattr(runs.Run, 'evaluate', stop)
    for more in (
      ['--config.evaluation.max_tokens=40', '--split=validation'],
      ['--config.evaluation.protocol=transformer_xl'],
    ):
      with pytest.raises(InterruptedError):
        evaluate.main([f'--workdir={run}', *more])
  assert calls == [('validation', 40, 'streams'), ('test', None, 'transformer_xl')]
  with bad_input(
    '--config.model.width: only evaluation.*, mesh.*, data.cache_dir, model.scan_layers, '
    'model.kernel, model.remat, model.vocabulary_chunk, data.path, data.mixture.*.path can be '
    'changed here'
  ):
    evaluate.main([f'--workdir={run}', '--config.model.width=8'])
  with bad_input('--split=tset is not one of: train, validation, test'):
    evaluate.main([f'--workdir={run}', '--split=tset'])


@pytest.mark.parametrize('source', ['--split=test', '--text={folder}/text.txt'])
def test_how_the_model_is_computed_does_not_change_a_result(trained, tmp_path, source):
  (tmp_path / 'text.txt').write_text('of the union\n' * 20)
  losses = []
  for name, options in (
    ('as trained', []),
    ('other', ['scan_layers=False', 'kernel=blocks', 'remat=full', 'vocabulary_chunk=7']),
  ):
    keys = [f'--config.model.{option}' for option in options]
    flags = [source.format(folder=tmp_path), f'--output={tmp_path / name}']
    evaluate.main([f'--workdir={trained}', *flags, *keys])
    (path,) = (tmp_path / name).glob('*.json')
    losses.append(json.loads(path.read_text())['nll_nats_per_token'])
  assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_a_folder_that_is_not_a_run_directory(tmp_path):
  with bad_input(
    f'--workdir={tmp_path} holds no config.json: not a run directory; expected the folder of '
    f'a training'
  ):
    runs.load_run(tmp_path)


def test_a_run_has_its_own_vocabulary(tiny, tmp_path):
  """That of `data.vocabulary_path` may be gone, here that of a published model."""
  folder, workdir = tmp_path / 'published', tmp_path / 'run'
  published_folders.write(folder)
  published_folders.write_settings(folder)  # with another end of a text than the tokenizer has
  config = tiny()
  data = {'vocabulary': 'tokenizer', 'vocabulary_path': str(folder)}
  data |= {'vocabulary_size': published_folders.V}
  config = dataclasses.replace(config, data=dataclasses.replace(config.data, **data))
  corpus = mixture.prepare(config.data)
  (workdir / 'checkpoints' / '4').mkdir(parents=True)
  workdirs.write(workdir, config, corpus.vocabulary, corpus.content_hash)
  assert runs.load_run(workdir).config == config
  shutil.rmtree(folder)
  run = runs.load_run(workdir)
  assert run.vocabulary.end_tokens == corpus.vocabulary.end_tokens
  tokens, expected = run.split('validation').tokens, corpus.split('validation').tokens
  np.testing.assert_array_equal(tokens, expected)
  (workdir / 'vocabulary.tokenizer.json').unlink()
  with bad_input(
    f'--workdir={workdir} has a config.json that this version of ngrammer_jax cannot read: '
    f'data.vocabulary_path={folder}: no such file'
  ):
    runs.load_run(workdir)


def test_a_run_without_a_checkpoint(trained_copy):
  run = trained_copy
  (run / 'checkpoints').rename(run / 'moved')
  with bad_input(f'--workdir={run} has no checkpoint yet'):
    runs.load_run(run).evaluate('test')


def test_a_checkpoint_of_another_model(trained):
  run = runs.load_run(trained)
  wider = dataclasses.replace(run.config.model, width=32)
  with bad_input(
    f'{run.workdir}/checkpoints/12 does not match the model: '
    'codebook/ngrammer/quantizer/centroids is float32[2, 8, 8], expected float32[2, 8, 16]'
  ):
    runs.Run(run.workdir, dataclasses.replace(run.config, model=wider)).evaluate('test')


def test_another_corpus_is_refused(trained_copy, tmp_path):
  (tmp_path / 'text.txt').write_text('something else entirely. ' * 1000)
  run = change(trained_copy, data={'path': str(tmp_path / 'text.txt')})
  with pytest.raises(errors.BadInput, match='was started on another text'):
    runs.load_run(run).evaluate('test')


LIGHT = """
import sys
import ngrammer_jax
from ngrammer_jax import evaluate, generate

workdir, output = sys.argv[1:]
run = ngrammer_jax.load_run(workdir)
run.generate('the', tokens=2)
run.score('the')
run.score_pairs([('the', ' union')])
run.evaluate('validation', max_tokens=64)
run.export(output)
evaluate.main([f'--workdir={output}', '--split=validation'])
generate.main([f'--workdir={output}', '--prompt=a', '--tokens=1'])
rooms = 'ngrammer_jax.training', 'ngrammer_jax.optimizers'
print([name for name in sys.modules if name.startswith(rooms)])
"""


@pytest.mark.full
def test_inference_loads_nothing_of_training(trained, tmp_path):
  command = [sys.executable, '-c', LIGHT, str(trained), str(tmp_path / 'out')]
  done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[-1] == '[]'
