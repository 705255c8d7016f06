import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import documents, position
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import heads, transformer
from tests import jaxprs
from tests.checks import assert_close, random_variables

V, B, T = 13, 2, 6
DISTINCT = jnp.asarray([[3, 11, 0, 7, 12, 5]])  # tokens whose rows of the table are their own
SMALL = {'layers': 2, 'width': 8, 'heads': 2, 'feed_forward_width': 12}
NGRAM = model_config.NGramConfig(clusters=4, vocabulary_size=32, dim=2)


# Positions that do not depend on where a segment ends.
SEGMENT_FREE = [p for p in model_config.POSITIONS if p not in model_config.SEGMENT_POSITIONS]


def small_config(**fields):
  return model_config.ModelConfig(**{'ngram': NGRAM} | SMALL | fields)


def small_model(**fields):
  return transformer.TransformerLM(small_config(**fields), V)


def random_tokens(rows=B, length=T):
  return jnp.asarray(np.random.default_rng(0).integers(0, V, (rows, length)))


def variables_of(model):
  """Random parameters, and a codebook that spreads the tokens over all clusters."""
  memory = transformer.empty_memory(model.config, B)
  variables = random_variables(model, random_tokens(), memory)
  if 'codebook' in variables:
    # The first four tokens themselves, in the eyes of each head.
    embeddings = variables['params']['embedding'][:4] * SMALL['width'] ** 0.5
    quantizer = variables['codebook']['ngrammer']['quantizer']
    quantizer['centroids'] = embeddings.reshape(4, 2, 4).swapaxes(0, 1)
  return variables


@functools.partial(jax.jit, static_argnums=0, static_argnames='train')
def run(model, variables, tokens, memory=None, **given):
  """Hidden states and the next memory."""
  if memory is None:
    memory = transformer.empty_memory(model.config, len(tokens))
  hidden, memory, _ = model.apply(variables, tokens, memory, **given)
  return hidden, memory


def loss_and_gradient(model, variables):
  """A training step as a function of the parameters: loss and gradient of one segment."""
  tokens = random_tokens()

  def loss(params):
    hidden, _, _ = model.apply(
      {**variables, 'params': params},
      tokens,
      transformer.empty_memory(model.config, B),
      train=True,
      rngs={'dropout': jax.random.key(7)},
    )
    scores = model.apply({'params': params}, hidden, jnp.roll(tokens, -1), method='scores')
    return scores.nll_BxT.mean()

  return jax.value_and_grad(loss)


def count(primitive, function, *arguments):
  """How often a primitive stands in a function, bodies of loops counted once."""
  jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
  return [equation.primitive.name for equation in jaxprs.equations(jaxpr)].count(primitive)


# Compilation: scan and recomputation change nothing but time and memory.


@pytest.mark.parametrize('scan', [True, False])
def test_backward_pass_recomputes_what_the_policy_says(scan):
  variables = variables_of(small_model(ngram=None))

  def products(remat):
    model = small_model(ngram=None, scan_layers=scan, remat=remat)
    return count('dot_general', loss_and_gradient(model, variables), variables['params'])

  bodies = 1 if scan else SMALL['layers']
  stored = products('none')
  # The scores and the weighted values, which have batch dimensions.
  assert products('minimal') - stored == 2 * bodies
  # All of q, k, v, scores, weighted values, output, inner layer and gate.
  assert products('full') - stored == 8 * bodies


def test_what_is_computed_again_in_a_row_is_not_optimised_away():
  ngram = dataclasses.replace(NGRAM, layer='attention', pairing=('previous', 'none', 'none'))

  def kept_apart(**fields):
    model = small_model(remat='full', layers=3, **fields)
    memory = transformer.empty_memory(model.config, B)
    variables = random_variables(model, random_tokens(), memory)
    jaxpr = jax.make_jaxpr(loss_and_gradient(model, variables))(variables['params']).jaxpr
    policies = [e.params for e in jaxprs.equations(jaxpr) if 'prevent_cse' in e.params]
    with_policy = [p['prevent_cse'] for p in policies if p['policy'] is not None]
    return set(with_policy)

  # In a scan nothing can be; the block with n-grams stands in a row, the others are scanned.
  assert kept_apart(ngram=None) == {False}
  assert kept_apart(ngram=None, scan_layers=False) == {True}
  assert kept_apart(ngram=ngram) == {True, False}


def test_scanned_and_unrolled_share_parameters():
  scanned, unrolled = (variables_of(small_model(scan_layers=scan)) for scan in (True, False))
  jax.tree.map(np.testing.assert_array_equal, scanned, unrolled)
  subtrees = {'embedding', 'softmax_bias', 'ngrammer', 'layer_0', 'layer_1', 'final_norm'}
  assert set(scanned['params']) == subtrees


# What depends on what.


@pytest.mark.parametrize('scan', [True, False])
def test_gradient_reaches_exactly_the_visible_tokens(scan):
  model = small_model(scan_layers=scan)
  variables = variables_of(small_model())
  direction = jax.random.normal(jax.random.key(1), (SMALL['width'],))

  @jax.jit
  def reached(starts, prefix):
    def projected(embedding):
      params = {**variables['params'], 'embedding': embedding}
      given = {'starts_BxT': starts, 'prefix_BxT': prefix}
      return run(model, {**variables, 'params': params}, DISTINCT, **given)[0][0] @ direction

    jacobian_TxVxD = jax.jacrev(projected)(variables['params']['embedding'])
    return jnp.abs(jacobian_TxVxD).sum(axis=-1)[:, DISTINCT[0]] > 0

  one_document, whole_prefix = [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]
  for starts, prefix in (
    (one_document, whole_prefix),
    ([1, 0, 1, 0, 0, 0], whole_prefix),
    ([1, 0, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0]),
  ):
    starts, prefix = jnp.asarray([starts], bool), jnp.asarray([prefix])
    numbers = documents.numbers(starts)
    expected = documents.visible(numbers, numbers, prefix)[0]
    assert reached(starts, prefix).tolist() == expected.tolist()


def test_changed_token_changes_nothing_before_it():
  model = small_model()
  variables, tokens = variables_of(model), random_tokens()
  hidden, _ = run(model, variables, tokens)
  for t in range(T):
    changed, _ = run(model, variables, tokens.at[:, t].set((tokens[:, t] + 1) % V))
    differs = (changed != hidden).any(axis=-1)
    assert not differs[:, :t].any() and differs[:, t:].all()


@pytest.mark.parametrize('encoding', SEGMENT_FREE)
def test_packed_documents_equal_separate_sequences(encoding):
  model = small_model(position=encoding)
  variables, tokens = variables_of(model), random_tokens(1)
  starts = jnp.asarray([[1, 0, 0, 1, 0, 0]], bool)
  packed, _ = run(model, variables, tokens, starts_BxT=starts)
  separate, _ = run(model, variables, tokens.reshape(2, 3), starts_BxT=starts.reshape(2, 3))
  assert_close(packed.reshape(separate.shape), separate, 1e-5)
  together, _ = run(model, variables, tokens, starts_BxT=starts.at[0, 3].set(False))
  assert jnp.abs(together - packed)[0, 3:].max() > 1e-2


def test_padding_at_the_end_changes_nothing_before_it():
  model = small_model()
  variables, tokens = variables_of(model), random_tokens()
  valid = jnp.asarray([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
  expected, _ = run(model, variables, tokens)
  padded, _ = run(model, variables, tokens, valid_BxT=valid)
  assert_close(padded[valid == 1], expected[valid == 1], 1e-6)
  other, _ = run(model, variables, jnp.where(valid == 1, tokens, 0), valid_BxT=valid)
  np.testing.assert_array_equal(other[valid == 1], padded[valid == 1])


def test_padding_does_not_move_the_codebook():
  model, valid = small_model(layers=1), jnp.ones((B, T)).at[:, 4:].set(0)
  variables, memory = variables_of(model), transformer.empty_memory(model.config, B)

  @jax.jit
  def codebook_after(tokens):
    return model.apply(variables, tokens, memory, valid_BxT=valid, mutable=['codebook'])[1]

  after = codebook_after(random_tokens())
  padding_changed = codebook_after(random_tokens().at[:, 4:].set(2))
  jax.tree.map(np.testing.assert_array_equal, padding_changed, after)
  tokens_changed = codebook_after(random_tokens().at[:, 3].set(2))
  assert any(jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).any(), tokens_changed, after)))


def test_valid_tokens_do_not_see_padding_before_them():
  # Without the n-gram layer, where a padded token still is a predecessor.
  model = small_model(ngram=None, position='none')
  variables, tokens = variables_of(model), random_tokens()
  valid = jnp.ones((B, T)).at[:, :3].set(0)
  padded, _ = run(model, variables, tokens, valid_BxT=valid)
  alone, _ = run(model, variables, tokens[:, 3:])
  assert_close(padded[:, 3:], alone, 1e-5)


# Embeddings.


def test_embeddings_are_scaled_by_the_root_of_the_width():
  scaled, plain = small_model(), small_model(scale_embeddings=False)
  variables = variables_of(scaled)
  expected, _ = run(scaled, variables, random_tokens())
  table = variables['params']['embedding'] * SMALL['width'] ** 0.5
  params = {**variables['params'], 'embedding': table}
  hidden, _ = run(plain, {**variables, 'params': params}, random_tokens())
  assert_close(hidden, expected, 1e-5)


def test_sinusoid_is_added_to_the_embeddings():
  fields = {'ngram': None, 'scale_embeddings': False}
  model = small_model(position='sinusoid', **fields)
  variables = variables_of(model)
  hidden, _ = run(model, variables, DISTINCT)
  places = position.sinusoid(jnp.arange(T)[None], SMALL['width'])
  table = variables['params']['embedding'].at[DISTINCT].add(places)
  params = {**variables['params'], 'embedding': table}
  expected, _ = run(small_model(position='none', **fields), {'params': params}, DISTINCT)
  assert_close(hidden, expected, 1e-5)


# Memory.


@pytest.mark.parametrize('ngram', [None, NGRAM, dataclasses.replace(NGRAM, heads=4)])
@pytest.mark.parametrize('length', [1, T])
def test_memory_keeps_its_shape(ngram, length):
  model = small_model(ngram=ngram)
  memory = transformer.empty_memory(model.config, B)
  tokens = random_tokens(B, length)
  (_, after, aux), _ = jax.eval_shape(
    lambda: model.init_with_output(jax.random.key(0), tokens, memory)
  )
  assert jax.eval_shape(lambda: memory) == after
  assert aux == {}


def test_stream_split_at_document_starts_equals_one_pass():
  model = small_model()
  variables, tokens = variables_of(model), random_tokens(B, 9)
  starts = jnp.asarray([[1, 0, 0, 1, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1, 0, 0]], bool)
  expected, last = run(model, variables, tokens, starts_BxT=starts)
  memory, outputs, numbers = None, [], []
  for t in (0, 3, 6):
    segment = slice(t, t + 3)
    hidden, memory = run(
      model, variables, tokens[:, segment], memory, starts_BxT=starts[:, segment]
    )
    outputs.append(hidden)
    numbers.append(memory['document'].tolist())
  assert_close(jnp.concatenate(outputs, axis=1), expected, 1e-5)
  jax.tree.map(np.testing.assert_array_equal, memory, last)
  assert numbers == [[1, 0], [2, 3], [4, 4]]


def test_bigram_straddles_the_seam_of_a_document():
  model = small_model(layers=1)
  variables, tokens = variables_of(model), jnp.asarray([[1, 2], [3, 4]])
  _, memory = run(model, variables, jnp.asarray([[0, 1], [1, 3]]))
  fresh, _ = run(model, variables, tokens)
  continued, _ = run(model, variables, tokens, memory)
  starts = jnp.asarray([[1, 0], [1, 0]], bool)
  started, _ = run(model, variables, tokens, memory, starts_BxT=starts)
  assert (continued != fresh).any(axis=-1).all()
  assert_close(started, fresh, 1e-6)


# Head, precision.


def test_untied_chunked_head_equals_log_softmax_of_the_logits():
  model = small_model(ngram=None, tie_embeddings=False, vocabulary_chunk=4)
  params = {**variables_of(model)['params'], 'softmax_bias': jnp.linspace(-1, 1, V)}
  assert (params['softmax_weight'] != params['embedding']).any()
  hidden = jax.random.normal(jax.random.key(2), (B, T, SMALL['width']))
  logits = model.apply({'params': params}, hidden, method='logits')
  assert_close(logits, hidden @ params['softmax_weight'].T + params['softmax_bias'], 1e-6)
  score = lambda hidden: model.apply({'params': params}, hidden, random_tokens(), method='scores')
  scores = score(hidden)
  assert jaxprs.largest_array(score, hidden) < B * T * V
  chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), random_tokens()[..., None], axis=-1)
  assert_close(scores.nll_BxT, -chosen[..., 0], 1e-6)


def test_bfloat16_runs_with_float32_parameters():
  model, memory = small_model(dtype='bfloat16'), transformer.empty_memory(small_config(), B)
  initial = jax.eval_shape(model.init, jax.random.key(0), random_tokens(), memory)
  variables = variables_of(model)
  results = jax.eval_shape(loss_and_gradient(model, variables), variables['params'])
  assert {leaf.dtype.name for leaf in jax.tree.leaves((initial, results))} == {'float32'}
  hidden, _ = run(model, variables, random_tokens())
  expected, _ = run(small_model(), variables, random_tokens())
  assert hidden.dtype == jnp.bfloat16
  assert_close(hidden.astype('float32'), expected, 0.03)


# Where clusters come from.


@pytest.mark.parametrize('scale', [False, True])
@pytest.mark.parametrize('fields', [{}, {'prenormalize': True}, {'orders': (2, 3), 'dim': 2}])
def test_serving_with_cached_clusters_is_the_same(x64, fields, scale):
  ngram = dataclasses.replace(NGRAM, heads=2, **fields)
  model = small_model(ngram=ngram, dtype='float64', scale_embeddings=scale)
  variables = jax.tree.map(lambda a: a.astype('float64'), variables_of(model))
  served = heads.for_serving(model.config, variables['params'], variables['codebook'])
  assert jax.tree.map(jnp.shape, served) == {'ngrammer': {'quantizer': {'token_ids': (V, 2)}}}
  (hidden, memory), (expected, kept) = (
    run(model, {**variables, 'codebook': codebook}, random_tokens())
    for codebook in (served, variables['codebook'])
  )
  assert memory['ngram']['ids'].tolist() == kept['ngram']['ids'].tolist()
  assert_close(hidden, expected, 1e-12)
  without = dataclasses.replace(model.config, ngram=None)
  cached = lambda tokens: run(model, {**variables, 'codebook': served}, tokens)
  assert jaxprs.largest_array(cached, random_tokens(8, 32)) == jaxprs.largest_array(
    lambda tokens: run(dataclasses.replace(model, config=without), variables, tokens),
    random_tokens(8, 32),
  )


@pytest.mark.parametrize(
  'fields', [{'ngram': None}, {'ngram': dataclasses.replace(NGRAM, layer='end')}]
)
def test_where_clusters_depend_on_more_than_the_token_nothing_is_cached(fields):
  model = small_model(**fields)
  codebook = {'any': 'thing'}
  assert heads.for_serving(model.config, {}, codebook) is codebook


def test_training_clusters_the_vocabulary_where_it_is_smaller():
  """The same step, whether rows or tokens are clustered, up to rounding."""
  model, tokens = small_model(), random_tokens(4, 8)
  variables = variables_of(model)
  step = jax.jit(
    lambda tokens: model.apply(
      variables, tokens, transformer.empty_memory(model.config, len(tokens)), mutable=['codebook']
    )
  )
  (_, memory, _), after = step(tokens)  # 32 tokens, 13 rows
  split = [step(tokens[:1]), step(tokens[1:2])]  # 8 tokens each, one by one
  ids = [m['ngram']['ids'][0] for (_, m, _), _ in split]
  assert memory['ngram']['ids'][:2].tolist() == np.stack(ids).tolist()
  largest = jaxprs.largest_array(step, random_tokens(64, 64))
  alone = jaxprs.largest_array(
    lambda t: small_model(ngram=None).apply(
      {'params': variables['params']}, t, transformer.empty_memory(small_config(ngram=None), 64)
    ),
    random_tokens(64, 64),
  )
  assert largest == alone  # no distances of 64 x 64 tokens


@pytest.mark.parametrize('layer, before', [('input', 0), ('begin', 1), ('middle', 2), ('end', 4)])
@pytest.mark.parametrize('scan', [False, True])
def test_the_layer_stands_where_it_should(layer, before, scan):
  """Cutting off the blocks before it leaves its ids as they are; those after do not matter."""
  ngram = dataclasses.replace(NGRAM, layer=layer)
  model = small_model(layers=4, ngram=ngram, scan_layers=scan)
  variables = variables_of(model)

  def ids_with(changed):
    params = dict(variables['params'])
    if changed is not None:
      params[f'layer_{changed}'] = jax.tree.map(lambda a: a + 1, params[f'layer_{changed}'])
    return run(model, {**variables, 'params': params}, random_tokens(64, 1))[1]['ngram']['ids']

  plain = ids_with(None)
  moved = [i for i in range(4) if (ids_with(i) != plain).any()]
  assert moved == list(range(before))
