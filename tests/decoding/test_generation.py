"""Generation equals the model, run over the whole text for every token."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.decoding import generation, sampling
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import transformer
from tests.checks import random_variables
from tests.training.test_devices import mesh_of

V = 11
PROMPTS = [np.array([0, 3, 5]), np.array([0]), np.array([0, 1, 2, 3, 4, 5, 6, 7, 8])]
GREEDY, RANDOM = sampling.Sampling(0), sampling.Sampling(0.9, 8, 0.95)


@pytest.fixture(scope='module')
def model_and_variables():
  with jax.enable_x64(True):
    ngram = model_config.NGramConfig(clusters=4, vocabulary_size=32, dim=4)
    config = model_config.ModelConfig(
      layers=2,
      width=16,
      heads=2,
      feed_forward_width=24,
      ngram=ngram,
      dtype='float64',
      tie_embeddings=False,
    )
    model = transformer.TransformerLM(config, V)
    memory = transformer.empty_memory(config, 1)
    variables = random_variables(model, np.zeros((1, 1), np.int32), memory, dtype='float64')
    # Far from uniform, so that a wrong state gives another token, but no token always wins.
    params = variables['params']
    params['softmax_weight'] *= 2
    params['softmax_bias'] *= 0
    params['final_norm'] = {'scale': jnp.ones(16), 'bias': jnp.zeros(16)}
    return model, variables


def take(generator, variables, prompts, seeds, how, tokens):
  stream = generator(variables['params'], variables['codebook'], prompts, seeds, how)
  return np.stack(list(itertools.islice(stream, tokens)), axis=1).tolist()


def most_likely(model, variables, text, prefix=0):
  """The most likely token after each token of a text, from one pass over all of it."""
  memory = transformer.empty_memory(model.config, 1)
  prefix_BxT = np.arange(len(text))[None] < prefix if prefix else None
  hidden, _, _ = model.apply(variables, np.array([text]), memory, prefix_BxT=prefix_BxT)
  return model.apply(variables, hidden, method='log_probs')[0].argmax(axis=-1).tolist()


@pytest.mark.parametrize('mesh', [(1, 1, 1), (2, 2, 2)])
def test_greedy_takes_what_the_whole_model_finds_most_likely(x64, model_and_variables, mesh):
  model, variables = model_and_variables
  generator = generation.Generator(model, mesh_of(mesh), context=30, rows=3)
  made = take(generator, variables, PROMPTS, [0, 1, 2], GREEDY, 12)
  for prompt, answer in zip(PROMPTS, made, strict=True):
    text = [*prompt.tolist(), *answer]
    assert len({*answer}) > 1, answer
    assert answer == most_likely(model, variables, text[:-1])[len(prompt) - 1 :]


def test_the_tokens_of_a_prompt_may_see_all_of_it(x64, model_and_variables):
  model, variables = model_and_variables
  generator = generation.Generator(model, mesh_of((1, 1, 1)), 30, rows=3, bidirectional=True)
  made = take(generator, variables, PROMPTS, [0, 1, 2], GREEDY, 12)
  causal = generation.Generator(model, mesh_of((1, 1, 1)), 30, rows=3)
  assert made != take(causal, variables, PROMPTS, [0, 1, 2], GREEDY, 12)
  for prompt, answer in zip(PROMPTS, made, strict=True):
    text, known = [*prompt.tolist(), *answer], len(prompt)
    assert answer == most_likely(model, variables, text[:-1], known)[known - 1 :]


@pytest.mark.parametrize('context', [12, 40])
def test_a_prompt_in_a_batch_gives_what_it_gives_alone(x64, model_and_variables, context):
  """Also drawn at random, and when the text outgrows the context."""
  model, variables = model_and_variables
  generator = generation.Generator(model, mesh_of((1, 1, 1)), context, rows=3)
  together = take(generator, variables, PROMPTS, [5, 6, 7], RANDOM, 20)
  alone = generation.Generator(model, mesh_of((1, 1, 1)), context, rows=1)
  for row in range(3):
    assert [together[row]] == take(alone, variables, [PROMPTS[row]], [5 + row], RANDOM, 20)
  assert together != take(generator, variables, PROMPTS, [8, 9, 10], RANDOM, 20)


def test_few_programs_are_compiled(model_and_variables):
  """One step for all tokens, one prefill for all prompts of a bucket, whatever is drawn."""
  model, variables = model_and_variables
  variables = jax.tree.map(lambda x: x.astype(jnp.float32), variables)
  config = model_config.ModelConfig(**{**vars(model.config), 'dtype': 'float32'})
  generator = generation.Generator(
    transformer.TransformerLM(config, V), mesh_of((1, 1, 1)), context=64, rows=2
  )
  for length, how in ((1, GREEDY), (5, RANDOM), (16, sampling.Sampling(2.0, None, 0.5))):
    take(generator, variables, [np.zeros(length, np.int32)], [0], how, 4)
  assert generator._advance._cache_size() == 2
  take(generator, variables, [np.zeros(17, np.int32)], [0], GREEDY, 4)
  assert generator._advance._cache_size() == 3


def test_every_token_is_drawn_anew(model_and_variables):
  """From a model to which all tokens are alike, so that only the random keys tell them apart."""
  model, variables = model_and_variables
  flat = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), variables)
  config = dataclasses.replace(model.config, dtype='float32')
  generator = generation.Generator(
    transformer.TransformerLM(config, V), mesh_of((1, 1, 1)), context=8, rows=4
  )
  rows = np.array(take(generator, flat, [np.zeros(1, int)] * 4, range(4), sampling.Sampling(), 200))
  share = np.bincount(rows.ravel(), minlength=V) / rows.size
  np.testing.assert_allclose(share, 1 / V, atol=5 * 0.3 / rows.size**0.5)
  same = lambda a, b: (a == b).mean()
  for a, b in ((rows[:, 1:], rows[:, :-1]), (rows[1:], rows[:-1])):
    assert same(a, b) < 1 / V + 5 * 0.3 / a.size**0.5


@pytest.mark.parametrize('context', [1, 2, 5])
def test_a_token_is_predicted_from_the_context_alone(x64, model_and_variables, context):
  """With one layer and rotary positions: from the last tokens as if they were all there is."""
  model, variables = model_and_variables
  config = dataclasses.replace(model.config, layers=1, ngram=None, dtype='float64')
  model = transformer.TransformerLM(config, V)
  params = {k: v for k, v in variables['params'].items() if k not in ('layer_1', 'ngrammer')}
  variables = {'params': params, 'codebook': {}}
  generator = generation.Generator(model, mesh_of((1, 1, 1)), context, rows=1)
  text = [3, *take(generator, variables, [np.array([3])], [0], GREEDY, 12)[0]]
  for end in range(context, len(text)):
    assert text[end] == most_likely(model, variables, text[end - context : end])[-1]
