"""Texts in and out of a trained run: in Python, and on the command line."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import ngrammer_jax
from ngrammer_jax import evaluate, generate
from ngrammer_jax.data import token_cache
from ngrammer_jax.training import loop
from tests.checks import bad_input

TEXTS = ['the union is', '', 'strong states of the union is strong ' * 3]


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """A run that has learned its one sentence."""
  folder = tmp_path_factory.mktemp('generate')
  (folder / 'text.txt').write_text('the union of states is strong\n' * 600)
  (folder / 'config.py').write_text(f"""
from ngrammer_jax import config

def get_config():
  c = config.default()
  c.data.corpus, c.data.path, c.data.vocabulary = 'text', '{folder}/text.txt', 'bytes'
  c.data.cache_dir = '{folder}/cache'
  c.model.update(layers=1, width=16, heads=2, feed_forward_width=32, scan_layers=False)
  c.model.ngram = config.block('model.ngram', clusters=8, vocabulary_size=64, dim=4)
  c.optimizer.learning_rate = 0.02
  c.optimizer.warmup_steps = 0
  c.evaluation.streams = 1
  c.training.update(steps=160, batch_size=8, segment_length=32, evaluate_every=80)
  c.training.update(checkpoint_every=80, segments_per_call=80, log_every=80)
  return c
""")
  import argparse

  from ngrammer_jax import flags

  _, config = flags.parse(argparse.ArgumentParser(), [f'--config={folder}/config.py'])
  loop.train(config, folder / 'run')
  return folder / 'run'


@pytest.fixture(scope='module')
def run(workdir):
  return ngrammer_jax.load_run(workdir)


def test_a_text_scores_what_evaluation_gives(run, workdir):
  """A split that is one document and one stream is a text like any other."""
  tokens = token_cache.prepare(run.config.data).splits['test'].tokens
  text = run.vocabulary.decode(tokens).decode()
  (score,) = run.score(text)
  result = run.evaluate('test')
  assert len(score.tokens) == result['tokens'] == len(tokens)
  assert score.nats.mean() == pytest.approx(result['nll_nats_per_token'], rel=1e-6)
  assert score.perplexity == pytest.approx(result['perplexity'], rel=1e-5)
  assert score.bits_per_byte == pytest.approx(result['bits_per_byte'], rel=1e-6)


def test_texts_score_together_what_they_score_alone(run):
  together = run.score(TEXTS * 4)  # more than fit at a time
  assert [score.text for score in together] == TEXTS * 4
  for text, score in zip(TEXTS, together[:3], strict=True):
    np.testing.assert_allclose(score.nats, run.score(text)[0].nats, rtol=1e-5)
    assert len(score.nats) == len(text)
  np.testing.assert_array_equal(together[2].nats, together[11].nats)
  assert np.isnan(together[1].perplexity) and np.isnan(together[1].bits_per_byte)


def test_prompts_are_continued_together_as_alone(run):
  prompts = TEXTS[:2] * 5
  heard = {row: '' for row in range(10)}

  def listen(row, grown):
    heard[row] += grown

  together = run.generate(prompts, tokens=40, temperature=0.7, top_k=20, seed=3, on_text=listen)
  assert [made.prompt for made in together] == prompts
  assert [made.text for made in together] == list(heard.values())
  assert all(len(made.tokens) == 40 or made.ended for made in together)
  for row in (0, 1, 9):
    made = together[row]
    alone = run.generate(made.prompt, tokens=40, temperature=0.7, top_k=20, seed=made.seed)
    assert alone == [made]
  assert len({made.text for made in together}) > 2


def test_it_has_learned_its_one_sentence(run):
  (made,) = run.generate('the union of st', tokens=14, temperature=0)
  assert made.text == 'ates is strong'


def test_the_best_and_any_other_step(workdir):
  newest, best, first = (
    ngrammer_jax.load_run(workdir, step).state.step for step in ('newest', 'best', 80)
  )
  assert (newest, first) == (160, 80)
  records = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  key = 'validation/nll_nats_per_token'
  losses = {record['step']: record[key] for record in records if key in record}
  assert best == min(losses, key=losses.get)
  with bad_input(f'--step=15: --workdir={workdir} has no such checkpoint, but 80, 160'):
    ngrammer_jax.load_run(workdir, 15).generate('')
  with bad_input('--step=last is not a step, newest or best'):
    evaluate.main([f'--workdir={workdir}', '--step=last'])


@pytest.mark.parametrize(
  'given, message',
  [
    (
      {'prompts': ['ok', 'x' * 32]},
      'prompt 2 is too long: 32 tokens, but 31 and the document start fill the context of 32; '
      'shorten it, or raise the context',
    ),
    ({'prompts': 'a', 'tokens': 0}, 'tokens=0 must be a whole number from 1 on'),
    ({'prompts': 'a', 'context': 0}, 'context=0 must be a whole number from 1 on'),
    ({'prompts': 'a', 'seed': -1}, 'seed=-1 must be a whole number from 0 on'),
    ({'prompts': 'a', 'tokens': 2.5}, 'tokens=2.5 must be a whole number from 1 on'),
    ({'prompts': '\ud800'}, 'prompt 1 is not valid Unicode: surrogates not allowed'),
    (
      {'prompts': ['a', 'b'], 'seed': 2**32 - 1},
      'seed=4294967295 and one more for each prompt exceed 2^32 - 1',
    ),
    ({'prompts': 'a', 'top_p': 0.0}, 'top_p=0.0 must be above 0 and at most 1'),
    (
      {'prompts': 'a', 'temperature': -1},
      'temperature=-1 must be at least 0 (0 takes the most likely token)',
    ),
  ],
)
def test_what_cannot_be_generated(run, given, message):
  with bad_input(message):
    run.generate(**given)


def test_characters_that_the_vocabulary_does_not_have(run, monkeypatch):
  from ngrammer_jax.data import vocabulary

  letters = vocabulary.learn_characters([b'abc '], 'utf-8', separated=True)
  monkeypatch.setitem(run.__dict__, 'vocabulary', letters)
  with bad_input("prompt 1: 'd' is not among the 4 known characters"):
    run.generate('abcd')
  with bad_input("text 2: 'é' is not among the 4 known characters"):
    run.score(['a', 'é'])


def test_words_that_are_unknown_have_no_bits_per_byte(run, monkeypatch):
  from ngrammer_jax.data import vocabulary

  # Restored and made before the vocabulary is another.
  assert run.state.step == 160 and run.evaluated.vocabulary_size == run.model.vocabulary_size
  monkeypatch.setitem(run.__dict__, 'vocabulary', vocabulary.learn_words([b'the cat sat'], None))
  known, unknown = run.score(['the cat', 'the dog'])
  assert known.bits_per_byte > 0 and np.isnan(unknown.bits_per_byte)
  assert len(unknown.nats) == 2


def test_only_text_on_standard_output(workdir):
  done = subprocess.run(
    [sys.executable, '-m', 'ngrammer_jax.generate', f'--workdir={workdir}']
    + ['--prompt=the union of st', '--tokens=14', '--temperature=0'],
    env=os.environ,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout == 'the union of states is strong\n'
  assert '14 tokens, ' in done.stderr and 'tokens/s' in done.stderr


def test_prompts_of_a_file(workdir, tmp_path, capsys):
  prompts = ['the union of st', 'of states "is"', '']
  (tmp_path / 'prompts.txt').write_text('\n'.join(prompts) + '\n')
  arguments = [f'--workdir={workdir}', f'--prompts={tmp_path}/prompts.txt', '--tokens=5']
  generate.main(arguments)
  lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert [line['prompt'] for line in lines] == prompts
  assert set(lines[0]) == {'prompt', 'text', 'tokens', 'ended', 'seed'}
  generate.main([*arguments, f'--output={tmp_path}/made.jsonl'])
  assert capsys.readouterr().out == ''
  kept = (tmp_path / 'made.jsonl').read_text().splitlines()
  assert [json.loads(line) for line in kept] == lines
  (tmp_path / 'prompts.txt').write_bytes('a\r\n\r\nb\u2028c\x0cd\n\n'.encode())
  generate.main(arguments)
  lines = [json.loads(line) for line in capsys.readouterr().out.split('\n')[:-1]]
  assert [line['prompt'] for line in lines] == ['a', '', 'b\u2028c\x0cd', '']
  with bad_input(f'--output={tmp_path}/no/made cannot be written: No such file or directory'):
    generate.main([*arguments, f'--output={tmp_path}/no/made'])
  with bad_input('--output is for --prompts=FILE; a single text goes to standard output'):
    generate.main([f'--workdir={workdir}', '--prompt=a', f'--output={tmp_path}/made'])
  (tmp_path / 'prompts.txt').write_text('')
  with bad_input(f'--prompts={tmp_path}/prompts.txt is empty; expected one prompt a line'):
    generate.main(arguments)
