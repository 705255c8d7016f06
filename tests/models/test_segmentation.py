"""Any split of a stream, down to single tokens, equals one pass; and which tokens affect which.

Each drawn config runs as two programs: one keeps layer inputs, as in training, one a KV cache;
attention works in blocks in one of them, and over full scores in the other. Segments of any
length are padded to one, so that padding is tested too.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest

from ngrammer_jax import errors
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config import span as span_config
from ngrammer_jax.layers.attention import blocks
from ngrammer_jax.models import embedding_and_head, language_model, transformer
from tests.checks import assert_close, full, random_variables, rest_is_full
from tests.models import drawn

T, V = drawn.T, drawn.V
DRAWN, DRAWN_EVERY_DAY = 12, 48
FULL = (0, 2, 3)  # the others are slow
FIRST_SEED = 0
CALLS, SPLITS = 4, 4  # segments of a stream, and ways to split it
TOLERANCE = 1e-10
TOKENS = np.random.default_rng(0).integers(0, V, T)
# Both begin inside a document. The first has no other; in the second, two more start, the first
# of them with a single token.
STARTS = np.zeros((2, T), bool)
STARTS[1, [3, 4]] = True
LAST = slice(4, T)  # its last document
PREFIX = 3


class Rows(NamedTuple):
  """Streams and their splits: [R, T], and [R, CALLS]."""

  tokens: np.ndarray
  starts: np.ndarray
  prefix: np.ndarray
  lengths: np.ndarray


# Rows by what they are for; of both streams, but for the last two.
SPLIT = np.arange(2 * SPLITS).reshape(2, SPLITS)  # the first of each is one pass
CHANGED = SPLIT.size + np.arange(2 * T).reshape(2, T)  # the token at each place is another
PREFIXED = CHANGED.max() + 1 + np.arange(4).reshape(2, 2)  # one pass, and a split after the prefix
ALONE = PREFIXED.max() + 1  # the last document as a stream


def rows_of(seed: int) -> Rows:
  """All rows, with drawn splits; segments may be empty."""
  rng, count = np.random.default_rng(seed), ALONE + 1
  tokens, starts = np.tile(TOKENS, (count, 1)), np.zeros((count, T), bool)
  for stream in range(2):
    starts[[*SPLIT[stream], *CHANGED[stream], *PREFIXED[stream]]] = STARTS[stream]
    place = np.arange(T)
    tokens[CHANGED[stream], place] = (TOKENS + rng.integers(1, V, T)) % V
  borders = np.sort(rng.integers(0, T + 1, (count, CALLS - 1)), axis=1)
  lengths = np.diff(borders, axis=1, prepend=0, append=T)
  lengths[[*SPLIT[:, 0], *PREFIXED[:, 0]]] = [T, 0, 0, 0]
  lengths[PREFIXED[:, 1]] = [PREFIX + 1, 1, 0, T - PREFIX - 2]
  prefix = np.zeros((count, T), bool)
  prefix[PREFIXED, :PREFIX] = True
  tokens[ALONE, : T - LAST.start] = TOKENS[LAST]
  starts[ALONE, 0] = True
  lengths[ALONE] = [T - LAST.start, 0, 0, 0]
  return Rows(tokens, starts, prefix, lengths)


def calls(rows: Rows):
  """Of each call the place in the stream of every token [R, T], and which are valid."""
  ends = rows.lengths.cumsum(axis=1)
  for i in range(CALLS):
    place = (ends - rows.lengths)[:, i, None] + np.arange(T)
    yield np.minimum(place, T - 1), place < ends[:, i, None]


def run_stream(model, variables, memory, rows: Rows, prefix: bool):
  """The hidden states [R, T, D] in the order of the streams, and the memory after them."""
  run = jax.jit(lambda variables, *args, **more: model.apply(variables, *args, **more)[:2])
  hidden = np.zeros((*rows.tokens.shape, model.config.width))
  padding_rng = np.random.default_rng(1)
  for place, valid in calls(rows):
    take = lambda array, place=place: np.take_along_axis(array, place, axis=1)
    tokens = np.where(valid, take(rows.tokens), padding_rng.integers(0, V, valid.shape))
    # Document starts at padding are ignored.
    kwargs = {'starts_BxT': take(rows.starts) | ~valid, 'valid_BxT': valid.astype(np.int32)}
    if prefix:
      kwargs['prefix_BxT'] = take(rows.prefix) & valid
    outputs, memory = run(variables, tokens, memory, **kwargs)
    row, column = np.nonzero(valid)
    hidden[row, place[valid]] = np.asarray(outputs)[row, column]
  return hidden, jax.tree.map(np.asarray, memory)


def nonnegative_spans(variables):
  """With spans of at least 0: with such a ramp every key counts."""
  positive_spans = lambda path, leaf: np.abs(leaf) if path[-1].key == 'span' else leaf
  return jax.tree_util.tree_map_with_path(positive_spans, variables)


def check(case, seed):
  """All that holds of a case."""
  config, rows = drawn.config_of(case), rows_of(seed)
  kernels = ('xla', 'blocks') if seed % 2 else ('blocks', 'xla')
  model, cached = (
    transformer.TransformerLM(dataclasses.replace(config, kernel=kernel), V) for kernel in kernels
  )
  memory = language_model.empty_memory(config, ALONE + 1)
  variables = nonnegative_spans(random_variables(model, rows.tokens, memory, dtype='float64'))
  served, slots = variables, T - 1
  if case['served']:
    serve = jax.jit(functools.partial(embedding_and_head.for_serving, config))
    served = variables | {'codebook': serve(variables['params'], variables['codebook'])}
  if config.memory is not None:
    slots = config.memory.length
  cache = language_model.empty_memory(config, ALONE + 1, slots)
  hidden, after = run_stream(cached, served, cache, rows, case['prefix'])
  assert after['cache'].count.tolist() == rows.lengths.sum(axis=1).tolist()
  check_rows(case, config, rows, hidden, after)
  # Without a memory segments are independent: one segment is compared.
  full = rows
  if config.memory is None:
    full = rows._replace(lengths=rows.lengths.sum(axis=1, keepdims=True) * [1, 0, 0, 0])
  inputs, after = run_stream(model, variables, memory, full, case['prefix'])
  assert_close(inputs, hidden, TOLERANCE)
  check_rows(case, config, full, inputs, after)


def check_rows(case, config, rows, hidden, after):
  """What holds of the hidden states and of the memory after them."""
  after = {name: part for name, part in after.items() if name != 'spans'}  # of a segment
  limit = TOLERANCE * (1 + np.abs(hidden).max())
  least, most = drawn.receptive_field(config)
  across = config.memory is not None and config.memory.across_documents
  place = np.arange(T)
  distance = place - place[:, None]
  for stream in range(2):
    first, *rest = SPLIT[stream]
    for other in rest:
      assert_close(hidden[other], hidden[first], TOLERANCE)
      leaves = jax.tree_util.tree_leaves_with_path(after)
      for path, leaf in leaves if config.memory is not None or 'cache' in after else ():
        difference = np.abs(1.0 * leaf[other] - leaf[first]).max(initial=0)
        assert difference <= limit, f'memory{jax.tree_util.keystr(path)}'
    changed = np.abs(hidden[CHANGED[stream]] - hidden[first]).max(axis=-1) > limit
    document = STARTS[stream].cumsum()
    may_affect = (distance >= 0) & (distance <= most)
    if not across:
      may_affect &= document == document[:, None]
    assert not (changed & ~may_affect).any(), np.argwhere(changed & ~may_affect)
    assert changed.diagonal().all()
    if stream == 0:
      never = [d for d in range(min(least, T - 1) + 1) if not changed.diagonal(d).any()]
      assert not never, f'no token is affected by those {never} before it'
    if case['prefix']:
      full, split = hidden[PREFIXED[stream]]
      assert_close(split, full, TOLERANCE)
      assert np.abs(full - hidden[first])[0].max() > limit
  if not across:
    count = T - LAST.start
    assert_close(hidden[ALONE, :count], hidden[SPLIT[1, 0], LAST], TOLERANCE)


@pytest.fixture
def in_blocks(monkeypatch):
  """Queries and keys in blocks, of whatever length."""
  monkeypatch.setattr(blocks, 'BLOCK', 2)
  monkeypatch.setattr(span_config, 'MIN_LIMIT', 1)


def check_drawn(number, count, seed):
  """The numbered one of drawn cases; says which if it fails."""
  case = drawn.cases(count, seed)[number]
  non_default = {name: option for name, option in case.items() if option != drawn.OPTIONS[name][0]}
  print(f'NGRAMMER_JAX_TEST_SEED={seed}, case {number} of {count}: {non_default}')
  check(case, seed + number)


@pytest.mark.parametrize('name', rest_is_full(drawn.TOGETHER, ('in place of the feed-forward',)))
def test_any_split_of_all_memories_together(x64, in_blocks, name):
  check(drawn.together(name), 0)


def test_each_memory_stands_beside_each_other():
  """Or is refused by name."""
  together = [drawn.together(name) for name in drawn.TOGETHER]
  for name in drawn.MEMORIES:
    for option in drawn.OPTIONS[name][1:]:
      assert any(option == case[name] or option in case[name] for case in together), option
  in_place = drawn.together('in place of the feed-forward')
  for name in drawn.IN_FEED_FORWARD:
    with pytest.raises(errors.BadInput, match='replaces the feed-forward of block 0, used by'):
      drawn.config_of(in_place | {'ngram_memory': name})


@pytest.mark.parametrize(
  'number',
  [full(i) if i in FULL else pytest.param(i, marks=pytest.mark.slow) for i in range(DRAWN)],
)
def test_any_split_of_drawn_options(x64, in_blocks, number):
  check_drawn(number, DRAWN, drawn.covering_seed(DRAWN, FIRST_SEED))


@pytest.mark.slow
@pytest.mark.parametrize('number', range(DRAWN_EVERY_DAY))
def test_any_split_of_other_drawn_options_every_day(x64, in_blocks, number):
  check_drawn(number, DRAWN_EVERY_DAY, drawn.rotating_seed())


DECODED = model_config.ModelConfig(
  layers=1,
  width=16,
  heads=2,
  feed_forward_width=24,
  convolution=3,
  dtype='float64',
  ngram=model_config.NGramConfig(clusters=4, vocabulary_size=32, dim=2, orders=(2, 3)),
)


@pytest.mark.full
def test_tokens_one_by_one_see_as_many_as_there_are_slots(x64):
  """A token sees the slots and itself, as in a window; rows wait for one another."""
  slots, tokens = 3, np.tile(TOKENS, (2, 1))
  memory = model_config.MemoryConfig(slots, same_length='memory_and_self')
  window = transformer.TransformerLM(dataclasses.replace(DECODED, memory=memory), V)
  model = transformer.TransformerLM(DECODED, V)
  empty = window.empty_memory(2)
  variables = random_variables(window, tokens, empty, dtype='float64')
  apply = lambda model: jax.jit(lambda *args, **more: model.apply(*args, **more)[:2])
  one_pass, _ = apply(window)(variables, tokens, empty, starts_BxT=STARTS)
  step, memory = apply(model), model.empty_memory(2, slots)
  # Which rows go on: the first waits now and then, the second at the end.
  goes = np.array([[1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1], [1] * T + [0] * 3])
  states, place = np.zeros((2, T, DECODED.width)), np.zeros(2, int)
  row = np.arange(2)
  for valid in goes.T:
    at = np.minimum(place, T - 1)
    starts = (STARTS[row, at] & (valid > 0))[:, None]
    # What stands in the padding does not matter.
    next_token = np.where(valid > 0, tokens[row, at], V - 1)[:, None]
    hidden, memory = step(
      variables, next_token, memory, starts_BxT=starts, valid_BxT=valid[:, None]
    )
    states[row[valid > 0], at[valid > 0]] = np.asarray(hidden)[valid > 0, 0]
    place += valid
  assert place.tolist() == memory['cache'].count.tolist() == [T, T]
  assert_close(states, one_pass, TOLERANCE)


@pytest.mark.full
def test_a_decoded_token_copies_no_cache():
  """What a step needs beside its arguments is far less than the cache it writes into."""
  config, slots = dataclasses.replace(DECODED, dtype='float32', convolution=None), 4096
  model, tokens = transformer.TransformerLM(config, V), np.zeros((2, 1), np.int32)
  shapes = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
  memory = jax.eval_shape(lambda: model.empty_memory(2, slots))
  variables = shapes(jax.eval_shape(model.init, jax.random.key(0), tokens, memory))
  step = jax.jit(model.apply, donate_argnums=2)
  needs = step.lower(variables, tokens, memory).compile().memory_analysis()
  cache_bytes = sum(leaf.size * 4 for leaf in jax.tree.leaves(memory['layers']))
  assert needs.alias_size_in_bytes >= cache_bytes
  assert needs.temp_size_in_bytes < cache_bytes / 2
  assert memory['ngram']['ids'].shape == (2, 2, 2)  # the n-gram layer looks at two tokens
