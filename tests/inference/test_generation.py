"""Compares generation with the model applied to the whole text for every token."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.config import model as model_config
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference import programs, sampling
from ngrammer_jax.models import language_model, transformer
from tests.checks import assert_close, full, mesh_of, random_variables
from tests.inference import reference

V, MAX_LENGTH = 11, 32
PROMPTS = [np.array([0, 3, 5]), np.array([0]), np.array([0, 1, 2, 3, 4, 5, 6, 7, 8])]
GREEDY, RANDOM = sampling.SamplingConfig(0), sampling.SamplingConfig(0.9, 8, 0.95)
CONFIG = model_config.ModelConfig(
  layers=2,
  width=16,
  heads=2,
  feed_forward_width=24,
  ngram=model_config.NGramConfig(clusters=4, vocabulary_size=32, dim=4),
  dtype='float64',
  tie_embeddings=False,
)
# No information from beyond the context: one layer and no n-grams.
SHALLOW = dataclasses.replace(CONFIG, layers=1, ngram=None, feed_forward_width=0)


@functools.cache
def model_and_variables(config):
  """Returns a model and random variables in float64."""
  model = transformer.TransformerLM(config, V)
  memory = language_model.empty_memory(config, 1)
  variables = random_variables(model, np.zeros((1, 1), np.int32), memory, dtype='float64')
  # Logits far from uniform, so that a wrong state changes tokens, but no token dominates.
  params = variables['params']
  params['softmax_weight'] = 2 * np.asarray(params['softmax_weight'])
  params['softmax_bias'] = np.zeros(V)
  params['final_norm'] = {'scale': np.ones(16), 'bias': np.zeros(16)}
  return model, {'codebook': {}} | variables


def make_engine(config, mesh=(1, 1, 1)):
  return inference.Engine(transformer.TransformerLM(config, V), mesh_of(*mesh))


shared_engine = functools.cache(make_engine)


def generate(engine, *args, tokens, rows=3, bidirectional=False, document_start=None):
  stream = engine.generate(*args, bidirectional, rows, document_start)
  return np.stack(list(itertools.islice(stream, tokens)), axis=1).tolist()


def hash_token(log_probs_BxV):
  """Returns a token that changes with any change of the log-probabilities."""
  return (abs(log_probs_BxV).sum(axis=-1) * 1e5).astype('int32') % V


@pytest.fixture
def deterministic_tokens(monkeypatch):
  """Replaces sampling by `hash_token`."""
  monkeypatch.setattr(
    sampling, 'sample_tokens', lambda log_probs_BxV, sampler, keys: hash_token(log_probs_BxV)
  )


@functools.cache
def full_forward(config, method='log_probs'):
  """Returns the compiled forward pass over whole texts."""
  model, variables = model_and_variables(config)

  @jax.jit
  def forward(tokens_BxT, prefix_BxT):
    memory = language_model.empty_memory(config, len(tokens_BxT))
    hidden, _, _ = model.apply(variables, tokens_BxT, memory, prefix_BxT=prefix_BxT)
    return model.apply(variables, hidden, method=method)

  return forward


def compute_log_probs(config, texts, prefixes=None):
  """Returns the log-probabilities after each token of some texts, from one forward pass."""
  tokens_BxT = np.stack([np.pad(text, (0, MAX_LENGTH - len(text))) for text in texts])
  prefixes = np.zeros(len(texts), int) if prefixes is None else np.array(prefixes)
  is_prefix_BxT = np.arange(MAX_LENGTH) < prefixes[:, None]
  log_probs_BxTxV = np.asarray(full_forward(config)(tokens_BxT, is_prefix_BxT))
  return [row[: len(text)] for row, text in zip(log_probs_BxTxV, texts, strict=True)]


def check_answers(answers, select_token, bidirectional=False):
  """Asserts that the answers are the tokens selected from the log-probabilities of whole texts."""
  texts = [[*prompt.tolist(), *answer] for prompt, answer in zip(PROMPTS, answers, strict=True)]
  lengths = list(map(len, PROMPTS))
  prefixes = lengths if bidirectional else None
  log_probs = compute_log_probs(CONFIG, [text[:-1] for text in texts], prefixes)
  for length, answer, log_probs_TxV in zip(lengths, answers, log_probs, strict=True):
    assert answer == select_token(log_probs_TxV)[length - 1 :].tolist()


@pytest.mark.full
@pytest.mark.parametrize(
  'mesh, bidirectional',
  [
    pytest.param((2, 1, 2), True),
    pytest.param((2, 2, 2), False, marks=pytest.mark.slow),
    pytest.param((1, 1, 1), True, marks=pytest.mark.slow),
  ],
)
def test_generation_matches_full_forward(x64, deterministic_tokens, mesh, bidirectional):
  """Also with bidirectional prompts. Two programs are compiled in all."""
  variables = model_and_variables(CONFIG)[1]
  engine = make_engine(CONFIG, mesh)
  compiled = engine._decode_first, engine._decode_next
  results = reference.record_results(engine, '_decode_next')
  generate_all = functools.partial(generate, engine, variables, bidirectional=bidirectional)
  answers = generate_all(PROMPTS, [0, 1, 2], GREEDY, 30, tokens=12)
  check_answers(answers, hash_token, bidirectional)
  assert all(len(set(answer)) > 4 for answer in answers)
  # All hosts read the tokens of all rows.
  assert results and all(tokens_KxB.is_fully_replicated for tokens_KxB, _ in results)
  # One program for all tokens and one for all prompts of a padded length, for any sampling.
  for length, config in ((1, RANDOM), (16, sampling.SamplingConfig(2.0, None, 0.5))):
    generate_all([np.zeros(length, np.int32)], [0], config, 30, tokens=4)
  assert [program._cache_size() for program in compiled] == [1, 1]


@pytest.mark.parametrize(
  'changes',
  [
    {'convolution': 3, 'kernel': 'blocks'},
    {'ngram': dataclasses.replace(CONFIG.ngram, layer='attention', pairing=('attended',))},
    full({'position': 'relative', 'memory': model_config.MemoryConfig(6, sinks=2)}),
  ],
)
def test_a_first_prompt_gives_what_an_empty_cache_gives(x64, changes):
  """Keys are then those of the prompt alone, unless pairs count from the first slot."""
  model = transformer.TransformerLM(dataclasses.replace(CONFIG, **changes), V)
  tokens = np.random.default_rng(0).integers(0, V, (2, 70)).astype(np.int32)
  memory = model.empty_memory(2, 75)
  variables = random_variables(model, tokens, memory, dtype='float64')
  starts, valid = np.zeros(tokens.shape, bool), np.ones(tokens.shape, np.int32)
  starts[:, 0], valid[1, 60:] = True, 0
  prompt = token_batch.Batch(tokens, None, starts, valid)
  sampler = sampling.SamplerParams.from_config(GREEDY, V, None)
  state = programs.DecodingState(memory, np.int32(0), np.zeros(2, np.int32))

  @functools.partial(jax.jit, static_argnames='is_first')
  def decode(state, is_first):
    seeds = np.zeros(2, np.uint32)
    return programs.decode_prompt(
      model, variables, seeds, sampler, prompt, state=state, is_first=is_first
    )

  expected, result = (decode(state, is_first) for is_first in (False, True))
  jax.tree.map(lambda a, b: assert_close(a, b, 1e-11), result, expected)
  lowered = decode.lower(state, is_first=True).as_text()
  has_scores_of_slots = f'x70x{75 + 70}x' in lowered
  assert has_scores_of_slots == ('ngram' in changes)


def penalized_answers(logits_of, prompts, penalty, start=None):
  """Greedy answers of 8 tokens with a penalty of the tokens of each text, but not of its start."""
  texts = [list(prompt) for prompt in prompts]
  for _ in range(8):
    tokens_BxT = np.stack([np.pad(text, (0, MAX_LENGTH - len(text))) for text in texts])
    logits_BxTxV = logits_of(tokens_BxT, np.zeros(tokens_BxT.shape, bool))
    for text, logits_TxV in zip(texts, np.asarray(logits_BxTxV), strict=True):
      scores = logits_TxV[len(text) - 1].tolist()
      for token in set(text[int(text[0] == start) :]):
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
      text.append(int(np.argmax(scores)))
  return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def test_repetition_penalty_equals_a_loop_over_whole_texts(x64):
  """Every token of the text so far is penalised, those of the prompt too, but no document start."""
  config = dataclasses.replace(SHALLOW, ngram=None)
  variables, logits_of = model_and_variables(config)[1], full_forward(config, 'logits')
  prompts = [np.array([start, 3, 5][: 1 + start % 3]) for start in range(V)]
  options = sampling.SamplingConfig(0, repetition_penalty=3.0)
  args = shared_engine(config), variables, prompts, list(range(V)), options, 30
  without_start, unpenalized = (penalized_answers(logits_of, prompts, p) for p in (3, 1))
  assert generate(*args, tokens=8, rows=V) == without_start != unpenalized
  # One after the other, every id is the document start: a text that begins with it differs.
  differ = []
  for start in range(V):
    expected = penalized_answers(logits_of, prompts[start : start + 1], 3, start)
    differ.append(expected != without_start[start : start + 1])
    args = shared_engine(config), variables, prompts, list(range(V)), options, 30
    answers = generate(*args, tokens=8, rows=V, document_start=start)
    assert answers == [*without_start[:start], *expected, *without_start[start + 1 :]]
  assert any(differ)


def test_prompts_are_padded_to_few_lengths():
  engine = make_engine(dataclasses.replace(SHALLOW, dtype='float32'))
  lengths = {}

  def decode_prompt(variables, seeds, sampler, prompt, *, state):
    arrays = prompt.tokens_BxT, prompt.starts_BxT, prompt.valid_BxT
    tokens_BxT, starts_BxT, valid_BxT = map(np.asarray, arrays)
    n = int(valid_BxT.sum())
    lengths.setdefault(tokens_BxT.shape[1], []).append(n)
    assert tokens_BxT[0].tolist() == [*prompts[n], *[0] * (tokens_BxT.shape[1] - n)]
    assert np.flatnonzero(starts_BxT).tolist() == [0] and valid_BxT[0, :n].all()
    return jax.device_put(np.zeros((1, 1), np.int32)), state

  engine._decode_first = decode_prompt
  prompts = {n: np.arange(1, n + 1) % V for n in (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 70)}
  for prompt in prompts.values():
    generate(engine, {}, [prompt], [0], GREEDY, 70, tokens=1, rows=1)
  assert lengths == {16: [1, 2, 15, 16], 32: [17, 31, 32], 64: [33, 64], 70: [65, 70]}


@pytest.mark.parametrize('context', [12, pytest.param(40, marks=pytest.mark.slow)])
def test_rows_do_not_depend_on_the_batch(x64, context):
  """Also with random sampling and beyond the context; greedy answers match the full forward pass
  while they fit in the context."""
  variables = model_and_variables(CONFIG)[1]
  generate_all = functools.partial(generate, shared_engine(CONFIG), variables)
  batched = generate_all(PROMPTS, [5, 6, 7], RANDOM, context, tokens=20)
  for row in range(3):
    single = generate_all([PROMPTS[row]], [5 + row], RANDOM, context, tokens=20)
    assert [batched[row]] == single
  rotated_prompts = [PROMPTS[2], PROMPTS[0], PROMPTS[1]]
  rotated = generate_all(rotated_prompts, [7, 5, 6], RANDOM, context, tokens=20)
  assert batched == [*rotated[1:], rotated[0]]
  assert batched != generate_all(PROMPTS, [8, 9, 10], RANDOM, context, tokens=20)
  same_prompt = generate_all([PROMPTS[0]] * 3, [5, 6, 5], RANDOM, context, tokens=20)
  assert same_prompt[0] == same_prompt[2] == batched[0] != same_prompt[1]
  greedy = generate_all(PROMPTS, [0, 1, 2], GREEDY, context, tokens=12)
  fit_lengths = [context + 1 - len(prompt) for prompt in PROMPTS]
  most_likely = lambda log_probs_TxV: log_probs_TxV.argmax(axis=-1)
  check_answers([answer[:n] for answer, n in zip(greedy, fit_lengths, strict=True)], most_likely)


@pytest.mark.parametrize('context', [1, pytest.param(2, marks=pytest.mark.slow), full(5)])
def test_tokens_depend_on_the_context_alone(x64, deterministic_tokens, context):
  """With one layer and rotary positions, the last tokens alone give the same result."""
  variables, prompts = model_and_variables(SHALLOW)[1], [np.array([i]) for i in (3, 5, 7)]
  engine = make_engine(SHALLOW)
  answers = generate(engine, variables, prompts, range(3), GREEDY, context, tokens=16)
  contexts, next_tokens = [], []
  for prompt, answer in zip(prompts, answers, strict=True):
    text = [*prompt.tolist(), *answer]
    contexts += [text[max(end - context, 0) : end] for end in range(1, len(text))]
    next_tokens += answer
  log_probs = compute_log_probs(SHALLOW, contexts)
  assert [int(hash_token(log_probs_TxV[-1])) for log_probs_TxV in log_probs] == next_tokens
  # With a context of 1, every answer soon repeats itself.
  assert len(set(next_tokens)) > (2 if context == 1 else 4)


@pytest.mark.parametrize(
  'slots_taken, is_enough',
  [
    (None, None),  # only their number
    pytest.param(1000, True, marks=pytest.mark.full),
    pytest.param(16, False, marks=pytest.mark.slow),
  ],
)
def test_the_cache_has_as_many_slots_as_the_longest_span_needs(
  x64, monkeypatch, slots_taken, is_enough
):
  """It generates what a cache of the whole context does, also after a prompt that does not fit."""
  config = dataclasses.replace(
    CONFIG,
    ngram=None,
    position='table',
    positional=model_config.PositionalConfig(max_length=256),
    memory=model_config.MemoryConfig(256, same_length='memory_alone'),
    span=model_config.SpanConfig(limit=256, ramp=4),
  )
  model, variables = model_and_variables(config)
  params = variables['params']
  for i, spans in enumerate(([0, 59], [30, 0])):
    params[f'layer_{i}']['attention']['span']['span'] = np.array(spans) / 256
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, V, length) for length in (100, 3, 70)]

  def generate_all():
    engine = make_engine(config)
    results = reference.record_results(engine, '_decode_next')
    tokens = generate(engine, variables, prompts, [0, 1, 2], RANDOM, 200, tokens=24)
    return tokens, {state.memory['cache'].documents.shape[1] for _, state in results}

  tokens, slots = generate_all()
  assert slots == {64}
  if slots_taken is None:
    return
  monkeypatch.setattr(inference.spans, 'cache_slots', lambda *_: slots_taken)
  expected, slots = generate_all()
  assert slots == {min(slots_taken, 199)} and (tokens == expected) == is_enough


@pytest.mark.full
def test_tokens_are_sampled_independently(x64):
  """With a model of uniform probabilities, in which only the random keys differ."""
  uniform = jax.tree.map(jnp.zeros_like, model_and_variables(CONFIG)[1])
  prompts = [np.zeros(1, int)] * 3
  config = sampling.SamplingConfig()
  tokens = generate(shared_engine(CONFIG), uniform, prompts, range(3), config, 12, tokens=250)
  tokens = np.array(tokens)
  frequencies = np.bincount(tokens.ravel(), minlength=V) / tokens.size
  np.testing.assert_allclose(frequencies, 1 / V, atol=5 * 0.3 / tokens.size**0.5)
  for a, b in ((tokens[:, 1:], tokens[:, :-1]), (tokens[1:], tokens[:-1])):
    assert (a == b).mean() < 1 / V + 5 * 0.3 / a.size**0.5
