"""A run as a model of lm_eval: its scores and texts are those of the methods of the run."""

import dataclasses
import json
import pathlib
import sys
import types

import pytest

from ngrammer_jax import errors
from ngrammer_jax.config.finetune import FinetuneConfig
from ngrammer_jax.config.segment_memory import MemoryConfig
from ngrammer_jax.tasks.lm_eval import __main__ as command
from tests.checks import assert_close, bad_input
from tests.tasks import harness_cases, superglue_files

TASKS = pathlib.Path(__file__).parents[2] / 'studies' / 'lm_eval'


@pytest.fixture
def harness(trained, one_device):
  """The model of the harness for a run with bytes as tokens."""
  pytest.importorskip('lm_eval', reason='lm_eval is not installed: pip install lm_eval')
  from ngrammer_jax.tasks.lm_eval import model

  return model.HarnessModel(workdir=str(trained))


def requests(*arguments):
  return [types.SimpleNamespace(args=args) for args in arguments]


def test_without_the_harness_its_package_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'lm_eval', None)
  with pytest.raises(errors.BadInput, match=r'needs the harness .*"ngrammer_jax\[lm-eval\]"$'):
    command.main([])


def test_scores_and_texts_are_those_of_the_run(harness, monkeypatch):
  run, context = harness.run, 'the union'
  assert harness.max_length == 16
  from ngrammer_jax.tasks.lm_eval import model

  assert model.HarnessModel(workdir=str(run.workdir), max_length=24).max_length == 24
  with_memory = dataclasses.replace(run.config.model, memory=MemoryConfig(length=10))
  with_memory = dataclasses.replace(run, config=dataclasses.replace(run.config, model=with_memory))
  assert model._segment_length(with_memory, 24) == 14
  with bad_input(
    'max_length=10 in --model_args leaves no token beside the segment memory of 10 tokens: use at '
    'least 11'
  ):
    model._segment_length(with_memory, 10)
  with monkeypatch.context() as patch:
    harness_cases.score_in_one_program(patch, 16, choices=2)
    pairs = [(context, ' of'), (context, ' is'), ('the ', 'union'), ('', 'the')]
    scores = harness.loglikelihood(requests(*pairs))
    # The harness moves the spaces at the end of a context into the continuation.
    assert scores == list(map(tuple, run.score_pairs([*pairs[:2], ('the', ' union'), pairs[3]])))
    texts = 'the states', 'union'
    rolling = harness.loglikelihood_rolling(requests(*((text,) for text in texts)))
    assert_close(rolling, [-score.nats.sum() for score in run.score(texts)], 1e-4)
    (long,) = harness.loglikelihood_rolling(requests((context * 4,)))
    ids = list((context * 4).encode())
    windows = [
      ([harness.prefix_token_id], ids[:16]),
      ([ids[15]], ids[16:32]),
      (ids[19:32], ids[32:]),
    ]
    assert_close(long, sum(score.log_likelihood for score in run.score_pairs(windows)), 1e-4)

  # Of one row, as below: batches are in test_lm_eval_oracle.py.
  harness.batch_size = 1
  greedy = [run.generate([text], 6, temperature=0)[0].text for text in (context, 'is')]
  options = {'until': [], 'max_gen_toks': 6}
  stop = greedy[1][2]
  asked = [(context, options), ('is', options), ('is', options | {'until': [stop]})]
  long = f'{context} {context}'
  # A long context loses its first tokens, and the document start before them.
  (cut,) = run.generate([list(long[-10:].encode())], 6, temperature=0)
  assert harness.generate_until(requests(*asked, (long, options))) == [
    *greedy, greedy[1].partition(stop)[0], cut.text
  ]  # fmt: skip


def test_sampled_repeats_differ_and_other_options_are_refused(harness):
  sampled = {'until': [], 'max_gen_toks': 6, 'temperature': 1.0, 'do_sample': True}
  harness.batch_size = 1
  first, second = harness.generate_until(requests(('is', sampled), ('is', sampled)))
  assert first != second
  with bad_input(
    'the task generates with num_beams=4, which is not supported: change it with --gen_kwargs; '
    'supported: until, max_gen_toks, do_sample, temperature, top_k, top_p, min_p, '
    'repetition_penalty'
  ):
    harness.generate_until(requests(('is', sampled), ('is', sampled | {'num_beams': 4})))
  with bad_input(
    'max_gen_toks=16 new tokens leave no room for a context in the 16 tokens that the model reads: '
    'lower it with --gen_kwargs, or raise max_length in --model_args'
  ):
    harness.generate_until(requests(('is', {'until': [], 'max_gen_toks': 16})))
  assert harness.generate_until(requests(('is', {'until': None, 'max_gen_toks': 0}))) == ['']


@pytest.mark.full
def test_evaluate_ranks_as_the_harness(harness, tmp_path, monkeypatch, capsys):
  run = harness.run
  folder = superglue_files.write(tmp_path, 'RTE', val=superglue_files.rte(12))
  arguments = ['--model_args', f'workdir={run.workdir}', 'max_length=256', '--tasks=ngrammer_rte']
  arguments += [f'--include_path={TASKS}', '--metadata', json.dumps({'superglue_dir': str(folder)})]
  monkeypatch.setattr(sys, 'argv', sys.argv)
  command.main([*arguments, '--log_samples', f'--output_path={tmp_path / "out"}'])
  assert 'ngrammer_rte' in capsys.readouterr().out
  (path,) = (tmp_path / 'out').rglob('samples_ngrammer_rte_*.jsonl')
  samples = sorted(map(json.loads, path.read_text().splitlines()), key=lambda line: line['doc_id'])
  assert samples[1]['arguments']['gen_args_0']['arg_0'] == (
    'Premise: It is very snow.\nHypothesis: rain\nDoes the hypothesis follow?\nAnswer:'
  )

  from ngrammer_jax.tasks.superglue import finetuning

  config = dataclasses.replace(
    run.config,
    training=dataclasses.replace(run.config.training, segment_length=256),
    data=dataclasses.replace(run.config.data, superglue_dir=str(folder)),
    finetune=FinetuneConfig(task='rte', format='question'),
  )
  result, lines, _ = finetuning.evaluate(dataclasses.replace(run, config=config), 'validation')
  assert result['n'] == 12
  for sample, line in zip(samples, lines, strict=True):
    scores = [float(score) for (score, _), *_ in sample['resps']]
    assert line['answer'] == ('yes', 'no')[scores[1] > scores[0]]
    assert_close(line['score'], max(scores), 1e-4)
  correct = [sample['acc'] for sample in samples]
  assert result['accuracy'] == pytest.approx(100 * sum(correct) / 12)


def test_models_are_named_as_in_evaluate(harness):
  make, run = type(harness), harness.run
  with bad_input(
    '--model_args size: expected workdir=DIR or pretrained=NAME, and possibly adapter=FOLDER, '
    'step=N, max_length=N, add_bos_token=True or False, or prefix_token_id=N'
  ):
    make(workdir=run.workdir, size=3)
  with bad_input(
    '--model_args : expected workdir=DIR or pretrained=NAME, and possibly adapter=FOLDER, step=N, '
    'max_length=N, add_bos_token=True or False, or prefix_token_id=N'
  ):
    make(device='cpu')
  assert make(workdir=run.workdir, step=12, batch_size=3, max_batch_size=9).batch_size == 3
  assert make(workdir=run.workdir, batch_size='auto:4').batch_size == 8
  with bad_input('--batch_size=0: expected a whole number from 1 on, or auto'):
    make(workdir=run.workdir, batch_size=0)
  assert make(workdir=run.workdir, prefix_token_id=3).prefix_token_id == 3
  with bad_input('prefix_token_id: expected a text, or a list of token ids from 0 to 256'):
    make(workdir=run.workdir, prefix_token_id=257)


@pytest.mark.parametrize(('document_end', 'expected'), [(0, 0), (3, 3), (None, 256)])
def test_the_end_of_a_text_may_have_the_id_0(harness, monkeypatch, document_end, expected):
  monkeypatch.setattr(harness.run.vocabulary, 'document_end', document_end, raising=False)
  assert harness.eot_token_id == expected
