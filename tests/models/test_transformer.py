import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.attention import AttentionConfig
from ngrammer_jax.config.positions import PositionalConfig
from ngrammer_jax.layers import document_masks
from ngrammer_jax.layers.attention import position
from ngrammer_jax.models import (
  embedding_and_head,
  language_model,
  model_variables,
  transformer,
)
from tests import jaxprs
from tests.checks import assert_close, full, random_variables

V, B, T = 13, 2, 6
DISTINCT = np.array([[3, 11, 0, 7, 12, 5]])  # tokens whose rows of the table are their own
slow = pytest.mark.slow
SMALL = {'layers': 2, 'width': 8, 'heads': 2, 'feed_forward_width': 12}
NGRAM = model_config.NGramConfig(clusters=4, vocabulary_size=32, dim=2)


def small_config(**fields):
  return model_config.ModelConfig(**{'ngram': NGRAM} | SMALL | fields)


def small_model(**fields):
  return transformer.TransformerLM(small_config(**fields), V)


def random_tokens(rows=B, length=T):
  return np.random.default_rng(0).integers(0, V, (rows, length))


def variables_of(model):
  """Random parameters, and a codebook that spreads the tokens over all clusters."""
  memory = language_model.empty_memory(model.config, B)
  variables = random_variables(model, random_tokens(), memory)
  if 'codebook' in variables:
    # The first four tokens themselves, in the eyes of each head.
    embeddings = np.asarray(variables['params']['embedding'])[:4] * SMALL['width'] ** 0.5
    quantizer = variables['codebook']['ngrammer']['quantizer']
    quantizer['centroids'] = embeddings.reshape(4, 2, 4).swapaxes(0, 1)
  return variables


def test_products_of_a_bfloat16_step_have_bfloat16_operands():
  """Forward and backward, also those of attention whose results are float32; with shared keys."""
  model = small_model(ngram=None, dtype='bfloat16', key_value_heads=1)
  tokens = random_tokens()

  def loss(variables):
    memory = language_model.empty_memory(model.config, B)
    hidden, _, _ = model.apply(variables, tokens, memory, train=True)
    return model.apply(variables, hidden, tokens, method='scores').nll_BxT.sum()

  variables = model_variables.abstract(model)
  variables = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), variables)
  products = jaxprs.operand_dtypes(jax.grad(loss), nn.unbox(variables))
  assert len(products) > 3 * 2 * 6  # three for each of six products in two layers, and the logits
  assert products == [{'bfloat16'}] * len(products)


def test_the_loss_may_have_bfloat16_logits():
  """In training alone: a float32 model scores as without, and trains on the rounded products."""
  model = small_model(loss_dtype='bfloat16')
  plain = small_model()
  variables = variables_of(plain)
  hidden, _ = run(plain, variables, random_tokens())
  score = lambda model, **options: model.apply(
    variables, hidden, random_tokens(), method='scores', **options
  )
  expected = score(plain).nll_BxT
  np.testing.assert_array_equal(score(model).nll_BxT, expected)
  np.testing.assert_array_equal(score(plain, train=True).nll_BxT, expected)
  rounded = score(small_model(logits_dtype='bfloat16')).nll_BxT
  np.testing.assert_array_equal(score(model, train=True).nll_BxT, rounded)
  assert (rounded != expected).any()


@functools.partial(jax.jit, static_argnums=0, static_argnames='train')
def run(model, variables, tokens, memory=None, **kwargs):
  """Hidden states and the next memory."""
  if memory is None:
    memory = language_model.empty_memory(model.config, len(tokens))
  hidden, memory, _ = model.apply(variables, tokens, memory, **kwargs)
  return hidden, memory


def loss_and_gradient(model, variables):
  """A training step as a function of the parameters: loss and gradient of one segment."""
  tokens = random_tokens()

  def loss(params):
    hidden, _, _ = model.apply(
      {**variables, 'params': params},
      tokens,
      language_model.empty_memory(model.config, B),
      train=True,
      rngs={'dropout': jax.random.key(7)},
    )
    scores = model.apply({'params': params}, hidden, np.roll(tokens, -1), method='scores')
    return scores.nll_BxT.mean()

  return jax.value_and_grad(loss)


def count(primitive, function, *arguments):
  """How often a primitive stands in a function, bodies of loops counted once."""
  jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
  return [equation.primitive.name for equation in jaxprs.equations(jaxpr)].count(primitive)


# Compilation: scan and recomputation change nothing but time and memory.


@pytest.mark.full
@pytest.mark.parametrize('scan', [True, pytest.param(False, marks=slow)])
def test_backward_pass_recomputes_what_the_policy_says(scan):
  variables = variables_of(small_model(ngram=None))

  def products(remat):
    model = small_model(ngram=None, scan_layers=scan, remat=remat)
    return count('dot_general', loss_and_gradient(model, variables), variables['params'])

  bodies = 1 if scan else SMALL['layers']
  num_products = products('none')
  # The scores and the weighted values, which have batch dimensions.
  assert products('minimal') - num_products == 2 * bodies
  # All of q, k, v, scores, weighted values, output, inner layer, gate, and two rotations of TPUs.
  assert products('full') - num_products == 10 * bodies


MEMORY = model_config.MemoryConfig(length=4)
GATED = model_config.NGramMemoryConfig(layers=(0, 1), orders=(2,), heads=2, rows=(40,), width=8)


@pytest.mark.parametrize(
  ('fields', 'repeated'),
  [  # scores, weighted values and what is said; by layer
    full({'norm': 'hybrid'}, 2),
    # Rotations of TPUs.
    full({'attention': model_config.AttentionConfig(query_key_norm='head')}, 4),
    ({'convolution': 3, 'position': 'sinusoid', 'shared_query_key': True}, 2),
    full({'per_dim_scale': True, 'position': 'sinusoid'}, 2),
    full({'position': 'relative', 'memory': MEMORY}, 3),  # scores of distances
    ({'position': 'relative', 'memory': MEMORY, 'kernel': 'blocks'}, 0),
    full({'ngram_memories': (GATED,)}, 2),
  ],
)
def test_products_are_kept_wherever_a_gradient_needs_them(fields, repeated):
  products = {}
  for remat in ('none', 'minimal'):
    model = small_model(**{'ngram': None, 'scan_layers': False, 'remat': remat} | fields)
    params = jax.eval_shape(lambda model=model: variables_of(model))['params']
    products[remat] = count('dot_general', loss_and_gradient(model, {'params': params}), params)
  assert products['minimal'] - products['none'] == repeated * SMALL['layers']


@pytest.mark.full
def test_what_is_computed_again_in_a_row_is_not_optimised_away():
  ngram = dataclasses.replace(NGRAM, layer='attention', pairing=('previous', 'none'))

  def kept_apart(**fields):
    model = small_model(remat='full', **fields)
    memory = language_model.empty_memory(model.config, B)
    variables = random_variables(model, random_tokens(), memory)
    jaxpr = jax.make_jaxpr(loss_and_gradient(model, variables))(variables['params']).jaxpr
    policies = [e.params for e in jaxprs.equations(jaxpr) if 'prevent_cse' in e.params]
    with_policy = [p['prevent_cse'] for p in policies if p['policy'] is not None]
    return set(with_policy)

  # The block with n-grams stands in a row, the other is scanned, where nothing can be.
  assert kept_apart(ngram=ngram, scan_layers=True) == {True, False}


@pytest.mark.full
def test_scanned_and_unrolled_share_parameters():
  scanned, unrolled = (variables_of(small_model(scan_layers=scan)) for scan in (True, False))
  jax.tree.map(np.testing.assert_array_equal, scanned, unrolled)
  subtrees = {'embedding', 'softmax_bias', 'ngrammer', 'layer_0', 'layer_1', 'final_norm'}
  assert set(scanned['params']) == subtrees


# What depends on what.


PLAIN = {'ngram': None, 'scale_embeddings': False}


@pytest.mark.full
def test_who_hears_of_whom():
  """Of every token another one, in prefixes and documents; and behind padding as without it."""
  model = small_model(position='none', **PLAIN)
  variables = variables_of(model)
  one_document, whole_prefix = [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]
  cases = (
    (one_document, whole_prefix),
    ([1, 0, 1, 0, 0, 0], whole_prefix),
    ([1, 0, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0]),
  )
  # Of each case the tokens, and with another one at each place.
  tokens = np.tile(DISTINCT, (len(cases), T + 1, 1))
  tokens[:, np.arange(T) + 1, np.arange(T)] = 1
  rows = lambda arrays: np.repeat(np.array(arrays), T + 1, axis=0)
  starts, prefix, valid = rows([c[0] for c in cases]), rows([c[1] for c in cases]), None
  tokens = tokens.reshape(-1, T)
  # Without the n-gram layer, where a padded token still is a predecessor.
  behind, separate = (
    np.array([[1, 1, 1, *DISTINCT[0, :3]]]),
    np.array([[*DISTINCT[0, :3], 1, 1, 1]]),
  )
  tokens, more = np.concatenate([tokens, behind, separate]), np.zeros((2, T), int)
  starts, prefix = (np.concatenate([each, more]) for each in (starts, prefix))
  valid = np.ones(tokens.shape, np.int32)
  valid[-2, :3] = valid[-1, 3:] = 0
  kwargs = {'starts_BxT': starts > 0, 'prefix_BxT': prefix, 'valid_BxT': valid}
  hidden, _ = run(model, variables, tokens, **kwargs)
  *case_outputs, behind, separate = np.asarray(hidden)
  case_outputs = np.array(case_outputs).reshape(len(cases), T + 1, T, -1)
  heard = np.abs(case_outputs[:, 1:] - case_outputs[:, :1]).max(axis=-1).swapaxes(1, 2) > 0
  for (starts, prefix), output in zip(cases, heard, strict=True):
    numbers = document_masks.numbers(np.array([starts], bool))
    expected = document_masks.visible(numbers, numbers, np.array([prefix]))[0]
    assert output.tolist() == expected.tolist()
  assert_close(behind[3:], separate[:3], 1e-5)


@pytest.mark.full
def test_padding_does_not_move_the_codebook():
  model, valid = small_model(layers=1), (np.arange(T) < 4) * np.ones((B, 1))
  variables, memory = variables_of(model), language_model.empty_memory(model.config, B)

  @jax.jit
  def codebook_after(tokens):
    return model.apply(variables, tokens, memory, valid_BxT=valid, mutable=['codebook'])[1]

  def with_twos(places):
    return codebook_after(np.where(np.isin(np.arange(T), places), 2, random_tokens()))

  after = codebook_after(random_tokens())
  padding_changed = with_twos([4, 5])
  jax.tree.map(np.testing.assert_array_equal, padding_changed, after)
  tokens_changed = with_twos([3])
  pairs = zip(jax.tree.leaves(tokens_changed), jax.tree.leaves(after), strict=True)
  assert any((np.asarray(a) != np.asarray(b)).any() for a, b in pairs)


# Embeddings.


@pytest.mark.parametrize('scaled', [True, False])
def test_embeddings_are_scaled_by_the_root_of_the_width(scaled):
  model = small_model(scale_embeddings=scaled, ngram=None)
  table = np.random.default_rng(0).normal(size=(V, SMALL['width'])).astype('float32')
  params = {'embedding': table, 'softmax_bias': np.zeros(V)}
  embed = lambda model: model.embed(DISTINCT)[0]
  inputs = jax.jit(lambda: model.apply({'params': params}, method=embed))()
  assert_close(inputs, table[DISTINCT] * (SMALL['width'] ** 0.5 if scaled else 1), 1e-6)


@pytest.mark.parametrize('kind', ['sinusoid', 'absolute'])
def test_positions_are_added_to_the_embeddings(kind):
  """Learned ones repeat, here after all but two tokens."""
  positional = PositionalConfig(max_length=T - 2) if kind == 'absolute' else None
  model = small_model(position=kind, positional=positional, layers=1, **PLAIN)
  variables = variables_of(model)
  hidden, _ = run(model, variables, DISTINCT)
  places = position.sinusoid(np.arange(T)[None], SMALL['width'])
  if kind == 'absolute':
    learned = np.asarray(variables['params']['absolute_position'])
    places = np.concatenate([learned, learned[:2]])
  table = np.array(variables['params']['embedding'])
  table[DISTINCT] += places
  params = {**variables['params'], 'embedding': table}
  expected, _ = run(small_model(position='none', layers=1, **PLAIN), {'params': params}, DISTINCT)
  assert_close(hidden, expected, 1e-5)


# Memory.


@pytest.mark.full
@pytest.mark.parametrize(
  'ngram, length', [(None, 1), (NGRAM, T), (dataclasses.replace(NGRAM, heads=4), 1)]
)
def test_memory_keeps_its_shape(ngram, length):
  model = small_model(ngram=ngram)
  memory = language_model.empty_memory(model.config, B)
  tokens = random_tokens(B, length)
  (_, after, aux), _ = jax.eval_shape(
    lambda: model.init_with_output(jax.random.key(0), tokens, memory)
  )
  assert jax.eval_shape(lambda: memory) == after
  assert aux == {}


def test_scripts_for_version_0_2_find_the_empty_memory():
  config = model_config.ModelConfig(layers=1, width=8, heads=2, feed_forward_width=8)
  empty = transformer.TransformerLM(config, 5).empty_memory(2)
  assert jax.tree.map(jnp.shape, transformer.empty_memory(config, 2)) == jax.tree.map(
    jnp.shape, empty
  )


@pytest.mark.full
def test_without_a_memory_what_is_before_a_segment_is_the_seam_of_n_grams():
  """A stream split at document starts equals one pass; within one a bi-gram straddles the seam."""
  model = small_model(layers=1)
  variables, tokens = variables_of(model), np.tile(random_tokens(1, 9), (4, 1))
  starts = np.array([1, 0, 0, 1, 0, 0, 1, 1, 0], bool)
  # Rows: all of it; in three segments; the same without a start in the middle; the middle alone.
  lengths = np.array([[9, 0, 0], [3, 3, 3], [3, 3, 3], [0, 3, 0]])
  memory, place = language_model.empty_memory(model.config, 4), np.arange(9)
  outputs, numbers = np.zeros((4, 9, SMALL['width'])), []
  for i in range(3):
    first = np.array([0, 3 * i, 3 * i, 3])
    valid = place < lengths[:, i, None]
    at = np.minimum(first[:, None] + place, 8)
    is_start = starts[at] & valid
    is_start[2:, 0] = False
    targets_of = np.take_along_axis(tokens, at, axis=1)
    hidden, memory = run(
      model, variables, targets_of, memory, starts_BxT=is_start, valid_BxT=valid.astype(np.int32)
    )
    row, column = np.nonzero(valid)
    outputs[row, at[valid]] = np.asarray(hidden)[row, column]
    numbers.append(np.asarray(memory['document']).tolist())
  one_pass, split, goes_on, separate = outputs
  assert_close(split, one_pass, 1e-5)
  assert [n[:2] for n in numbers] == [[4, 1], [4, 2], [4, 4]]
  saved = jax.tree.map(np.asarray, memory['ngram'])
  jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf[0], leaf[1]), saved)
  assert_close(separate[3:6], one_pass[3:6], 1e-5)
  assert (np.abs(goes_on[3:6] - separate[3:6]).max(axis=-1) > 1e-3).all()  # by its bi-gram


@pytest.mark.full
def test_no_gradient_flows_through_the_memory():
  """Of inputs, and of what is known of spans, from any parameter."""
  span = model_config.SpanConfig('dynamic', limit=4, ramp=2)
  memory = model_config.MemoryConfig(4, same_length='memory_alone')
  model = small_model(scan_layers=False, convolution=2, span=span, memory=memory)
  variables = variables_of(model)

  @jax.jit
  @jax.grad
  def gradient(params):
    empty = language_model.empty_memory(model.config, B)
    _, memory, _ = model.apply(variables | {'params': params}, random_tokens(), empty)
    floats = [leaf for leaf in jax.tree.leaves(memory) if leaf.dtype == jnp.float32]
    assert len(floats) == 2 + 2  # inputs of two layers, and the spans
    return sum((leaf**2).sum() for leaf in floats)

  assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient(variables['params'])))


# Head, precision.


@pytest.mark.full
def test_untied_chunked_head_equals_log_softmax_of_the_logits():
  model = small_model(ngram=None, tie_embeddings=False, vocabulary_chunk=4)
  params = jax.tree.map(np.asarray, variables_of(model)['params'])
  params['softmax_bias'] = np.linspace(-1, 1, V, dtype='float32')
  assert (params['softmax_weight'] != params['embedding']).any()
  hidden = np.random.default_rng(2).normal(size=(B, T, SMALL['width'])).astype('float32')
  score = lambda hidden: model.apply({'params': params}, hidden, random_tokens(), method='scores')
  assert jaxprs.largest_array(score, hidden) < B * T * V
  outputs_of = lambda hidden: (
    score(hidden),
    model.apply({'params': params}, hidden, method='logits'),
  )
  scores, logits = jax.tree.map(np.asarray, jax.jit(outputs_of)(hidden))
  assert_close(logits, hidden @ params['softmax_weight'].T + params['softmax_bias'], 1e-6)
  log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
  chosen = np.take_along_axis(log_probs, random_tokens()[..., None], axis=-1)
  assert_close(scores.nll_BxT, -chosen[..., 0], 1e-6)


@pytest.mark.full
def test_bfloat16_runs_with_float32_parameters():
  fields = {'layers': 1, 'ngram': None}
  model = small_model(dtype='bfloat16', **fields)
  memory = language_model.empty_memory(model.config, B)
  initial = jax.eval_shape(model.init, jax.random.key(0), random_tokens(), memory)
  variables = variables_of(model)
  results = jax.eval_shape(loss_and_gradient(model, variables), variables['params'])
  assert {leaf.dtype.name for leaf in jax.tree.leaves((initial, results))} == {'float32'}
  hidden, _ = run(model, variables, random_tokens())
  expected, _ = run(small_model(**fields), variables, random_tokens())
  assert hidden.dtype == jnp.bfloat16
  assert_close(hidden.astype('float32'), expected, 0.03)


# Where clusters come from.


def unlike_centroids(model):
  """Variables with centroids in the directions of the first four tokens, of several lengths."""
  variables = jax.tree.map(np.asarray, variables_of(model))
  quantizer = variables['codebook']['ngrammer']['quantizer']
  lengths_NxKx1 = np.linalg.norm(quantizer['centroids'], axis=-1, keepdims=True)
  unlike_Kx1 = np.array([0.7, 0.9, 1.1, 1.3])[:, None]
  quantizer['centroids'] = (quantizer['centroids'] * unlike_Kx1 / lengths_NxKx1).astype('float32')
  return variables


@pytest.mark.parametrize('prenormalize', [True, full(False)])
def test_the_clusters_for_serving_are_those_of_the_model(prenormalize):
  """And it is the same with them: test_segmentation."""
  ngram = dataclasses.replace(NGRAM, prenormalize=prenormalize)
  model = small_model(ngram=ngram, layers=1)
  variables = unlike_centroids(model)
  serve = jax.jit(
    lambda params, codebook: embedding_and_head.for_serving(model.config, params, codebook)
  )
  served = serve(variables['params'], variables['codebook'])
  assert jax.tree.map(jnp.shape, served) == {'ngrammer': {'quantizer': {'token_ids': (V, 2)}}}
  _, memory = run(model, variables, np.arange(V)[:, None])
  ids = np.asarray(served['ngrammer']['quantizer']['token_ids'])
  assert np.asarray(memory['ngram']['ids'])[:, 0].tolist() == ids.tolist()
  assert len(np.unique(ids)) > 2
  without = small_model(ngram=None, layers=1)
  largest = lambda model, variables: jaxprs.largest_array(
    lambda tokens: run(model, variables, tokens), random_tokens(8, 32)
  )
  assert largest(model, {**variables, 'codebook': served}) == largest(without, variables)


@pytest.mark.parametrize(
  'fields', [{'ngram': None}, {'ngram': dataclasses.replace(NGRAM, layer='end')}]
)
def test_where_clusters_depend_on_more_than_the_token_nothing_is_cached(fields):
  model = small_model(**fields)
  codebook = {'any': 'thing'}
  assert embedding_and_head.for_serving(model.config, {}, codebook) is codebook


@pytest.mark.full
def test_training_clusters_the_vocabulary_where_it_is_smaller():
  """The same step, whether rows or tokens are clustered, up to rounding."""
  fields = {'layers': 1, 'feed_forward_width': 0}
  model, tokens = small_model(**fields), random_tokens(4, 8)
  variables = variables_of(model)
  step = jax.jit(
    lambda tokens: model.apply(
      variables,
      tokens,
      language_model.empty_memory(model.config, len(tokens)),
      mutable=['codebook'],
    )
  )
  (_, memory, _), after = step(tokens)  # 32 tokens, 13 rows
  (_, single, _), _ = step(tokens[1:2])  # 8 tokens
  assert memory['ngram']['ids'][1].tolist() == single['ngram']['ids'][0].tolist()
  largest = jaxprs.largest_array(step, random_tokens(64, 64))
  without_ngrams = jaxprs.largest_array(
    lambda t: small_model(ngram=None, **fields).apply(
      {'params': variables['params']}, t, language_model.empty_memory(small_config(ngram=None), 64)
    ),
    random_tokens(64, 64),
  )
  assert largest == without_ngrams  # no distances of 64 x 64 tokens


@pytest.mark.full
@pytest.mark.parametrize(
  'layer, before, scan',
  [
    pytest.param(*place, scan, marks=() if (place, scan) == (('middle', 1), True) else slow)
    for place in (('input', 0), ('begin', 1), ('middle', 1), ('end', 3))
    for scan in (False, True)
  ],
)
def test_the_layer_stands_where_it_should(layer, before, scan):
  """Cutting off the blocks before it leaves its ids as they are; those after do not matter."""
  ngram = dataclasses.replace(NGRAM, layer=layer)
  model = small_model(layers=3, ngram=ngram, scan_layers=scan)
  variables = variables_of(model)

  def ids_with(changed):
    params = dict(variables['params'])
    if changed is not None:
      params[f'layer_{changed}'] = jax.tree.map(
        lambda a: np.asarray(a) + 1, params[f'layer_{changed}']
      )
    after = run(model, {**variables, 'params': params}, random_tokens(64, 1))[1]
    return np.asarray(after['ngram']['ids'])

  plain = ids_with(None)
  changed = [i for i in range(3) if (ids_with(i) != plain).any()]
  assert changed == list(range(before))


@pytest.mark.parametrize(
  'scan, bodies',
  [
    (2, 2 + 1),
    full(9, 5),
    *(pytest.param(*sizes, marks=slow) for sizes in ((1, 1), (3, 3 + 2), (5, 5))),
  ],
)
def test_layers_are_compiled_in_groups(scan, bodies):
  """The last full groups of five layers are followed by the rest; one group alone is no scan."""

  def products(**fields):
    model = small_model(ngram=None, **fields)
    params = jax.eval_shape(lambda: variables_of(model))['params']
    return count('dot_general', loss_and_gradient(model, {'params': params}), params)

  assert products(layers=5, scan_layers=scan) == products(layers=bodies, scan_layers=False)


@pytest.mark.slow
def test_gradients_of_layers_in_groups():
  models = (small_model(layers=3, dropout=0.1, scan_layers=scan) for scan in (False, 2))
  variables = variables_of(small_model(layers=3))
  of = lambda model: jax.jit(loss_and_gradient(model, variables))(variables['params'])
  jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), *map(of, models))


@pytest.mark.full
def test_abstract_layers_are_those_of_the_model():
  """Of equal layers, only one is traced."""
  options = {'position': 'learned', 'positional': model_config.PositionalConfig(max_length=9)}
  options |= {'persistent': model_config.PersistentConfig(2), 'norm': 'post_skip', 'layers': 12}
  model = small_model(ngram=None, **options)
  memory = language_model.empty_memory(model.config, B)
  expected = jax.eval_shape(model.init, jax.random.key(0), random_tokens(), memory)
  actual = model_variables.abstract(model)
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  assert jax.tree.leaves(actual) == jax.tree.leaves(expected)


def test_layers_that_are_traced_once_or_scanned_are_those_of_the_model():
  """Each has its window, its rotation, its memory and its dropout."""
  attention = AttentionConfig(window=2, layer_pattern=('window', 'unrotated'))
  fields = {'ngram': None, 'layers': 5, 'position': 'rope', 'attention': attention, 'dropout': 0.5}
  config = small_config(memory=model_config.MemoryConfig(3), **fields)
  variables, outputs = variables_of(small_model(ngram=None, layers=5, position='rope')), []
  for scan_layers, jit_layers in ((False, False), (False, True), (True, False), (2, False)):
    model = language_model.build(
      dataclasses.replace(config, scan_layers=scan_layers), V, jit_layers
    )

    @jax.jit
    def segment(memory, key, model=model):
      options = {'train': True, 'rngs': {'dropout': key}}
      return model.apply(variables, random_tokens(), memory, **options)[:2]

    memory, parts = model.empty_memory(B), []
    for key in jax.random.split(jax.random.key(0)):
      part, memory = segment(memory, key)
      parts.append(part)
    outputs.append(parts)
  for other in outputs[1:]:
    assert_close(np.stack(other), np.stack(outputs[0]), 1e-6)
