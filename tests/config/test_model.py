import pytest

from ngrammer_jax.config import model as model_config
from ngrammer_jax.config import recurrent as recurrent_config
from ngrammer_jax.config.attention import AttentionConfig
from ngrammer_jax.config.initial import InitialConfig
from ngrammer_jax.config.positions import RotaryScalingConfig
from tests.checks import bad_input

NGRAM = {'clusters': 4, 'vocabulary_size': 64, 'dim': 8}


def check(ngram=None, **fields):
  block = None if ngram is None else model_config.NGramConfig(**NGRAM | ngram)
  model_config.ModelConfig(ngram=block, **fields).check()


@pytest.mark.parametrize(
  'fields',
  [
    {},
    {'ngram': {}},
    {'ngram': {'heads': 8}},
    {'ngram': {'clusters': None}},
    {'ngram': {'combine': 'add', 'dim': 64}},
    {'position': 'sinusoid', 'width': 12, 'heads': 4},
    {'dropout': 0.9},
    {'memory': model_config.MemoryConfig(length=0)},
    {'memory': model_config.MemoryConfig(length=1, same_length='memory')},
    {'memory': model_config.MemoryConfig(length=2, sinks=1)},
    {'ngram': {'layer': 'attention', 'pairing': ('previous', 'attended', 'none', 'none')}},
  ],
)
def test_possible_model_passes(fields):
  check(**fields)


def test_an_adaptive_softmax_has_the_dropout_of_the_model_or_its_own():
  for own, expected in ((None, 0.3), (0.0, 0.0), (0.2, 0.2)):
    softmax = model_config.AdaptiveSoftmaxConfig(dropout=own)
    config = model_config.ModelConfig(dropout=0.3, adaptive_softmax=softmax)
    assert config.outer_dropout == expected
  assert model_config.ModelConfig(dropout=0.3).outer_dropout == 0.3


def test_number_of_parameters_of_an_attention_lstm():
  """Gates from 5 inputs and 6 outputs; four matrices and a score vector; a softmax of 7 tokens."""
  config = recurrent_config.RecurrentConfig(hidden=6, readout='key_value')
  assert config.parameters(width=5, vocabulary_size=7) == 4 * 6 * 12 + (4 * 9 + 3) + 7 * 4


memory = lambda **fields: {'memory': model_config.MemoryConfig(**fields)}
adaptive = lambda **fields: {'adaptive_softmax': model_config.AdaptiveSoftmaxConfig(**fields)}
positional = lambda position, **fields: {
  'position': position,
  'positional': model_config.PositionalConfig(**fields),
}
attention = lambda **fields: {'attention': model_config.AttentionConfig(**fields)}
capped = lambda cap: attention(logit_cap=cap)
persistent = lambda **fields: {'persistent': model_config.PersistentConfig(**fields)}


def spans(**fields):
  span = model_config.SpanConfig(**{'limit': 512} | fields)
  return memory(same_length='memory_alone') | {'span': span}


@pytest.mark.parametrize(
  'fields, message',
  [
    (memory(length=-1), 'model.memory.length=-1 must be at least 0'),
    (memory(first='ones'), "model.memory.first='ones' is not one of: empty, zeros"),
    (
      memory(same_length='yes'),
      "model.memory.same_length='yes' is not one of: no, memory, memory_and_self, memory_alone",
    ),
    (
      memory(length=0, same_length='memory'),
      "model.memory.length=0 must be at least 1 for model.memory.same_length='memory': use 1; a "
      'token attends to no key; "memory_and_self" is for a memory of length 0',
    ),
    (
      memory(first='zeros'),
      "model.memory.first='zeros' is not for model.norm='pre', but for post, post_skip: use "
      "'empty'; zero inputs must have zero keys and values",
    ),
    (
      memory(first='zeros')
      | {'norm': 'post', 'attention': AttentionConfig(query_key_value_bias=True)},
      "model.memory.first='zeros' is not for model.attention.query_key_value_bias=True, but for "
      "None, False: use 'empty'; zero inputs must have zero keys and values",
    ),
    (
      memory() | {'position': 'learned'},
      "model.position='learned' is not for model.memory.length=128, but for None, 0: use 'rope'; "
      'positions in the segment exclude a memory, also in evaluation; "relative" takes one',
    ),
    (
      positional('relative', clamp_length=0),
      'model.positional.clamp_length=0 must be at least 1, or None',
    ),
    (
      positional('rope', clamp_length=3),
      "model.positional.clamp_length=3 is not for model.position='rope', but for relative, shaw: "
      'use None',
    ),
    (positional('rope', min_timescale=0.0), 'model.positional.min_timescale=0.0 must be above 0'),
    (positional('shaw', max_length=0), 'model.positional.max_length=0 must be at least 1'),
    (
      adaptive(cutoffs=(8, 8)),
      'model.adaptive_softmax.cutoffs=(8, 8) must increase, the first above 0',
    ),
    (
      adaptive(cutoffs=(0, 8)),
      'model.adaptive_softmax.cutoffs=(0, 8) must increase, the first above 0',
    ),
    (adaptive(divisor=0), 'model.adaptive_softmax.divisor=0 must be at least 1'),
    (
      adaptive(cutoffs=(8, 16), divisor=32),
      'model.adaptive_softmax.divisor=32: width 256 is too small for the last of 3 clusters',
    ),
    (
      adaptive(cutoffs=(8,), tied_projections=(True, True, False)),
      'model.adaptive_softmax.tied_projections has 3 entries for 2 clusters: '
      'expected one for each, the head first, or one for all',
    ),
    (
      adaptive() | {'softmax_bias': False},
      'model.softmax_bias=False is not for model.adaptive_softmax=(defaults), but for None: use '
      'True',
    ),
    ({'norm_epsilon': 0.0}, 'model.norm_epsilon=0.0 must be above 0'),
    ({'attention_dropout': 1.0}, 'model.attention_dropout=1.0 must be at least 0 and below 1'),
    (
      {'activation': 'swish'},
      "model.activation='swish' is not one of: gelu, gelu_erf, relu, silu, squared_relu, softmax",
    ),
    (
      {'position': 'alibi'},
      "model.position='alibi' is not one of: rope, sinusoid, absolute, relative, shaw, table, "
      'segment_sinusoid, learned, none',
    ),
    (
      {'initial': InitialConfig(), 'norm_kind': 'rms', 'norm_offset': True},
      "model.initial.recipe='transformer_xl' is not for model.norm_offset=True, but for False",
    ),
    (
      {'heads': 4, 'key_value_heads': 3},
      'model.key_value_heads=3 must divide model.heads=4: use 2, or another model.heads',
    ),
    (
      persistent(kind='head_split') | {'key_value_heads': 2},
      "model.key_value_heads=2 must equal model.heads=4 for model.persistent.kind='head_split': "
      'use 4, or another model.heads',
    ),
    (
      {'key_value_heads': 2, 'shared_query_key': True, 'convolution': 3},
      'model.key_value_heads=2 must equal model.heads=4 for model.shared_query_key=True: use 4, or '
      'another model.heads; each query needs a key',
    ),
    (attention(layer_pattern=()), 'model.attention.layer_pattern=() has no layer: use ("full",)'),
    (
      attention(layer_pattern=('full', 'window')),
      "model.attention.window=None does not fit model.attention.layer_pattern=('full', 'window'): "
      'layers of the kind "window" need a window, and a window such layers',
    ),
    (
      attention(layer_pattern=('full', 'full', 'window'), window=8) | {'layers': 2},
      "model.attention.window=8 does not fit model.attention.layer_pattern=('full', 'full', "
      '\'window\'): layers of the kind "window" need a window, and a window such layers',
    ),
    (
      attention(layer_pattern=('unrotated',)) | {'position': 'sinusoid'},
      "model.attention.layer_pattern=('unrotated',) has layers without rotation, which "
      'model.position=\'sinusoid\' does not have: use "full" and "window"',
    ),
    (
      attention(inverse_layer_scale=True) | {'per_dim_scale': True},
      'model.attention.inverse_layer_scale=True is not for model.per_dim_scale=True, but for '
      'False: use False',
    ),
    (
      {'head_width': 7},
      'model.positional.rotary_fraction=1.0 rotates 7 of the 7 features of a head, which must be '
      'even and above 0',
    ),
    (
      attention(scale=0.1) | {'per_dim_scale': True},
      'model.attention.scale=0.1 is not for model.per_dim_scale=True, but for False: use None',
    ),
    (
      positional('rope', window_max_timescale=1e4),
      'model.positional.window_max_timescale=10000.0 is for layers with a window, and '
      'model.attention.layer_pattern has none: use None',
    ),
    (
      positional('rope', rotary_fraction=0.3),
      'model.positional.rotary_fraction=0.3 rotates 19 of the 64 features of a head, which must be '
      'even and above 0',
    ),
    (
      positional('rope', scaling=RotaryScalingConfig('longrope', short_factors=(1.0, 2.0))),
      'model.positional.scaling.short_factors has 2 factors, but heads have 32 rotated pairs of '
      'features',
    ),
    (
      positional('none', scaling=RotaryScalingConfig('linear', 2.0)),
      "model.positional.scaling=(factor=2.0) is not for model.position='none', but for rope: use "
      'None',
    ),
    (
      {'head_width': 32, 'ngram': {'layer': 'attention', 'pairing': ('previous',), 'heads': 3}},
      'model.ngram.heads=3 must divide model.heads x model.head_width = 128',
    ),
    (
      adaptive() | {'final_logit_cap': 3.0},
      'model.final_logit_cap=3.0 is not for model.adaptive_softmax=(defaults), but for None: use '
      'None',
    ),
    (
      adaptive() | {'logits_dtype': 'bfloat16'},
      "model.logits_dtype='bfloat16' is not for model.adaptive_softmax=(defaults), but for None: "
      'use None',
    ),
    ({'dtype': 'float16'}, "model.dtype='float16' is not one of: auto, bfloat16, float32, float64"),
    ({'remat': 'some'}, "model.remat='some' is not one of: none, minimal, full"),
    ({'layers': 0}, 'model.layers=0 must be from 1 to 1000'),
    ({'width': 0}, 'model.width=0 must be at least 1'),
    ({'heads': -2}, 'model.heads=-2 must be at least 1'),
    ({'feed_forward_width': -1}, 'model.feed_forward_width=-1 must be at least 1, or 0'),
    (
      {'heads': 7},
      "model.width=256 must be divisible by 2 x model.heads=7 for model.position='rope': use 252, "
      'or another model.heads; rope needs an even head width',
    ),
    (
      {'heads': 7, 'position': 'none'},
      'model.width=256 must be divisible by model.heads=7: use 259, or another model.heads',
    ),
    (
      {'initial': model_config.InitialConfig('gpt')},
      "model.initial.recipe='gpt' is not one of: transformer_xl, adaptive_span",
    ),
    (
      {'initial': model_config.InitialConfig('adaptive_span', deviation=0.1)},
      "model.initial.deviation=0.1 is not for model.initial.recipe='adaptive_span', but for "
      'transformer_xl: use 0.02',
    ),
    (
      {'initial': model_config.InitialConfig(deviation=0.0)},
      'model.initial.deviation=0.0 must be above 0',
    ),
    (
      adaptive(dropout=1.0),
      'model.adaptive_softmax.dropout=1.0 must be at least 0 and below 1, or None',
    ),
    ({'dropout': 1.0}, 'model.dropout=1.0 must be at least 0 and below 1'),
    (
      {'ngram': {'dim': 65}},
      'model.ngram: n-gram dim 65 is not between 1 and the head width 64 (width 256 / 4 heads)',
    ),
    (
      {'ngram': {'layer': 'attention', 'pairing': ('next',)}},
      "model.ngram.pairing='next' is not one of: previous, attended, none",
    ),
    (
      {'ngram': {'layer': 'attention', 'pairing': ('none', 'attended')}},
      'model.ngram.pairing has 2 entries for model.layers=4: '
      'expected one for each layer, or one for all',
    ),
    (
      {'ngram': {'padding_trains': True}},
      "model.ngram.padding_trains=True is not for model.ngram.layer='input', but for attention: "
      'use False',
    ),
    (
      {'ngram': {'pairing': ('attended',)}},
      "model.ngram.pairing=('attended',) is not for model.ngram.layer='input', but for attention: "
      "use ('previous',)",
    ),
    (
      {'ngram': {'layer': 'attention', 'pairing': ('none',)}},
      'model.ngram.pairing is "none" for all layers: use model.ngram=None, or another pairing',
    ),
    (
      {'ngram': {'layer': 'attention', 'pairing': ('attended',)}, 'position': 'none'},
      'model.ngram.pairing="attended" needs positions and context in all heads, not '
      'model.position=\'none\' and 4 of model.heads=4: use "previous"',
    ),
    (
      {'ngram': {'layer': 'attention', 'pairing': ('attended',), 'heads': 8}},
      "model.ngram.heads=8 must equal model.heads=4 for model.ngram.pairing=('attended',): use 4, "
      'or another model.heads',
    ),
    (
      {'ngram': {'layer': 'attention', 'clusters': None}},
      "model.ngram.clusters=None is not for model.ngram.layer='attention', but for input, begin, "
      'middle, end: use 256',
    ),
    (
      {'ngram': {'layer': 'attention', 'pairing': ('attended',), 'orders': (2, 3)}},
      "model.ngram.pairing=('attended',) is not for model.ngram.orders=(2, 3), but for (2,): use "
      "('previous',)",
    ),
    ({'ngram': {'heads': 3}}, 'model.ngram.heads=3 must divide model.width=256'),
    ({'ngram': {'combine': 'sum'}}, "model.ngram.combine='sum' is not one of: concat, add"),
    (
      spans(limit=16) | memory(length=16, same_length='memory_alone'),
      'model.span.limit=16 must be at least model.span.ramp=32: use 32, or a smaller '
      'model.span.ramp; a span is at least its ramp',
    ),
    (
      spans(renormalize=False, epsilon_keys='all'),
      "model.span.epsilon_keys='all' is not for model.span.renormalize=False, but for True: use "
      'None',
    ),
    (spans(kind='fixed'), "model.span.kind='fixed' is not one of: adaptive, dynamic"),
    (spans(limit=0), 'model.span.limit=0 must be at least 1'),
    (
      spans(ramp=0),
      'model.span.ramp=0 must be at least 1: a span without a ramp has no gradient (the papers use '
      '32)',
    ),
    (
      spans(kind='dynamic', initial=-1e9),
      "model.span.initial=-1000000000.0 must be at least -20 for model.span.kind='dynamic': use "
      '-20',
    ),
    (spans(reserve=0), 'model.span.reserve=0 must be at least 1'),
    (spans(penalty=-1.0), 'model.span.penalty=-1.0 must be at least 0'),
    (
      spans(initial=2.0),
      "model.span.initial=2.0 must be at most 1 for model.span.kind='adaptive': use 1",
    ),
    (
      spans(limit=128) | {'memory': None},
      'model.span=(limit=128) is not for model.memory.same_length=None, but for memory, '
      'memory_and_self, memory_alone: use None; every token needs the same number of keys: set '
      'model.memory.length to the limit, and model.memory.same_length ("memory_alone" in the '
      'paper)',
    ),
    (
      spans(limit=64),
      'model.memory.length=128 must be at most model.span.limit=64: use 64, or a larger '
      'model.span.limit',
    ),
    (
      memory(same_length='memory_and_self') | positional('table', max_length=128),
      'model.position="table" has vectors for model.positional.max_length=128 distances, but a '
      'token attends to 129 keys: limit them by model.memory.length and '
      'model.memory.same_length, also in evaluation, or raise max_length',
    ),
    (persistent(vectors=-1), 'model.persistent.vectors=-1 must be at least 0'),
    (
      persistent(vectors=0, kind='single_head'),
      "model.persistent.vectors=0 must be at least 1 for model.persistent.kind='single_head': use "
      '1',
    ),
    (
      persistent(kind='head_split') | {'heads': 3, 'width': 48},
      "model.heads=3 must be divisible by 2 for model.persistent.kind='head_split': use 4",
    ),
    (
      persistent(kind='head_split') | {'ngram': {'layer': 'attention'}},
      "model.persistent.kind='head_split' is not for model.ngram.layer='attention', but for None, "
      "input, begin, middle, end: use 'all_attention'",
    ),
    (
      persistent(kind='head_split') | {'shared_query_key': True, 'convolution': 3},
      "model.persistent.kind='head_split' is not for model.shared_query_key=True, but for False: "
      "use 'all_attention'",
    ),
    ({'ngram': {'clusters': 0}}, 'model.ngram.clusters=0 must be at least 1, or None'),
    (capped(0.0), 'model.attention.logit_cap=0.0 must be above 0, or None'),
    (
      capped(2.0) | {'kernel': 'cudnn'},
      "model.kernel='cudnn' does not support model.attention.logit_cap=2.0: use model.kernel=None, "
      'which selects automatically',
    ),
  ],
)
def test_impossible_model_says_what_to_change(fields, message):
  with bad_input(message):
    check(**fields)


def test_learned_positions_repeat_with_a_memory():
  limits = lambda **fields: (
    (model := model_config.ModelConfig(position='absolute', **fields)).num_positions,
    model.longest_document,
  )
  assert limits() == (512, 512)
  assert limits(memory=model_config.MemoryConfig()) == (512, None)


def test_an_ngrammer_after_attention_may_have_heads_of_its_own():
  check(ngram={'layer': 'attention', 'heads': 8})
  check(ngram={'orders': (3, 2)})


def test_a_tail_without_words():
  config = model_config.AdaptiveSoftmaxConfig((8, 20))
  config.check_vocabulary(21)
  with bad_input('model.adaptive_softmax.cutoffs=(8, 20): the vocabulary has only 20 words'):
    config.check_vocabulary(20)
