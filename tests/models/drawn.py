"""Transformers of drawn options, so that few of them have many pairs of options.

A case is a dict of options by name; `config_of` makes a config of it.
"""

import collections
import datetime
import functools
import itertools
import os
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.copy_memory import CopyMemoryConfig
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.config.ngram.value_gate import ValueGateConfig
from ngrammer_jax.config.positions import RotaryScalingConfig
from ngrammer_jax.config.product_memory import ProductMemoryConfig
from ngrammer_jax.config.token_shift import TokenShiftConfig

T, V = 8, 13  # tokens of a stream, vocabulary
CANDIDATES = 250
Case = dict[str, Any]

OPTIONS: Case = {
  'position': (
    'rope',
    'sinusoid',
    'relative',
    'relative, clamped',
    'shaw',
    'table',
    'none',
    'absolute',
  ),
  'ngram': (
    None,
    'input',
    'raw',
    'begin',
    'end',
    'attention',
    'attended',
    'attended and previous',
  ),
  'grams': ('pairs', 'triples', 'two orders', 'distinct start', 'added', 'prenormalised'),
  'ngram_heads': (None, 4),
  'ngram_memory': (
    None,
    'engram',
    'end of sentence',
    'clusters',
    'product',
    'stem',
    'two in the feed-forward',
    'token values',
    'n-gram values',
  ),
  'copies': (None, 'tokens', 'compressed'),
  'token_shift': (None, 'before_attention', 'before_feed_forward'),
  'served': (False, True),  # the cache is used with clusters that are looked up
  'logit_cap': (None, 1.5),
  'norm': model_config.NORMS,
  'convolution': (None, 2, 3, 4),
  'shared_query_key': (False, True),
  'per_dim_scale': (False, True),
  'bias': (False, True),
  'feed_forward': ('gated', 'squared relu', 'none'),
  'product_memory': (None, 'in place', 'beside'),
  'adaptive_softmax': (False, True),
  'scan_layers': (False, True),
  'layers': (1, 2),
  'remat': ('none', 'full'),
  'span': (None, 'adaptive', 'dynamic', 'adaptive, not renormalised'),
  'persistent': (None, 'all_attention', 'attention_split', 'single_head', 'head_split'),
  # Of memory None, keys and values alone are kept.
  'memory': (None, 'no', 'memory', 'memory_and_self', 'memory_alone'),
  'length': (2, 3, 4),
  'first': ('empty', 'zeros'),
  'across_documents': (False, True),
  'prefix': (False, True),
  'rotary': ('plain', 'partial', 'interleaved', 'scaled'),
  'heads': ('2', '4 with 2 keys', '4 with 1 key, wide'),
  'norm_kind': ('layer', 'rms', 'rms, offset'),
  'query_key_norm': (None, 'head', 'full'),
  'layer_pattern': (('full',), ('window',), ('window', 'full'), ('full', 'unrotated')),
  'parallel_residual': (False, True),
  'final_logit_cap': (None, 2.0),
}
# Options that have no effect unless another one is set.
NEEDS = {
  'grams': 'ngram',
  'ngram_heads': 'ngram',
  'served': 'ngram',
  'shared_query_key': 'convolution',
  'length': 'memory',
  'first': 'memory',
  'across_documents': 'memory',
}
RARE = {'adaptive_softmax', 'across_documents', 'layers', 'remat'}  # mostly the first option
GRAMS = {
  'pairs': {},
  'triples': {'orders': (3,)},
  'two orders': {'orders': (2, 3), 'dim': 1},
  'distinct start': {'orders': (2, 3), 'dim': 1, 'distinct_start': True},
  'added': {'combine': 'add'},
  'prenormalised': {'prenormalize': True},
}
GATE = {'layers': (0,), 'heads': 2, 'rows': (11,), 'width': 3}
PRODUCT = GATE | {'join': 'product', 'embedding_part': True}
TOKEN_ROWS = {'layers': (0,), 'heads': 1, 'width': None, 'orders': (1,), 'hash': 'id'}
TOKEN_ROWS |= {'row_rule': 'vocabulary'}
EVERY_BLOCK = {'join': 'sum', 'every_block': True, 'table': 'added', 'factor': 0.5, 'signs': 7}
EVERY_BLOCK |= {'hash': 'speedrun', 'heads': 1, 'row_rule': 'exact', 'rows': (11,), 'width': 16}
NGRAM_MEMORIES = {  # the other keys and joins alone, in tests/layers/ngram
  'engram': (
    GATE | {'convolution': 3, 'bias': True, 'table': 'gated', 'sliced': True},
    EVERY_BLOCK,
  ),
  'end of sentence': (
    GATE
    | {'key': 'compressed', 'hash': 'ple', 'boundary': 'eos_id', 'eos_id': 3, 'orders': (1, 3)},
  ),
  'clusters': (GATE | {'key': 'clusters', 'clusters': 4, 'convolution': 2, 'displacement': 1},),
  'product': (PRODUCT,),
  'stem': (TOKEN_ROWS | {'join': 'replace', 'point': 'feed_forward'},),
  'two in the feed-forward': (
    GATE | {'heads': 1, 'width': None, 'join': 'sum', 'point': 'feed_forward'},
    TOKEN_ROWS | {'join': 'multiply', 'point': 'after_feed_forward'},
  ),
}
SMALL_KEYS = {'layers': (0,), 'sub_keys': 4, 'heads': 2, 'top': 3, 'key_width': 6}
PRODUCT_MEMORIES = {
  'in place': SMALL_KEYS | {'norm': 'query_key', 'swilu': True, 'experts': True},
  'beside': SMALL_KEYS
  | {'point': 'beside_feed_forward', 'norm': 'query', 'gated': True, 'value_width': 5},
}
VALUES = {'point': 'values', 'join': 'sum'}
WITH_BIAS = ValueGateConfig(channels=5, bias=0.5, mean=True, per_head=False)
NGRAM_MEMORIES |= {
  'token values': (
    TOKEN_ROWS | VALUES | {'value_gate': ValueGateConfig(channels=5, row_channels=1)},
  ),
  'n-gram values': (
    GATE
    | VALUES
    | {'layers': (), 'every_block': True, 'table': 'values', 'join': 'weighted_sum'}
    | {'projection': True, 'value_gate': WITH_BIAS},
    GATE
    | {'point': 'values', 'join': 'interpolation', 'one_head': True, 'heads': 1, 'width': None}
    | {'hash': 'salted', 'row_rule': 'shared_prime'},
  ),
}
MEMORIES = ('ngram_memory', 'copies', 'token_shift', 'product_memory')
IN_FEED_FORWARD = ('stem', 'two in the feed-forward')  # refused where product keys replace it
# Cases that are not drawn: all memories in one model, each option of them beside another one of
# each other kind, and n-gram memories beside all others.
TOGETHER = {
  'beside the feed-forward': {
    'ngram_memory': OPTIONS['ngram_memory'][1:],
    'copies': 'tokens',
    'token_shift': 'before_attention',
    'product_memory': 'beside',
    'memory': 'memory',
  },
  'in place of the feed-forward': {
    'ngram_memory': tuple(
      name for name in OPTIONS['ngram_memory'][1:] if name not in IN_FEED_FORWARD
    ),
    'copies': 'compressed',
    'token_shift': 'before_feed_forward',
    'product_memory': 'in place',
    'ngram': 'attended',
    'norm': 'post',
    'memory': 'memory_and_self',
  },
}
WINDOW = 4
HEADS = {
  '2': {'heads': 2},
  '4 with 2 keys': {'heads': 4, 'key_value_heads': 2},
  '4 with 1 key, wide': {'heads': 4, 'key_value_heads': 1, 'head_width': 6},
}
SCALED = RotaryScalingConfig('yarn', factor=3.0, original_length=20, beta_fast=2.0)
ROTARY = {
  'plain': {},
  'partial': {'rotary_fraction': 0.5},
  'interleaved': {'interleaved': True},
  'scaled': {'scaling': SCALED},
}
PAIRING = {
  'attention': ('previous',),
  'attended': ('attended',),
  'attended and previous': ('attended', 'previous'),
}


def config_of(case: Case) -> model_config.ModelConfig:
  """The config of a case, checked."""
  c, ngram, memory, persistent = case, None, None, None
  positional = {
    'relative, clamped': {'shared_biases': False, 'clamp_length': 3},
    'shaw': {'max_length': 5, 'clamp_length': 4},
    'table': {'max_length': T},
    'absolute': {'max_length': T - 2},  # the last two tokens repeat the first positions
    'rope': ROTARY[c['rotary']],
  }
  has_window = any('window' in name for name in c['layer_pattern'])
  if has_window and c['rotary'] in ('partial', 'scaled'):
    positional['rope'] = positional['rope'] | {'window_max_timescale': 50.0}
  if c['ngram'] is not None:
    grams = GRAMS[c['grams']]
    pairing = PAIRING.get(c['ngram'])
    if c['grams'] == 'added':
      grams = grams | {'dim': 16 // (c['ngram_heads'] or 2)}
    ngram_options = {'layer': 'attention', 'pairing': pairing} if pairing else {'layer': c['ngram']}
    if c['ngram'] == 'raw':
      ngram_options = {'layer': 'input', 'clusters': None}
    fields = {'clusters': 4, 'vocabulary_size': 32, 'dim': 2, 'heads': c['ngram_heads']}
    ngram = model_config.NGramConfig(**fields | grams | ngram_options)
  if c['memory'] is not None:
    memory = model_config.MemoryConfig(
      T - 1 if c['memory'] == 'no' else c['length'], c['first'], c['memory'], c['across_documents']
    )
  span = None
  if c['span'] is not None:
    kind, *rest = c['span'].split(', ')
    # A ramp over all of the limit: every key counts.
    span = model_config.SpanConfig(kind, limit=T, ramp=T, renormalize=not rest)
  if c['persistent'] is not None:
    persistent = model_config.PersistentConfig(3, c['persistent'])
  product_memory = None
  if c['product_memory'] is not None:
    product_memory = ProductMemoryConfig(**PRODUCT_MEMORIES[c['product_memory']])
  ngram_memories = ()
  if c['ngram_memory'] is not None:
    names = c['ngram_memory']
    if isinstance(names, str):
      names = (names,)
    all_values = [values for name in names for values in NGRAM_MEMORIES[name]]
    if c['ngram_memory'] == 'product' and c['layers'] == 2:
      all_values = (PRODUCT | {'point': 'after_block', 'layers': (0, 1)},)
    ngram_memories = tuple(NGramMemoryConfig(**values) for values in all_values)
  copies, shift = None, None
  if c['copies'] is not None:
    copies = CopyMemoryConfig(c['copies'], window=3, lengths=(1, 2))
  if c['token_shift'] is not None:
    shift = TokenShiftConfig(tokens=3, points=(c['token_shift'],))
  adaptive = model_config.AdaptiveSoftmaxConfig((5,), 2) if c['adaptive_softmax'] else None
  same = ('norm', 'convolution', 'shared_query_key', 'per_dim_scale', 'bias')
  config = model_config.ModelConfig(
    width=16,
    **HEADS[c['heads']],
    dtype='float64',
    position=c['position'].split(',')[0],
    positional=model_config.PositionalConfig(**positional.get(c['position'], {})),
    attention=model_config.AttentionConfig(
      c['logit_cap'],
      query_key_norm=c['query_key_norm'],
      window=WINDOW if has_window else None,
      layer_pattern=c['layer_pattern'],
    ),
    norm_kind=c['norm_kind'].split(',')[0],
    norm_offset='offset' in c['norm_kind'],
    ngram=ngram,
    ngram_memories=ngram_memories,
    product_memory=product_memory,
    copy_memory=copies,
    token_shift=shift,
    memory=memory,
    span=span,
    persistent=persistent,
    adaptive_softmax=adaptive,
    feed_forward_width=0 if c['feed_forward'] == 'none' else 12,
    gated=c['feed_forward'] == 'gated',
    activation='squared_relu' if c['feed_forward'] == 'squared relu' else 'gelu',
    **{name: c[name] for name in (*same, 'scan_layers', 'layers', 'remat')},
    **{name: c[name] for name in ('parallel_residual', 'final_logit_cap')},
  )
  serves = ngram is not None and ngram.layer == 'input' and ngram.clusters and not adaptive
  if (c['served'] and not serves) or (c['prefix'] and not config.sees_later_tokens):
    raise errors.BadInput('an option without a use')
  # Capped scores are equal up to rounding, which then says which key has the most attention.
  if c['logit_cap'] and 'attended' in (c['ngram'] or ''):
    raise errors.BadInput('an option whose results depend on rounding')
  # Zeros come before the memory: how many a token sees depends on where segments end.
  if memory is not None and memory.first == 'zeros' and memory.same_length == 'no':
    raise errors.BadInput('an option that is no property of the stream')
  config.check()  # the last, because it takes longest
  return config


def receptive_field(config: model_config.ModelConfig) -> tuple[int, int]:
  """How far the past of a token reaches at least, and at most. T: as far as there is."""
  m, n = config.memory, config.ngram
  attended = T
  if m is not None and m.same_length != 'no':
    attended = {'memory': m.length - 1}.get(m.same_length, m.length)
  windows = [WINDOW - 1 if kind.has_window else T for kind in config.layer_types()]
  attended_by_layer = [min(attended, window) for window in windows]
  if max(attended_by_layer) == T:
    return T, T
  taps = (config.convolution or 1) - 1
  grams = 0 if n is None else max(n.orders) - 1
  reach = [
    max(n.orders) - 1 + n.displacement + max(n.convolution - 1, 0) * max(n.orders)
    for n in config.ngram_memories
  ]
  within = sum(attended + taps for attended in attended_by_layer)
  most = sum(max(attended, taps) + taps for attended in attended_by_layer)
  if config.copy_memory is not None:
    reach.append(config.copy_memory.window + max(config.copy_memory.lengths))
  if config.token_shift is not None:
    reach.append(config.layers * (config.token_shift.tokens - 1))
  most += grams if n is None or n.layer != 'attention' else within + config.layers * grams
  return within, most + sum(reach)


def _candidate(rng: np.random.Generator) -> Case:
  while True:
    case = {}
    for name, options in OPTIONS.items():
      needed = NEEDS.get(name)
      choice = needed is None or case.get(needed) is not None or needed not in case
      if name in RARE and rng.random() < 0.6:
        choice = False
      case[name] = options[rng.integers(len(options)) if choice else 0]
    if case['memory'] in (None, 'no'):
      case['length'] = OPTIONS['length'][0]
    if case['ngram'] in PAIRING:  # heads are those of attention, what it finds makes pairs
      case['ngram_heads'] = None
      if case['ngram'] != 'attention' and 'orders' in GRAMS[case['grams']]:
        case['grams'] = 'pairs'
      if case['ngram'] == 'attended and previous':
        case['layers'] = 2
    try:
      config_of(case)
    except errors.BadInput:
      continue
    return case


def together(name: str) -> Case:
  """One of `TOGETHER`, with the first option of all that it does not name."""
  return {key: options[0] for key, options in OPTIONS.items()} | TOGETHER[name]


@functools.cache
def cases(count: int, seed: int) -> tuple[Case, ...]:
  """Cases that have every option, often if there are few, and as many pairs as can be."""
  rng = np.random.default_rng(seed)
  remaining = [_candidate(rng) for _ in range(CANDIDATES)]
  pairs_by_case = {id(case): list(itertools.combinations(case.items(), 2)) for case in remaining}
  single, pairs, chosen = collections.Counter(), set(), []
  for _ in range(count):

    def gain(case):
      new = sum(single[item] == 0 for item in case.items())
      rare = sum(single[item] < 2 for item in case.items())
      return 200 * new + 40 * rare + sum(pair not in pairs for pair in pairs_by_case[id(case)])

    best = max(remaining, key=gain)
    single.update(best.items())
    pairs.update(pairs_by_case[id(best)])
    remaining = [case for case in remaining if case is not best]
    chosen.append(best)
  return tuple(chosen)


@functools.cache
def covering_seed(count: int, first: int) -> int:
  """The first seed from `first` on whose few cases have every option."""
  items = [(name, option) for name, options in OPTIONS.items() for option in options]
  for seed in range(first, first + 100):
    if all(any(case[name] == option for case in cases(count, seed)) for name, option in items):
      return seed
  raise ValueError(f'no {count} cases have every option: draw more')


def rotating_seed() -> int:
  """Another one every day; NGRAMMER_JAX_TEST_SEED repeats one."""
  return int(os.environ.get('NGRAMMER_JAX_TEST_SEED', datetime.date.today().toordinal()))
