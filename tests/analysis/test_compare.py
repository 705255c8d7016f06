"""`analyze compare`: equal to a loop over tokens and pairs, with the losses of `evaluate`."""

import dataclasses
import math
import statistics
import types

import numpy as np
import pytest

from ngrammer_jax import analyze, config, errors, runs
from ngrammer_jax.analysis import compare, token_losses
from ngrammer_jax.checkpoints import workdirs
from ngrammer_jax.models import model_variables
from ngrammer_jax.system import json_files, storage
from ngrammer_jax.training import model_size
from tests import published_folders
from tests.checks import bad_input

TOKENS = 64 * 256


def fake_runs(count, tokens=TOKENS):
  text = types.SimpleNamespace(tokens=np.zeros(tokens))
  return [
    types.SimpleNamespace(
      workdir=f'runs/{i}',
      split=lambda name: text,
      restored=types.SimpleNamespace(step=i, params={'w': np.zeros(1000 + i)}),
      vocabulary=types.SimpleNamespace(size=256),
      config=config.Config(seed=i),
    )
    for i in range(count)
  ]


def score_with(monkeypatch, losses):
  """Fake runs have these losses, and sizes by their numbers; returns the list of scored runs."""
  scored = []

  def token_losses_of(run, text, tokens):
    scored.append(run.workdir)
    return losses[run.restored.step][:tokens]

  monkeypatch.setattr(token_losses, 'token_losses', token_losses_of)
  size = lambda run: (model_size.ModelSize(1000 + run.restored.step, run.restored.step), 2e6)
  monkeypatch.setattr(compare, '_size', size)
  return scored


def test_runs_that_differ_in_more_than_the_seed_have_labels_of_their_own(monkeypatch):
  """A number at the end of a name may be a size."""
  score_with(monkeypatch, np.random.default_rng(0).random((4, TOKENS)))
  all_runs = fake_runs(4)
  names = ['wide64', 'wide128', 'plain0', 'plain1']
  result = compare.analyze(all_runs[:2], all_runs[2:], names)
  assert list(result['labels']) == ['wide', 'plain']
  for run, width in zip(all_runs, (64, 128), strict=False):
    run.config = dataclasses.replace(run.config, model=config.ModelConfig(width=width))
  result = compare.analyze(all_runs[:2], all_runs[2:], names)
  assert list(result['labels']) == ['wide64', 'wide128', 'plain'] and 'mean' not in result


@pytest.mark.parametrize(
  'shuffles, labels',
  [((0, 1), ['streamed', 'plain']), ((None, 1), ['streamed0', 'streamed1', 'plain'])],
)
def test_shuffle_seeds_are_seeds_of_one_label(monkeypatch, shuffles, labels):
  """Text in its stored order is no seed."""
  score_with(monkeypatch, np.random.default_rng(0).random((4, TOKENS)))
  all_runs = fake_runs(4)
  for run, shuffle in zip(all_runs, shuffles, strict=False):
    run.config = dataclasses.replace(run.config, data=config.DataConfig(shuffle=shuffle))
  names = ['streamed0', 'streamed1', 'plain0', 'plain1']
  assert list(compare.analyze(all_runs[:2], all_runs[2:], names)['labels']) == labels


def test_labels_have_means_and_errors(monkeypatch):
  """Two labels of three seeds with the same three baselines, compared with loops."""
  losses = np.random.default_rng(0).random((9, TOKENS))
  losses[3:6] -= np.array([[0.1], [0.15], [0.12]])
  scored = score_with(monkeypatch, losses)
  runs_of = fake_runs(9)
  names = [f'{name}.{seed}' for name in ('wide', 'engram', 'plain') for seed in range(3)]
  arguments = runs_of[:6], runs_of[6:] * 2, [*names, *names[6:]]
  result = compare.analyze(*arguments)
  assert list(result['labels']) == ['wide', 'engram', 'plain'] and 'mean' not in result
  assert sorted(scored) == sorted(run.workdir for run in runs_of)  # each of them once
  for i, (label, statistics_of) in enumerate(result['labels'].items()):
    means = [statistics.fmean(losses[3 * i + seed]) for seed in range(3)]
    assert statistics_of['runs'] == 3
    assert statistics_of['loss'] == pytest.approx(statistics.fmean(means))
    assert statistics_of['loss_error'] == pytest.approx(statistics.stdev(means) / math.sqrt(3))
    if label != 'plain':
      differences = [means[seed] - losses[6 + seed].mean() for seed in range(3)]
      assert statistics_of['mean'] == pytest.approx(statistics.fmean(differences))
      error = statistics.stdev(differences) / math.sqrt(3)
      assert statistics_of['seed_error'] == pytest.approx(error)
  table = compare.format_table(result)
  (engram,) = (line for line in table.splitlines() if line.startswith('engram  '))
  assert ' ± ' in engram and engram.endswith('excludes 0')
  (row,) = (
    line.split() for line in table.splitlines() if line.startswith('engram.1 ') and '2.00' in line
  )
  assert row[:5] == ['engram.1', '4', '1,004', '4', '2.00']
  named = compare.analyze(*arguments, labels=['a'] * 3 + ['b'] * 3 + ['c'] * 6)
  assert [*named['labels'].values()][:2] == [result['labels'][name] for name in ('wide', 'engram')]
  assert list(named['labels']) == ['a', 'b', 'c']
  with pytest.raises(errors.BadInput, match="^runs/6 is in 2 pairs .* with the label 'a': "):
    compare.analyze(*arguments, labels=['a'] * 12)


def test_errors_of_the_text_and_of_the_seeds(monkeypatch):
  """Of three pairs with random losses, compared with loops."""
  losses = np.random.default_rng(0).random((6, TOKENS))
  losses[:3] -= np.array([[0.4], [0.42], [0.47]])
  scored = score_with(monkeypatch, losses)
  everything = fake_runs(6)
  labels = 'rrrbbb'
  result = compare.analyze(everything[:3], everything[3:], 'abcdef', labels=labels)
  assert sorted(scored) == sorted(run.workdir for run in everything)
  assert (result['split'], result['tokens']) == ('validation', TOKENS)
  differences = []
  for i, pair in enumerate(result['pairs']):
    assert (pair['run'], pair['baseline']) == ('abcdef'[i], 'abcdef'[3 + i])
    assert (pair['steps'], pair['parameters']) == ([i, 3 + i], [1000 + i, 1003 + i])
    each = [losses[i][t] - losses[3 + i][t] for t in range(TOKENS)]
    blocks = [statistics.fmean(each[t : t + 256]) for t in range(0, TOKENS, 256)]
    assert pair['difference'] == pytest.approx(statistics.fmean(each))
    assert pair['difference'] == pytest.approx(pair['loss'] - pair['baseline_loss'])
    assert pair['text_error'] == pytest.approx(statistics.stdev(blocks) / 8)
    differences.append(pair['difference'])
  error = statistics.stdev(differences) / math.sqrt(3)
  assert result['mean'] == pytest.approx(statistics.fmean(differences))
  assert result['seed_error'] == pytest.approx(error)
  from scipy import stats

  expected = stats.t.interval(0.95, 2, loc=result['mean'], scale=error)
  assert result['interval'] == pytest.approx(list(expected))
  table = compare.format_table(result)
  assert table.splitlines()[-2].startswith('r  ') and table.splitlines()[-2].endswith('excludes 0')
  assert table.splitlines()[4].split()[:5] == ['c', '2', '1,002', '2', '2.00']
  losses[:3] += 0.43  # of different signs
  again = compare.analyze(
    everything[:3], everything[3:], 'abcdef', max_tokens=TOKENS - 1, labels=labels
  )
  assert compare.format_table(again).splitlines()[-2].endswith('includes 0')
  assert again['pairs'][0]['text_error'] is None  # blocks are too short
  assert 'no error of the text: it needs at least 16,384 tokens' in compare.format_table(again)
  losses[:] = 1
  equal = compare.analyze(everything[:2], everything[2:4], 'abcd', labels='rrbb')
  assert equal['interval'] == [0, 0]
  assert compare.format_table(equal).splitlines()[-2].endswith('includes 0')


@pytest.mark.slow
def test_losses_are_those_of_evaluate(one_device, trained, capsys, tmp_path):
  later, earlier = (runs.load_run(trained, step) for step in (12, 4))
  result = compare.analyze([later], [earlier], ['later', 'earlier'])
  (pair,) = result['pairs']
  for run, key in ((later, 'loss'), (earlier, 'baseline_loss')):
    expected = run.evaluate('validation')['nll_nats_per_token']
    assert pair[key] == pytest.approx(expected, rel=1e-6)
  assert pair['steps'] == [12, 4] and pair['difference'] < 0
  lines = compare.format_table(result).splitlines()
  assert [line.split()[0] for line in lines[2:4]] == ['later', 'earlier']
  flags = [f'--workdir={trained}', f'--baseline={trained}', '--max_tokens=100', '--split=test']
  analyze.main(['compare', *flags, f'--output={tmp_path}/new/result.json'])
  printed = capsys.readouterr().out
  assert printed.startswith('100 tokens of test') and '+0.0000' in printed and 'one pair' in printed
  assert printed.endswith(f'wrote {tmp_path}/new/result.json\n')
  expected = compare.analyze([later], [later], [str(trained)] * 2, 'test', max_tokens=100)
  assert json_files.read(tmp_path / 'new' / 'result.json') == expected
  assert (
    expected['pairs'][0]['parameters']
    == [model_variables.count_elements(later.restored.params)] * 2
  )
  with bad_input(f'--output={tmp_path} is a folder: name a file, such as {tmp_path}/compare.json'):
    analyze.main(['compare', '--workdir=no/run', '--baseline=no/run', f'--output={tmp_path}'])


def test_streams_are_those_of_the_evaluation(one_device, trained):
  run = runs.load_run(trained)
  streams = run.config.training.batch_size + 1  # more than a batch
  evaluation = dataclasses.replace(run.config.evaluation, streams=streams)
  run = dataclasses.replace(run, config=dataclasses.replace(run.config, evaluation=evaluation))
  text = run.split('validation')
  losses_T = token_losses.token_losses(run, text, len(text.tokens))
  expected = run.evaluate('validation')
  assert expected['protocol']['streams'] == streams
  assert losses_T.mean() == pytest.approx(expected['nll_nats_per_token'], rel=1e-6)
  training = dataclasses.replace(run.config.training, batch_size=streams)  # one batch
  other = dataclasses.replace(run, config=dataclasses.replace(run.config, training=training))
  in_one_batch_T = token_losses.token_losses(other, text, len(text.tokens), run.variables)
  np.testing.assert_allclose(losses_T, in_one_batch_T, rtol=1e-5)


def test_a_published_model_is_scored_as_the_run_that_it_is_compared_with(tiny, tmp_path):
  published_folders.write(tmp_path / 'model')
  published = runs.load_run(tmp_path / 'model')
  vocabulary = {'vocabulary': 'tokenizer', 'vocabulary_path': str(tmp_path / 'model')}
  config = tiny({'layers': 1})
  config = dataclasses.replace(config, data=dataclasses.replace(config.data, **vocabulary))
  (tmp_path / 'run').mkdir()
  workdirs.write(tmp_path / 'run', config, published.vocabulary, None)
  options = types.SimpleNamespace(workdir=[tmp_path / 'run'], step='newest')
  options.baseline = [storage.path(f'hf:{tmp_path}/model')]
  (run, baseline), names = analyze._open(options)
  assert names == ['run', 'model'] and baseline.config.training == run.config.training
  assert baseline.config.model == published.config.model
  token_losses.check_same_text(
    [run, baseline], [each.split('validation') for each in (run, baseline)], 'compare'
  )


def test_bad_input():
  everything = fake_runs(3)
  with bad_input(
    '--workdir is given 2 times, but --baseline 1 times: set one baseline for each run, in the '
    'same order, such as that with the same seed'
  ):
    compare.analyze(everything[:2], everything[2:], 'abc')
  message = (
    "runs/2 is in 2 pairs of --workdir and --baseline with the label 'x': the pairs of a label "
    'must be different trainings, such as those of other seeds; name other labels with --label'
  )
  with bad_input(message):
    compare.analyze(everything[:2], everything[2:] * 2, 'abcd', labels='xxyy')
  with bad_input(message.replace('/2', '/1')):  # a run here, a baseline there
    compare.analyze(everything[:2], everything[1:], 'abcd', labels='xxyy')
  everything[0].workdir = 'runs/../runs/1'
  with bad_input(message.replace('/2', '/../runs/1')):
    compare.analyze(everything[:2], everything[2:] * 2, 'abcd', labels='xxyy')
  everything[0].workdir = 'runs/0'
  with bad_input('--max_tokens=0 must be at least 1'):
    compare.analyze(everything[:1], everything[1:2], 'ab', max_tokens=0)
  everything[1].vocabulary.size = 300
  with bad_input(
    'runs/1 and runs/0 read different tokens: compare needs runs with the same text and vocabulary'
  ):
    compare.analyze(everything[:1], everything[1:2], 'ab')
