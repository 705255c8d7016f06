"""Scores and completions of texts by a trained run, from Python and on the command line."""

import dataclasses
import functools
import io
import json
import math

import jax
import numpy as np
import pytest

import ngrammer_jax
from ngrammer_jax import evaluate, generate, runs, sharding
from ngrammer_jax.checkpoints import manifest
from ngrammer_jax.config import evaluation as evaluation_config
from ngrammer_jax.data import mixture, vocabularies
from tests.checks import bad_input

TEXTS = ['the union', '', 'strong states of the ünion is strong ' * 3]


@functools.cache
def open_run(workdir, evaluation=None):
  """Opens the run on one device; all tests share its programs."""
  run = ngrammer_jax.load_run(workdir)
  if evaluation is not None:
    config = dataclasses.replace(run.config, evaluation=evaluation)
    run = dataclasses.replace(run, config=config)
  run.__dict__['mesh'] = sharding.make_mesh(devices=jax.devices()[:1])
  return run


@pytest.fixture
def run(trained):
  return open_run(trained)


@pytest.fixture
def main(run, monkeypatch):
  """Calls the command with the shared run."""

  def load_run(workdir, step):
    assert (workdir, step) == (run.workdir, 'newest')
    return run

  monkeypatch.setattr(runs, 'load_run', load_run)
  return lambda *arguments: generate.main([f'--workdir={run.workdir}', *arguments])


@pytest.mark.full
def test_the_score_of_a_text_matches_evaluation(run, trained):
  """If the split is one document and one stream."""
  tokens = mixture.prepare(run.config.data).split('test').tokens
  text = run.vocabulary.decode(tokens).decode()
  (score,) = run.score(text)
  one = evaluation_config.EvaluationConfig(streams=1)
  result = open_run(trained, evaluation=one).evaluate('test')
  assert len(score.tokens) == result['tokens'] == len(tokens)
  assert score.nats.mean() == pytest.approx(result['nll_nats_per_token'], rel=1e-6)
  assert score.perplexity == pytest.approx(result['perplexity'], rel=1e-5)
  assert score.bits_per_byte == pytest.approx(result['bits_per_byte'], rel=1e-6)


@pytest.mark.full
def test_scores_do_not_depend_on_other_texts(run):
  batched = run.score(TEXTS * 4)  # several batches
  assert [score.text for score in batched] == TEXTS * 4
  np.testing.assert_allclose(batched[2].nats, run.score(TEXTS[2])[0].nats, rtol=1e-5)
  for text, *scores in zip(TEXTS, *(batched[i : i + 3] for i in (0, 6, 9)), strict=True):
    for score in scores:
      assert len(score.nats) == len(text.encode())
      np.testing.assert_array_equal(score.nats, scores[0].nats)
  assert np.isnan(batched[1].perplexity) and np.isnan(batched[1].bits_per_byte)
  bits = batched[2].nats.sum() / math.log(2)
  assert batched[2].bits_per_byte == pytest.approx(bits / len(TEXTS[2].encode()))


@pytest.mark.slow
def test_completions_do_not_depend_on_other_prompts(run, main, capfd, caplog):
  prompts = TEXTS[:2] * 8
  streamed = {row: '' for row in range(16)}

  def append_text(row, new_text):
    streamed[row] += new_text

  batched = run.generate(prompts, tokens=40, temperature=0.7, top_k=20, seed=3, on_text=append_text)
  assert [completion.prompt for completion in batched] == prompts
  assert [completion.text for completion in batched] == list(streamed.values())
  assert [completion.seed for completion in batched] == list(range(3, 19))
  assert all(len(completion.tokens) == 40 or completion.ended for completion in batched)
  subset = run.generate(prompts[9:14], tokens=40, temperature=0.7, top_k=20, seed=12)
  assert subset == batched[9:14]
  assert len({completion.text for completion in batched}) > 8
  # The command writes the text and nothing else to standard output.
  caplog.set_level('INFO')
  capfd.readouterr()
  assert (
    main('--prompt=the union', '--seed=9', '--tokens=40', '--temperature=0.7', '--top_k=20') == 0
  )
  assert capfd.readouterr().out == f'the union{batched[6].text}\n'
  count = len(batched[6].tokens) + batched[6].ended
  assert caplog.messages[-1].startswith(f'{count} tokens, ')


def test_prompts_of_standard_input(run, main, monkeypatch, capsys):
  """Interactively, and as lines of JSON. A prompt that is too long does not end the others."""
  give = lambda text: monkeypatch.setattr('sys.stdin', io.TextIOWrapper(io.BytesIO(text.encode())))
  prompts = ['the un', 'strong ' * 9, 'of']
  options = {'tokens': 6, 'temperature': 0.7, 'top_k': 20}
  texts = [run.generate(prompts[i], seed=3 + i, **options)[0].text for i in (0, 2)]
  flags = ['--tokens=6', '--temperature=0.7', '--top_k=20', '--seed=3']
  give('\n'.join(prompts) + '\n')
  assert main('--interactive', *flags) == 0
  captured = capsys.readouterr()
  assert captured.out == f'the un{texts[0]}\nof{texts[1]}\n'
  assert captured.err.startswith('error: prompt 1 is too long: 63 tokens')
  give('the un\n')
  main('--prompts=-', *flags)
  assert json.loads(capsys.readouterr().out)['text'] == texts[0]


def test_a_continuation_ends_before_a_stop_string(run, main, capsys):
  (whole,) = run.generate('the un', tokens=12, temperature=0)
  stop = whole.text[4:7]
  (stopped,) = run.generate('the un', tokens=12, temperature=0, stop=stop)
  assert stopped.text == whole.text[: whole.text.index(stop)] and stopped.ended
  assert stopped.tokens == whole.tokens[: len(stopped.tokens)] != whole.tokens
  main('--prompt=the un', '--tokens=12', '--temperature=0', f'--stop={stop}', '--stop=@')
  assert capsys.readouterr().out == f'the un{stopped.text}\n'
  with bad_input("stop='' is in every text; expected at least one character"):
    run.generate('a', stop=['b', ''])


def test_a_document_that_ends_at_once(run, main, monkeypatch, capsys, caplog):
  """Its end is the only token; with no or one token there is no speed to report."""
  caplog.set_level('INFO')
  end, generated = run.vocabulary.document_end, type(run.engine).generate

  def end_at_once(*arguments, **options):
    for token_B in generated(*arguments, **options):
      yield np.full_like(token_B, end)

  monkeypatch.setattr(type(run.engine), 'generate', end_at_once)
  main('--prompt=the un')
  assert capsys.readouterr().out == 'the un\n' and caplog.messages[-1] == '1 token'
  (completion,) = run.generate('the un')
  assert (completion.text, completion.tokens, completion.ended) == ('', [], True)
  assert generate._format_speed([]) == '0 tokens'


@pytest.mark.full
def test_greedy_tokens_have_the_best_score(run):
  prompts = ['the unio', 'of s', 'is\n', 'strong u', '', 'sta', 'tates', 'union']
  completions = run.generate(prompts, tokens=7, temperature=0)
  letters = [chr(code) for code in range(32, 127)]
  for completion in completions[:2]:
    for index in (0, 6):
      text, end = completion.prompt + completion.text, len(completion.prompt) + index
      scores = run.score([text[:end] + letter for letter in [text[end], *letters]])
      nats = [score.nats[-1] for score in scores]
      assert nats[0] <= min(nats) + 1e-5, (text, index)


def test_selection_of_a_checkpoint(trained_copy):
  workdir = trained_copy
  folder = workdir / 'checkpoints' / '8'
  # Marks step 8 as the best checkpoint.
  manifest.write(folder, dataclasses.replace(manifest.read(folder), validation=0.5))
  assert ngrammer_jax.load_run(workdir, 'best').state.step == 8
  assert ngrammer_jax.load_run(workdir, 'best').restored.step == 8
  with bad_input(f'--step=15: --workdir={workdir} has no such checkpoint; available: 4, 8, 12'):
    ngrammer_jax.load_run(workdir, 15).generate('')
  with bad_input('step=\'last\' is not a step: use a number from 0, "newest" or "best"'):
    evaluate.main([f'--workdir={workdir}', '--step=last'])


def test_invalid_arguments_raise_bad_input(run):
  for arguments, message in (
    (
      {'prompts': ['ok', 'x' * 16]},
      'prompt 2 is too long: 16 tokens, but 15 and the document start fill the context of 16; '
      'shorten it, or raise the context',
    ),
    ({'prompts': 'a', 'tokens': 0}, 'tokens=0 must be a whole number from 1 on'),
    ({'prompts': 'a', 'context': 0}, 'context=0 must be a whole number from 1 on'),
    ({'prompts': 'a', 'seed': -1}, 'seed=-1 must be a whole number from 0 on'),
    ({'prompts': 'a', 'tokens': 2.5}, 'tokens=2.5 must be a whole number from 1 on'),
    ({'prompts': 'a', 'stop': 3}, 'stop=3 must be a text, or a list of texts'),
    (
      {'prompts': None},
      'the prompts or texts are of type NoneType: expected a text, a list of token ids, or a list '
      'of these',
    ),
    ({'prompts': '\ud800'}, 'prompt 1 is not valid Unicode: surrogates not allowed'),
    ({'prompts': [[1.5, 2]]}, 'prompt 1 is of type list, expected a text'),
    (
      {'prompts': [[1, 300]]},
      'prompt 1: expected a text, or a list of token ids from 0 to 256',
    ),
    (
      {'prompts': 'a', 'special': True},
      'special=True (--special) reads special tokens in a text, but the vocabulary of this model '
      'has none: leave it out',
    ),
    (
      {'prompts': ['a', 'b'], 'seed': 2**32 - 1},
      'seed=4294967295 and one more for each prompt exceed 2^32 - 1',
    ),
    ({'prompts': 'a', 'top_p': 0.0}, 'top_p=0.0 must be above 0 and at most 1, or None'),
  ):
    with bad_input(message):
      run.generate(**arguments)


def test_characters_out_of_the_vocabulary_raise_bad_input(run, monkeypatch):
  letters = vocabularies.learn_characters([b'abc '], 'utf-8', separated=True)
  monkeypatch.setitem(run.__dict__, 'vocabulary', letters)
  with bad_input("prompt 1: 'd' is not among the 4 known characters"):
    run.generate('abcd')
  with bad_input("text 2: 'é' is not among the 4 known characters"):
    run.score(['a', 'é'])


def test_texts_with_unknown_words_have_no_bits_per_byte(run, monkeypatch):
  # Loads the state and the model before the vocabulary is replaced.
  assert run.state.step == 12 and run.evaluated.vocabulary_size == run.model.vocabulary_size
  monkeypatch.setitem(run.__dict__, 'vocabulary', vocabularies.learn_words([b'the cat sat'], None))
  known, unknown, *_ = run.score(['the cat', 'the dog'] * 4)
  assert known.bits_per_byte > 0 and np.isnan(unknown.bits_per_byte)
  assert len(unknown.nats) == 2


def test_prompts_of_a_file(main, tmp_path, capsys):
  prompts = ['the union of st', 'of states "is"', '', 'a', 'b']
  (tmp_path / 'prompts.txt').write_text('\n'.join(prompts) + '\n')
  arguments = [f'--prompts={tmp_path}/prompts.txt', '--tokens=5']
  main(*arguments)
  lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert [line['prompt'] for line in lines] == prompts
  assert set(lines[0]) == {'prompt', 'text', 'tokens', 'ended', 'seed'}
  main(*arguments, f'--output={tmp_path}/output.jsonl')
  assert capsys.readouterr().out == ''
  output_lines = (tmp_path / 'output.jsonl').read_text().splitlines()
  assert [json.loads(line) for line in output_lines] == lines
  (tmp_path / 'prompts.txt').write_bytes('a\r\n\r\nb\u2028c\x0cd\ne\n\n'.encode())
  main(*arguments)
  lines = [json.loads(line) for line in capsys.readouterr().out.split('\n')[:-1]]
  assert [line['prompt'] for line in lines] == ['a', '', 'b\u2028c\x0cd', 'e', '']
  with bad_input(
    f'--output={tmp_path} is a folder: name a file, such as {tmp_path}/completions.jsonl'
  ):
    main(*arguments, f'--output={tmp_path}')
  main(*arguments, f'--output={tmp_path}/new/output')
  assert (tmp_path / 'new' / 'output').read_text().count('\n') == len(lines)
  with bad_input('top_k=-1 must be at least 0, or None: 0 is no limit'):
    main(*arguments, f'--output={tmp_path}/new/output', '--top_k=-1')
  assert (tmp_path / 'new' / 'output').read_text().count('\n') == len(lines)  # as it was
  with bad_input('--output is for --prompts=FILE; other texts go to standard output'):
    main('--prompt=a', f'--output={tmp_path}/output')
  (tmp_path / 'prompts.txt').write_text('')
  with bad_input(f'--prompts={tmp_path}/prompts.txt is empty; expected one prompt per line'):
    main(*arguments)
