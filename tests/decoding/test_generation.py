"""Generation equals the model, run over the whole text for every token."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.decoding import generation, sampling
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import transformer
from tests.checks import mesh_of, random_variables
from tests.evaluation import by_hand

V, LONGEST = 11, 32
PROMPTS = [np.array([0, 3, 5]), np.array([0]), np.array([0, 1, 2, 3, 4, 5, 6, 7, 8])]
GREEDY, RANDOM = sampling.Sampling(0), sampling.Sampling(0.9, 8, 0.95)
CONFIG = model_config.ModelConfig(
  layers=2,
  width=16,
  heads=2,
  feed_forward_width=24,
  ngram=model_config.NGramConfig(clusters=4, vocabulary_size=32, dim=4),
  dtype='float64',
  tie_embeddings=False,
)
# Knows nothing beyond its context: one layer, and no n-grams.
SHALLOW = dataclasses.replace(CONFIG, layers=1, ngram=None, feed_forward_width=0)


@functools.cache
def model_and_variables(config):
  """In double precision."""
  model = transformer.TransformerLM(config, V)
  memory = transformer.empty_memory(config, 1)
  variables = random_variables(model, np.zeros((1, 1), np.int32), memory, dtype='float64')
  # Far from uniform, so that a wrong state gives another token, but no token always wins.
  params = variables['params']
  params['softmax_weight'] = 2 * np.asarray(params['softmax_weight'])
  params['softmax_bias'] = np.zeros(V)
  params['final_norm'] = {'scale': np.ones(16), 'bias': np.zeros(16)}
  return model, {'codebook': {}} | variables


def generator(config, context, mesh=(1, 1, 1), rows=3, **given):
  model = transformer.TransformerLM(config, V)
  return generation.Generator(model, mesh_of(*mesh), context, rows, **given)


def take(generator, variables, prompts, seeds, how, tokens):
  stream = generator(variables['params'], variables['codebook'], prompts, seeds, how)
  return np.stack(list(itertools.islice(stream, tokens)), axis=1).tolist()


def hash_token(log_probs_BxV):
  """A token that any other log-probabilities would change: what is made then is no routine."""
  return (abs(log_probs_BxV).sum(axis=-1) * 1e5).astype('int32') % V


@pytest.fixture
def deterministic_tokens(monkeypatch):
  """Tokens are `hash_token`, and not drawn."""
  monkeypatch.setattr(
    sampling, 'draw', lambda log_probs_BxV, limits, keys: hash_token(log_probs_BxV)
  )


@functools.cache
def whole(config):
  """The program that reads some whole texts."""
  model, variables = model_and_variables(config)

  @jax.jit
  def read(tokens_BxT, prefix_BxT):
    memory = transformer.empty_memory(config, len(tokens_BxT))
    hidden, _, _ = model.apply(variables, tokens_BxT, memory, prefix_BxT=prefix_BxT)
    return model.apply(variables, hidden, method='log_probs')

  return read


def log_probs(config, texts, prefixes=None):
  """Of what comes after each token of some texts, from one pass over all of each."""
  tokens_BxT = np.stack([np.pad(text, (0, LONGEST - len(text))) for text in texts])
  prefixes = np.zeros(len(texts), int) if prefixes is None else np.array(prefixes)
  found = np.asarray(whole(config)(tokens_BxT, np.arange(LONGEST) < prefixes[:, None]))
  return [row[: len(text)] for row, text in zip(found, texts, strict=True)]


def check(made, pick, bidirectional=False):
  """What follows the prompts is what is picked of the log-probabilities of the whole model."""
  texts = [[*prompt.tolist(), *answer] for prompt, answer in zip(PROMPTS, made, strict=True)]
  known = list(map(len, PROMPTS))
  of_all = log_probs(CONFIG, [text[:-1] for text in texts], known if bidirectional else None)
  for length, answer, found in zip(known, made, of_all, strict=True):
    assert answer == pick(found)[length - 1 :].tolist()


@pytest.mark.parametrize(
  'mesh, bidirectional',
  [
    pytest.param((2, 1, 2), True),
    pytest.param((2, 2, 2), False, marks=pytest.mark.slow),
    pytest.param((1, 1, 1), True, marks=pytest.mark.slow),
  ],
)
def test_tokens_are_of_what_the_whole_model_finds(x64, deterministic_tokens, mesh, bidirectional):
  """The tokens of a prompt may see all of it. Two programs do all of that."""
  variables = model_and_variables(CONFIG)[1]
  made = generator(CONFIG, 30, mesh, bidirectional=bidirectional)
  advance = made._advance
  returned = by_hand.watched(made, '_advance')
  answers = take(made, variables, PROMPTS, [0, 1, 2], GREEDY, 12)
  check(answers, hash_token, bidirectional)
  assert all(len(set(answer)) > 4 for answer in answers)
  # All hosts look at the tokens of all rows.
  assert returned and all(token_B.is_fully_replicated for token_B, _, _ in returned)
  # One step for all tokens, one prefill for all prompts of a bucket, whatever is drawn.
  for length, how in ((1, RANDOM), (16, sampling.Sampling(2.0, None, 0.5))):
    take(made, variables, [np.zeros(length, np.int32)], [0], how, 4)
  assert advance._cache_size() == 2


def test_prompts_are_padded_to_few_lengths():
  made, lengths = generator(dataclasses.replace(SHALLOW, dtype='float32'), 70, rows=1), {}

  def advance(params, codebook, seeds, limits, segment, prefix, *, memory, count):
    tokens_BxT, starts_BxT, valid_BxT = map(np.asarray, segment)
    if tokens_BxT.shape[1] > 1:
      n = int(valid_BxT.sum())
      lengths.setdefault(tokens_BxT.shape[1], []).append(n)
      assert tokens_BxT[0].tolist() == [*range(1, n + 1), *[0] * (tokens_BxT.shape[1] - n)]
      assert np.flatnonzero(starts_BxT).tolist() == [0] and valid_BxT[0, :n].all()
    return jax.device_put(np.zeros(1, np.int32)), memory, count

  made._advance = advance
  for length in (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 70):
    take(made, {'params': {}, 'codebook': {}}, [np.arange(1, length + 1)], [0], GREEDY, 1)
  assert lengths == {16: [1, 2, 15, 16], 32: [17, 31, 32], 64: [33, 64], 70: [65, 70]}


generator_for_context = functools.cache(functools.partial(generator, CONFIG))


@pytest.mark.parametrize('context', [12, pytest.param(40, marks=pytest.mark.slow)])
def test_a_prompt_in_a_batch_gives_what_it_gives_alone(x64, context):
  """Also drawn at random, and when the text outgrows the context; as long as it does not, it is
  what the whole model finds most likely."""
  variables, made = model_and_variables(CONFIG)[1], generator_for_context(context)
  together = take(made, variables, PROMPTS, [5, 6, 7], RANDOM, 20)
  for row in range(3):
    assert [together[row]] == take(made, variables, [PROMPTS[row]], [5 + row], RANDOM, 20)
  rotated = [PROMPTS[2], PROMPTS[0], PROMPTS[1]]
  rotated = take(made, variables, rotated, [7, 5, 6], RANDOM, 20)
  assert together == [*rotated[1:], rotated[0]]
  assert together != take(made, variables, PROMPTS, [8, 9, 10], RANDOM, 20)
  same = take(made, variables, [PROMPTS[0]] * 3, [5, 6, 5], RANDOM, 20)
  assert same[0] == same[2] == together[0] != same[1]
  greedy = take(made, variables, PROMPTS, [0, 1, 2], GREEDY, 12)
  fits = [context + 1 - len(prompt) for prompt in PROMPTS]
  most_likely = lambda of_texts: of_texts.argmax(axis=-1)
  check([answer[:n] for answer, n in zip(greedy, fits, strict=True)], most_likely)


@pytest.mark.slow
def test_a_row_of_its_own_program_gives_the_same(x64):
  variables = model_and_variables(CONFIG)[1]
  together = take(generator(CONFIG, 12), variables, PROMPTS, [5, 6, 7], RANDOM, 20)
  alone = generator(CONFIG, 12, rows=1)
  for row in range(3):
    assert [together[row]] == take(alone, variables, [PROMPTS[row]], [5 + row], RANDOM, 20)


@pytest.mark.slow
def test_few_programs_are_compiled(x64):
  variables, made = model_and_variables(CONFIG)[1], generator(CONFIG, 64, rows=2)
  for length, how in ((1, GREEDY), (5, RANDOM), (16, sampling.Sampling(2.0, None, 0.5))):
    take(made, variables, [np.zeros(length, np.int32)], [0], how, 4)
  assert made._advance._cache_size() == 2
  take(made, variables, [np.zeros(17, np.int32)], [0], GREEDY, 4)
  assert made._advance._cache_size() == 3


KNOWN_BUG = pytest.mark.xfail(
  strict=True, reason='a context of 1 keeps one slot, and sees two tokens'
)


@pytest.mark.parametrize(
  'context',
  [
    pytest.param(1, marks=[pytest.mark.slow, KNOWN_BUG]),
    pytest.param(2, marks=pytest.mark.slow),
    5,
  ],
)
def test_a_token_is_predicted_from_the_context_alone(x64, deterministic_tokens, context):
  """With one layer and rotary positions: from the last tokens as if they were all there is."""
  variables, prompts = model_and_variables(SHALLOW)[1], [np.array([i]) for i in (3, 5, 7)]
  made = take(generator(SHALLOW, context), variables, prompts, range(3), GREEDY, 16)
  seen, then = [], []
  for prompt, answer in zip(prompts, made, strict=True):
    text = [*prompt.tolist(), *answer]
    seen += [text[max(end - context, 0) : end] for end in range(1, len(text))]
    then += answer
  assert [int(hash_token(found[-1])) for found in log_probs(SHALLOW, seen)] == then
  assert len(set(then)) > 4


def test_every_token_is_drawn_anew(x64):
  """From a model to which all tokens are alike, so that only the random keys tell them apart."""
  flat = jax.tree.map(jnp.zeros_like, model_and_variables(CONFIG)[1])
  prompts = [np.zeros(1, int)] * 3
  rows = np.array(
    take(generator_for_context(12), flat, prompts, range(3), sampling.Sampling(), 250)
  )
  share = np.bincount(rows.ravel(), minlength=V) / rows.size
  np.testing.assert_allclose(share, 1 / V, atol=5 * 0.3 / rows.size**0.5)
  same = lambda a, b: (a == b).mean()
  for a, b in ((rows[:, 1:], rows[:, :-1]), (rows[1:], rows[:-1])):
    assert same(a, b) < 1 / V + 5 * 0.3 / a.size**0.5
