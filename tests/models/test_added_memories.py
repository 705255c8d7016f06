"""A memory that is added to a trained model changes nothing at the start, and learns."""

import dataclasses
import functools
import itertools

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import runs
from ngrammer_jax.config import conversion, memory_blocks
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.layers.context import Context
from ngrammer_jax.layers.ngram.memory import NGramMemory
from ngrammer_jax.models import language_model, model_variables
from ngrammer_jax.runs import added_memories
from tests import checks
from tests.models import drawn

B, T, V = 2, 12, 101
OWN = model_config.ModelConfig(
  layers=4, width=32, heads=4, feed_forward_width=48, position='relative'
)
BASES = {'llama': 'llama_gqa', 'gemma3': 'gemma3_text', 'gpt2': 'gpt2', 'own': None}
CLUSTERS = {'clusters': 8, 'key': 'clusters', 'layers': (1,), 'orders': (2,)}
VALUES = {'point': 'values', 'layers': (0, 1), 'orders': (1, 2), 'heads': 1}
# What the command line sets of each memory.
MEMORIES = {
  **{
    name: {'ngram_memories': {'0': {'preset': name}}}
    for name in (
      *('engram', 'engram_v41', 'over_encoding', 'longcat', 'blt', 'bigram_hash'),
      *('value_embeddings', 'nanochat_values', 'ngram_values'),
    )
  },
  'ple': {'ngram_memories': {'0': {'preset': 'ple', 'eos_id': 1}}},
  'gemma3n_ple': {'ngram_memories': {'0': {'preset': 'gemma3n_ple'}}},
  'deep_embed': {'ngram_memories': {'0': {'preset': 'deep_embed'}}},
  'rows added to the up projection': {
    'ngram_memories': {'0': {'join': 'sum', 'point': 'feed_forward', 'layers': (0, 1)}}
  },
  'stem': {'ngram_memories': {'0': {'preset': 'stem'}}},
  'values, interpolated': {'ngram_memories': {'0': VALUES | {'join': 'interpolation'}}},
  'values, weighted': {
    'ngram_memories': {'0': VALUES | {'join': 'weighted_sum', 'one_head': True}}
  },
  'sum': {'ngram_memories': {'0': {'join': 'sum', 'hash': 'polynomial'}}},
  'gates of one table': {
    'ngram_memories': {'0': {'layers': (0, 1), 'table': 'grams', 'sliced': True, 'deviation': 0.0}}
  },
  'latent gate': {'ngram_memories': {'0': CLUSTERS}},
  'latent concat': {'ngram_memories': {'0': CLUSTERS | {'join': 'concat'}}},
  'two': {'ngram_memories': {'0': {'preset': 'engram'}, '1': {'preset': 'over_encoding'}}},
  'ngram': {'ngram': {'clusters': 8}},
  'ngram of tokens, added': {'ngram': {'clusters': None, 'combine': 'add', 'orders': (2, 3)}},
  'ngram in the middle': {'ngram': {'clusters': 8, 'layer': 'middle'}},
  'ngram after attention': {'ngram': {'clusters': 8, 'layer': 'attention'}},
  'ngram of attended pairs': {
    'ngram': {'clusters': 8, 'layer': 'attention', 'pairing': ('attended',)}
  },
  'copies': {'copy_memory': {'window': 8}},
  'token shift': {'token_shift': {'tokens': 4}},
  'memory': {'memory': {'length': 5}},
  'memory of one length': {'memory': {'same_length': 'memory'}},
  'adaptive spans': {'span': {'ramp': 4}},
  'dynamic spans': {'span': {'kind': 'dynamic', 'limit': 28}},
  'product keys': {'product_memory': {'heads': 2, 'experts': True}},
  'product keys, projected': {'product_memory': {'preset': 'memory_layers', 'heads': 2}},
  'persistent': {'persistent': {'vectors': 3}},
  'one persistent head': {'persistent': {'vectors': 3, 'kind': 'single_head'}},
}
# Pairs that make no sense, with a part of what is said.
REFUSED = {
  (name, 'blt'): "key='bytes' is not for data.vocabulary" for name in BASES if name != 'own'
}
REFUSED |= {(name, 'stem'): 'rows cannot replace the up projection' for name in BASES}
REFUSED['gpt2', 'stem'] = 'is not for model.gated=False'
REFUSED['gpt2', 'rows added to the up projection'] = 'is not for model.gated=False'
PAIRS = [pair for pair in itertools.product(BASES, MEMORIES) if pair not in REFUSED]
# Their convolution has no input before the second step, and its norm no gradient before the third.
THIRD_STEP = 'convolution_norm'


@functools.cache
def run_of(name):
  """A published model."""
  return runs.load_pretrained(checks.REFERENCE / 'hf' / BASES[name], dtype='float64')


def base_of(name):
  """The config of a trained model, and its vocabulary size."""
  if BASES[name] is None:
    return OWN, V
  return run_of(name).config.model, run_of(name).vocabulary_size


@functools.cache
def num_parameters(name):
  """The number of parameters of a trained model."""
  variables = model_variables.abstract(language_model.build(*base_of(name)))
  return model_variables.count_elements(variables['params'])


@functools.cache
def params_of(name):
  """The parameters of a trained model in float64."""
  if BASES[name] is not None:
    return jax.device_get(run_of(name).state.params)
  model = language_model.build(OWN, V)
  tokens, memory = jnp.zeros((1, 2), jnp.int32), model.empty_memory(1)
  return nn.unbox(checks.random_variables(model, tokens, memory))['params']


def with_memory(name, memory):
  """The checked config of a model with a memory, as the command line completes it."""
  base, size = base_of(name)
  values = {'model': dataclasses.asdict(base) | memory, 'training': {'segment_length': T}}
  values = conversion.to_dict(values) | {'init_from': 'runs/base'}
  values['data'] = {'vocabulary': 'bytes' if name == 'own' else 'characters'}
  paths = {
    f'{path}.{name}' for path, block in memory_blocks.blocks(values['model']) for name in block
  }
  added_memories.complete(values, paths, (), base, size, num_parameters(name))
  config = conversion.resolve(values)
  added_memories.check_neutral(base, config)
  return config.model


def loss_of(model, size):
  """A function of variables: the loss of a batch of two documents, and what else is trained on."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, size, (B, T + 1), np.int32)
  tokens[0, T // 2 : T] = tokens[0, : T // 2]  # for copies
  starts = np.zeros((B, T), bool)
  starts[0, 0] = starts[1, 5] = True
  memory = model.empty_memory(B)

  def loss(variables):
    hidden, _, aux = model.apply(variables, tokens[:, :-1], memory, starts_BxT=starts)
    nll = model.apply(variables, hidden, tokens[:, 1:], method='scores').nll_BxT.mean()
    return nll, sum(aux.values())

  return loss


def first_steps(config, size, params, dtype):
  """The loss of the first step of an optimizer, and the gradients of the first two."""
  model = language_model.build(dataclasses.replace(config, dtype=dtype), size)
  loss = loss_of(model, size)

  def step(params, codebook):
    def total(params):
      nll, aux = loss({'params': params, 'codebook': codebook})
      return nll + aux, nll

    gradient, nll = jax.grad(total, has_aux=True)(params)
    move = lambda p, g: p - 0.01 * g / (jnp.abs(g) + 1e-8)  # as Adam does at first
    return jax.tree.map(move, params, gradient), (nll, gradient)

  @jax.jit
  def run(params):
    variables = model.init(jax.random.key(0), np.zeros((B, 2), np.int32), model.empty_memory(B))
    variables = nn.unbox(variables)
    leaves = traverse_util.flatten_dict(variables['params'])
    assert traverse_util.flatten_dict(params).keys() <= leaves.keys()
    leaves |= traverse_util.flatten_dict(params)
    params = traverse_util.unflatten_dict(leaves)
    _, results = jax.lax.scan(
      lambda params, _: step(params, variables.get('codebook', {})), params, length=2
    )
    return results

  nll, gradient = jax.device_get(run(wide(params, dtype)))
  return nll[0], traverse_util.flatten_dict(gradient, sep='/')


def wide(params, dtype):
  return jax.tree.map(lambda leaf: np.asarray(leaf, dtype), params)


@functools.cache
def base_loss(name, dtype):
  """The loss of a trained model."""
  config, size = base_of(name)
  loss = loss_of(language_model.build(dataclasses.replace(config, dtype=dtype), size), size)
  return jax.jit(lambda params: loss({'params': params})[0])(wide(params_of(name), dtype))


def check_pair(name, memory, dtype):
  """The loss of the first step is that of the trained model, and every new part learns."""
  config, params = with_memory(name, MEMORIES[memory]), params_of(name)
  loss, gradient = first_steps(config, base_of(name)[1], params, dtype)
  tolerance = {'float32': 1e-6, 'float64': 1e-12}[dtype]
  np.testing.assert_allclose(loss, base_loss(name, dtype), rtol=tolerance)
  new = gradient.keys() - traverse_util.flatten_dict(params, sep='/').keys()
  assert new or 'memory' in memory
  still = [path for path in new if THIRD_STEP not in path and not np.any(gradient[path])]
  assert not still, still


def test_a_neutral_memory_returns_its_input():
  def memory(join, start):
    width, layers = (8, ()) if join in ('sum', 'mean') else (4, (0,))
    options = {'join': join, 'layers': layers, 'heads': 2, 'rows': (11,), 'width': width}
    options |= {'orders': (2,), 'convolution': 2 if join == 'gate' else 0}
    if join == 'multiply':
      options |= {'width': 8, 'deviation': 0.0}
    return NGramMemory(NGramMemoryConfig(**options, start=start), vocabulary_size=9, width=8)

  x = np.random.default_rng(0).normal(size=(1, 5, 8)).astype('float32')
  context = Context(tokens_BxT=jnp.arange(5)[None])
  cases = [(join, 'neutral') for join in ('gate', 'concat', 'add', 'sum', 'mean')]
  cases += [('product', 'neutral'), ('multiply', 'neutral')]
  cases += [('gate', 'published'), ('sum', 'published')]
  run = lambda case: memory(*case).init_with_output(jax.random.key(0), x, context)[0][0]
  for case, y in zip(cases, jax.jit(lambda: [*map(run, cases)])(), strict=True):
    assert np.array_equal(y, x) == ('neutral' in case), case


@pytest.mark.slow
def test_a_drawn_pair_starts_as_the_trained_model(x64, one_device):
  rng = np.random.default_rng(drawn.rotating_seed())
  (name, memory), dtype = PAIRS[rng.integers(len(PAIRS))], rng.choice(['float32', 'float64'])
  print(name, memory, dtype)
  check_pair(name, memory, str(dtype))


@pytest.mark.slow
@pytest.mark.parametrize('name, memory', PAIRS)
@pytest.mark.parametrize('dtype', ['float32', 'float64'])
def test_every_pair_starts_as_the_trained_model(x64, one_device, name, memory, dtype):
  check_pair(name, memory, dtype)


@pytest.mark.full
@pytest.mark.parametrize(
  'name', ['llama', *(pytest.param(n, marks=pytest.mark.slow) for n in ('gemma3', 'gpt2', 'own'))]
)
def test_a_segment_memory_is_more_context_of_the_trained_model(x64, one_device, name):
  """The second segment, after the memory of the first, is the end of a segment twice as long."""
  params, (base, size) = jax.tree.map(jnp.asarray, params_of(name)), base_of(name)
  tokens = np.random.default_rng(0).integers(0, size, (B, 2 * T), np.int32)
  starts = np.zeros(tokens.shape, bool)
  starts[1, 5] = True

  @functools.partial(jax.jit, static_argnums=(0, 1))
  def hidden(config, length):
    model = language_model.build(dataclasses.replace(config, dtype='float64'), size)
    memory, parts = model.empty_memory(B), []
    for first in range(0, 2 * T, length):
      part = slice(first, first + length)
      inputs = {'params': params}, tokens[:, part], memory
      y, memory, _ = model.apply(*inputs, starts_BxT=starts[:, part])
      parts.append(y)
    return jnp.concatenate(parts, axis=1)

  config = with_memory(name, {'memory': {'length': T}})
  np.testing.assert_allclose(hidden(config, T), hidden(base, 2 * T), rtol=0, atol=1e-11)


@pytest.mark.parametrize('name, memory', REFUSED)
def test_pairs_that_make_no_sense_are_refused(x64, name, memory):
  with pytest.raises(ValueError, match=REFUSED[name, memory]):
    with_memory(name, MEMORIES[memory])


@pytest.mark.parametrize('part', ['memory', 'span'])
def test_positions_in_the_segment_have_no_memory(part):
  base = dataclasses.replace(OWN, position='learned')
  with pytest.raises(ValueError, match=f"model.{part} cannot be added .*position='learned'"):
    added_memories.complete({'model': {part: {}}}, (), (), base, V, 10**6)


def test_the_gate_of_a_memory_fits_the_trained_model_or_is_as_set():
  """Also of a memory that the trained model has: then the key that is set is compared."""
  memory = {'preset': 'value_embeddings'}
  path = 'model.ngram_memories.0'

  def channels(base, changes, overrides):
    values = {'model': {'ngram_memories': {'0': memory | changes}}}
    added_memories.complete(values, {f'{path}.preset', *overrides}, (), base, V, 10**6)
    return values['model']['ngram_memories']['0']['value_gate']['channels']

  set_gate = {'value_gate': {'channels': 3}}, (f'{path}.value_gate.channels',)
  narrow = dataclasses.replace(OWN, width=8)
  assert channels(narrow, {}, ()) == 8
  assert channels(narrow, *set_gate) == 3
  (block,) = conversion.resolve({'model': {'ngram_memories': (memory,)}}).model.ngram_memories
  with_memory = dataclasses.replace(OWN, ngram_memories=(block,))
  assert channels(with_memory, {}, ()) == 12
  assert channels(with_memory, *set_gate) == 3
