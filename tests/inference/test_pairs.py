"""Scores of continuations: equal to those of whole texts, and greedy as greedy decoding."""

import numpy as np
import pytest

import ngrammer_jax
from ngrammer_jax.data import vocabularies
from ngrammer_jax.inference import pairs
from tests import test_generate, tokenizer_files
from tests.checks import assert_close, bad_input

CONTEXT = 'the union'


@pytest.fixture
def run(trained):
  """A run with bytes as tokens, which are predicted from at most 16 others."""
  return test_generate.open_run(trained)


def test_pairs_score_as_whole_texts(run):
  """In any order, together or alone; the greedy flag is that of greedy decoding."""
  (completion,) = run.generate(CONTEXT, tokens=6, temperature=0)
  texts = [
    *((CONTEXT, continuation) for continuation in (' of', completion.text, '\n', 'é')),
    ('', CONTEXT),
    ('the ', 'union'),
    (CONTEXT, ''),
    ('', ''),
    (CONTEXT, completion.text[:-1] + 'é'),
  ]
  scores = run.score_pairs(texts[::-1], rows=3)[::-1]
  for (context, continuation), score in zip(texts, scores, strict=True):
    nats = run.score(context + continuation)[0].nats
    assert_close(score.log_likelihood, -nats[len(context) :].sum(), 1e-4)
  (alone,) = run.score_pairs([texts[1]])
  assert_close(scores[1].log_likelihood, alone.log_likelihood, 1e-4)
  assert scores[1].is_greedy and scores[6] == (0, True)
  assert not (scores[3].is_greedy or scores[8].is_greedy)
  assert run.score_pairs([]) == []


def test_a_token_is_predicted_from_the_last_ones_that_fit(run):
  limit = run.config.evaluation_context()
  assert limit == 16
  ids = list((CONTEXT * 5).encode())
  long, cut, shorter = run.score_pairs(
    [(ids, [1, 2]), (ids[-limit + 1 :], [1, 2]), (ids[-limit + 2 :], [1, 2])], rows=3
  )
  assert long == cut != shorter
  # A continuation that does not fit is scored in parts.
  (whole,) = run.score_pairs([([7], ids)], rows=3)
  parts = run.score_pairs(
    [([7], ids[:16]), ([ids[15]], ids[16:32]), (ids[28:32], ids[32:45]), ([7, 8], [9])], rows=3
  )
  assert len(ids) == 45
  assert_close(whole.log_likelihood, sum(part.log_likelihood for part in parts[:3]), 1e-4)
  assert not whole.is_greedy


def test_a_token_of_both_texts_starts_the_continuation():
  vocabulary = vocabularies.TokenizerVocabulary(tokenizer_files.byte_level())
  encode = lambda text: vocabulary.encode(text.encode()).tolist()
  start, joins = vocabulary.document_start, []
  for texts in [('a ', 'few'), ('a', ' few'), ('a f', 'ew'), ('', 'few')]:
    context, continuation = (part.tolist() for part in pairs.encode(vocabulary, texts, '', False))
    assert context[0] == start and start not in context[1:]
    assert context[1:] + continuation == encode(''.join(texts)) and continuation
    assert context[1:] == encode(texts[0])[: len(context) - 1]
    joins.append(context[1:] != encode(texts[0]))
  assert joins == [True, False, True, False]


def test_token_ids_are_taken_as_they_are():
  vocabulary = vocabularies.ByteVocabulary()
  encode = lambda *pair: [part.tolist() for part in pairs.encode(vocabulary, pair, 'pair 1', False)]
  assert encode([5, 6], np.array([7])) == [[5, 6], [7]]
  assert encode([], [7]) == [[vocabulary.document_start], [7]]
  for pair in ([5], [vocabulary.size]), ([-1], [5]), ([5.0], [6]), ([[5]], [6]):
    with bad_input(
      f'pair 1: expected a text, or a list of token ids from 0 to {vocabulary.size - 1}'
    ):
      encode(*pair)
  for pair in ('a', [5]), ([5], 'a'):
    with bad_input('pair 1: context and continuation must be two texts, or two lists of token ids'):
      encode(*pair)
  for pair in [('a', 'b', 'c'), 'ab']:
    with bad_input(f'pair 1 is {pair!r}, expected a context and its continuation'):
      pairs.encode(vocabulary, pair, 'pair 1', special=False)


@pytest.mark.slow
def test_a_model_of_the_package_prefers_what_presidents_say(one_device):
  run = ngrammer_jax.load_pretrained('state_of_the_union')
  continuations = ' strong.', ' weak.', ' banana.', ' the'
  scores = run.score_pairs([('The state of the Union is', text) for text in continuations])
  assert_close([s.log_likelihood for s in scores], [-6.7940, -14.3930, -28.1435, -1.8658], 1e-4)
  assert [s.is_greedy for s in scores] == [False, False, False, True]
