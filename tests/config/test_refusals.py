"""Everything that the config refuses: the overrides of a command line, and the error message.

All other tests of the config are of what it accepts, or of how its rules work.
"""

import pytest

from ngrammer_jax import command_line, config, errors
from tests.checks import bad_input
from tests.loops import each

# Each row has the overrides without `--config.`, separated by spaces, and the whole message. MEMORY
# stands for `model.ngram_memories.0`.
CHAT_REMEDY = (
  'use False, or data.corpus=text or shards, and data.vocabulary=tokenizer with the folder of a '
  'model for chats as data.vocabulary_path'
)
KEYS = [
  ('optimizer.learning_rate=nan', "optimizer.learning_rate='nan' is not of type float"),
  (
    'data.mixture.0.pth=x',
    'unknown config key data.mixture.0.pth: did you mean data.mixture.0.path?',
  ),
  ('sed=1', 'unknown config key sed: did you mean seed?'),
  ('seed=None', 'seed=None is not of type int'),
  ('seed=True', 'seed=True is not of type int'),
  ('training.steps=(100,)', 'training.steps=(100,) is not of type int'),
  ('optimizer.adam.beta1=False', 'optimizer.adam.beta1=False is not of type float'),
  (
    'model.ngram_memories.0.width=256 model.ngram_memories.2.rows=9',
    'model.ngram_memories.2: the blocks before it are missing; the next one is '
    'model.ngram_memories.1',
  ),
  (
    'model.ngram_memories.rows=9',
    'unknown config key model.ngram_memories.rows: did you mean model.ngram_memories.0.rows?',
  ),
  (
    'model.ngram_memories.0.row=9',
    'unknown config key model.ngram_memories.0.row: did you mean model.ngram_memories.0.rows?',
  ),
  (
    'model.ngram_memories.01.rows=9',
    'unknown config key model.ngram_memories.01: did you mean model.ngram_memories.0?',
  ),
  (
    'model.ngram_memories.0=3',
    "model.ngram_memories has no preset '3'; available: engram, engram_v41, ple, over_encoding, "
    'longcat, blt, bigram_hash, ngram_hash, gemma3n_ple, stem, deep_embed, value_embeddings, '
    'nanochat_values, ngram_values',
  ),
  (
    'model.ngram_memories.0.rows=many',
    "model.ngram_memories.0.rows='many' is not of type tuple[int, ...]",
  ),
  ('training.stpes=1', 'unknown config key training.stpes: did you mean training.steps?'),
  ('trianing.steps=1', 'unknown config key trianing: did you mean training?'),
  ('train.steps=1', 'unknown config key train: did you mean training?'),
  (
    '--config.model.ngram.clusers',
    'unknown config key model.ngram.clusers: did you mean model.ngram.clusters?',
  ),
  ('optimizer.cl=1', 'unknown config key optimizer.cl: did you mean optimizer.clip_norm?'),
  ('optimizer.lr=1', 'unknown config key optimizer.lr: did you mean optimizer.learning_rate?'),
  ('--noconfig.model.gate', 'unknown config key model.gate: did you mean model.gated?'),
  ('model.width.x=1', 'unknown config key model.width.x: model.width is a value, not a section'),
  ('model=3', 'model is a section: set a key in it, model.KEY'),
  ('model.ngram=3', 'model.ngram is a section: set a key in it, model.ngram.KEY'),
  ('training.steps=many', "training.steps='many' is not of type int"),
  ('training.steps=1.5', 'training.steps=1.5 is not of type int'),
  ('training.steps=1e400', 'training.steps=inf is not of type int'),
  ('training.steps=None', 'training.steps=None is not of type int'),
  ('training.steps=', "training.steps='' is not of type int"),
  (
    '--config.training.steps',
    '--config.training.steps needs a value: --config.training.steps=VALUE',
  ),
  (
    '--noconfig.training.steps',
    '--noconfig.training.steps: training.steps is not a boolean; use --config.training.steps=VALUE',
  ),
  ('model.bias=yes', "model.bias='yes' is not of type bool"),
  ('model.bias=2', 'model.bias=2 is not of type bool'),
  ('optimizer.clip_norm=x', "optimizer.clip_norm='x' is not of type float or None"),
  ('model.ngram.dim=a', "model.ngram.dim='a' is not of type int"),
]

MODEL = [
  ('model.convolution=1e9', 'model.convolution=1000000000 must be from 1 to 256, or None'),
  ('model.layers=1e6', 'model.layers=1000000 must be from 1 to 1000'),
  (
    'model.heads=1e9',
    "model.width=256 must be divisible by 2 x model.heads=1000000000 for model.position='rope': "
    'use 2000000000, or another model.heads; rope needs an even head width',
  ),
  (
    'model.adaptive_softmax.embedding_width=0',
    'model.adaptive_softmax.embedding_width=0 must be at least 1, or None',
  ),
  (
    'model.adaptive_softmax.cutoffs=(8,)',
    "model.adaptive_softmax.cutoffs=(8,) is not for data.vocabulary='sentencepiece', but for "
    'words: use (); only these are sorted by frequency',
  ),
  (
    'model.adaptive_softmax.cutoffs=(8,8) data.vocabulary=words',
    'model.adaptive_softmax.cutoffs=(8, 8) must increase, the first above 0',
  ),
  (
    'model.adaptive_softmax.cutoffs=(0,8) data.vocabulary=words',
    'model.adaptive_softmax.cutoffs=(0, 8) must increase, the first above 0',
  ),
  ('model.adaptive_softmax.divisor=0', 'model.adaptive_softmax.divisor=0 must be at least 1'),
  (
    'model.adaptive_softmax.cutoffs=(8,16) model.adaptive_softmax.divisor=32 data.vocabulary=words',
    'model.adaptive_softmax.divisor=32: width 256 is too small for the last of 3 clusters: '
    'use a smaller divisor, or fewer cutoffs',
  ),
  (
    'model.adaptive_softmax.cutoffs=(8,) '
    'model.adaptive_softmax.tied_projections=(True,True,False) data.vocabulary=words',
    'model.adaptive_softmax.tied_projections has 3 entries for 2 clusters: expected one for '
    'each, the head first, or one for all',
  ),
  (
    'model.softmax_bias=False model.adaptive_softmax.cutoffs=()',
    'model.softmax_bias=False is not for model.adaptive_softmax=(defaults), but for None: use True',
  ),
  (
    'model.copy_memory.window=9 model.memory.across_documents=True',
    'model.copy_memory=(window=9) is not for model.memory.across_documents=True, but for None, '
    'False: use None; a match is in the document, and the next token is a row of one embedding',
  ),
  (
    'model.copy_memory.window=9 model.adaptive_softmax.cutoffs=(8,) data.vocabulary=words',
    'model.copy_memory=(window=9) is not for model.adaptive_softmax=(cutoffs=(8,)), but for '
    'None: use None; a match is in the document, and the next token is a row of one embedding',
  ),
  (
    'model.recurrent.hidden=8 model.copy_memory.window=9',
    'model.copy_memory: only for Transformers, not model.recurrent; use model.copy_memory=None',
  ),
  (
    'model.copy_memory.lengths=(2,1)',
    'model.copy_memory.lengths=(2, 1) must increase: use (1, 2)',
  ),
  (
    'model.copy_memory.input_gate=0 model.copy_memory.head_gate=0',
    'model.copy_memory.input_gate=0 and model.copy_memory.head_gate=0 would learn nothing, '
    'because the vectors start at 0 too: use another value for one of them',
  ),
  (
    'MEMORY.preset=bigram_hash MEMORY.factor=0 MEMORY.width=256',
    'MEMORY.factor=0 would learn nothing, because the rows start at 0 too: use another factor, '
    'or MEMORY.deviation=0.02',
  ),
  ('model.copy_memory.window=0', 'model.copy_memory.window=0 must be from 1 to 1048576'),
  (
    'model.copy_memory.key=bytes',
    "model.copy_memory.key='bytes' is not one of: tokens, compressed",
  ),
  (
    "model.token_shift.points=('before_attention','before_attention')",
    "model.token_shift.points=('before_attention', 'before_attention') has a place twice: use it "
    'once',
  ),
  (
    'model.feed_forward_width=0 model.token_shift.tokens=3',
    "model.token_shift.points has 'before_feed_forward', but model.feed_forward_width=0: use "
    "model.token_shift.points=('before_attention',)",
  ),
  ('model.norm_epsilon=0.0', 'model.norm_epsilon=0.0 must be above 0'),
  (
    'model.activation=swish',
    "model.activation='swish' is not one of: gelu, gelu_erf, relu, silu, squared_relu, softmax",
  ),
  (
    'model.norm_kind=rms model.norm_offset=True model.initial.recipe=transformer_xl',
    "model.initial.recipe='transformer_xl' is not for model.norm_offset=True, but for False: use "
    'model.norm_offset=False',
  ),
  (
    'model.key_value_heads=3',
    'model.key_value_heads=3 must divide model.heads=4: use 2, or another model.heads',
  ),
  (
    'model.key_value_heads=2 model.persistent.kind=head_split',
    "model.key_value_heads=2 must equal model.heads=4 for model.persistent.kind='head_split': "
    'use 4, or another model.heads',
  ),
  (
    'model.key_value_heads=2 model.shared_query_key=True',
    'model.key_value_heads=2 must equal model.heads=4 for model.shared_query_key=True: use 4, or '
    'another model.heads; each query needs a key',
  ),
  (
    'model.final_logit_cap=3.0 model.adaptive_softmax.cutoffs=()',
    'model.final_logit_cap=3.0 is not for model.adaptive_softmax=(defaults), but for None: use '
    'None',
  ),
  (
    'model.logits_dtype=bfloat16 model.adaptive_softmax.cutoffs=()',
    "model.logits_dtype='bfloat16' is not for model.adaptive_softmax=(defaults), but for None: "
    'use None',
  ),
  ('model.dtype=float16', "model.dtype='float16' is not one of: auto, bfloat16, float32, float64"),
  ('model.remat=some', "model.remat='some' is not one of: auto, none, minimal, full"),
  ('model.layers=0', 'model.layers=0 must be from 1 to 1000'),
  ('model.width=0', 'model.width=0 must be at least 1'),
  ('model.heads=-2', 'model.heads=-2 must be at least 1'),
  ('model.ngram.heads=1025', 'model.ngram.heads=1025 must be from 1 to 1024, or None'),
  ('model.feed_forward_width=-1', 'model.feed_forward_width=-1 must be at least 1, or 0'),
  (
    'model.heads=7',
    "model.width=256 must be divisible by 2 x model.heads=7 for model.position='rope': use 252, "
    'or another model.heads; rope needs an even head width',
  ),
  (
    'model.heads=7 model.position=none',
    'model.width=256 must be divisible by model.heads=7: use 259, or another model.heads',
  ),
  (
    'model.initial.recipe=gpt',
    "model.initial.recipe='gpt' is not one of: transformer_xl, adaptive_span",
  ),
  (
    'model.initial.recipe=adaptive_span model.initial.deviation=0.1',
    "model.initial.deviation=0.1 is not for model.initial.recipe='adaptive_span', but for "
    'transformer_xl: use 0.02',
  ),
  ('model.initial.deviation=0.0', 'model.initial.deviation=0.0 must be above 0'),
  (
    'model.adaptive_softmax.dropout=1.0',
    'model.adaptive_softmax.dropout=1.0 must be at least 0 and below 1, or None',
  ),
  ('model.dropout=1.0', 'model.dropout=1.0 must be at least 0 and below 1'),
  (
    'model.width=48 model.heads=3 model.persistent.kind=head_split',
    "model.heads=3 must be divisible by 2 for model.persistent.kind='head_split': use 4",
  ),
]

ATTENTION = [
  (
    'model.position=learned training.segment_length=600',
    'model.positional.max_length=512 is less than the 600 tokens of a segment: raise it, or '
    'lower training.segment_length or evaluation.segment_length',
  ),
  (
    'model.position=absolute model.memory.length=256 training.segment_length=257',
    'model.positional.max_length=512 is less than the 513 tokens of a segment and its memory: '
    'raise it, or lower training.segment_length or evaluation.segment_length or '
    'model.memory.length or evaluation.memory.length',
  ),
  (
    'model.position=absolute model.memory.length=256 training.segment_length=256 '
    'evaluation.memory.length=300',
    'model.positional.max_length=512 is less than the 556 tokens of a segment and its memory: '
    'raise it, or lower training.segment_length or evaluation.segment_length or '
    'model.memory.length or evaluation.memory.length',
  ),
  (
    'model.position=absolute model.positional.max_length=256 evaluation.segment_length=257',
    'model.positional.max_length=256 is less than the 257 tokens of a segment: raise it, or '
    'lower training.segment_length or evaluation.segment_length',
  ),
  (
    'model.position=learned model.memory.length=128',
    "model.position='learned' is not for model.memory.length=128, but for None, 0: use 'rope'; "
    'positions in the segment exclude a memory, also in evaluation; "relative" takes one',
  ),
  (
    'model.positional.clamp_length=0',
    'model.positional.clamp_length=0 must be at least 1, or None',
  ),
  (
    'model.positional.clamp_length=3',
    "model.positional.clamp_length=3 is not for model.position='rope', but for relative, shaw: "
    'use None',
  ),
  ('model.positional.min_timescale=0.0', 'model.positional.min_timescale=0.0 must be above 0'),
  ('model.positional.max_length=0', 'model.positional.max_length=0 must be at least 1'),
  ('model.attention_dropout=1.0', 'model.attention_dropout=1.0 must be at least 0 and below 1'),
  (
    'model.position=alibi',
    "model.position='alibi' is not one of: rope, sinusoid, absolute, relative, shaw, table, "
    'segment_sinusoid, learned, none',
  ),
  (
    'model.attention.layer_pattern=()',
    "model.attention.layer_pattern=() must not be empty: use ('full',)",
  ),
  (
    "model.attention.layer_pattern=('full','window')",
    "model.attention.layer_pattern=('full', 'window') has layers with a window, but "
    'model.attention.window=None: set model.attention.window, or use "full"',
  ),
  (
    'model.layers=2 model.attention.window=8 '
    "model.attention.layer_pattern=('full','full','window')",
    'model.attention.window=8 needs a layer with a window, but '
    "model.attention.layer_pattern=('full', 'full', 'window') has none in model.layers=2: use "
    'None, or "window" in the pattern',
  ),
  (
    "model.position=sinusoid model.attention.layer_pattern=('unrotated',)",
    "model.attention.layer_pattern=('unrotated',) has layers without rotation, which "
    'model.position=\'sinusoid\' does not have: use "full" and "window"',
  ),
  (
    'model.per_dim_scale=True model.attention.inverse_layer_scale=True',
    'model.attention.inverse_layer_scale=True is not for model.per_dim_scale=True, but for '
    'False: use False',
  ),
  (
    'model.head_width=7',
    'model.positional.rotary_fraction=1.0 rotates 7 of the 7 features of a head, which must be '
    'even and above 0',
  ),
  (
    'model.per_dim_scale=True model.attention.scale=0.1',
    'model.attention.scale=0.1 is not for model.per_dim_scale=True, but for False: use None',
  ),
  (
    'model.positional.window_max_timescale=10000.0',
    'model.positional.window_max_timescale=10000.0 needs model.attention.window, which is None: '
    'set model.attention.window, or use None',
  ),
  (
    'model.positional.rotary_fraction=0.3',
    'model.positional.rotary_fraction=0.3 rotates 19 of the 64 features of a head, which must be '
    'even and above 0',
  ),
  (
    'model.positional.scaling.kind=longrope model.positional.scaling.short_factors=(1.0,2.0)',
    'model.positional.scaling.short_factors has 2 factors, but heads have 32 rotated pairs of '
    'features: give one factor for each pair',
  ),
  (
    'model.position=none model.positional.scaling.factor=2.0',
    "model.positional.scaling=(factor=2.0) is not for model.position='none', but for rope: use "
    'None',
  ),
  (
    'model.position=table model.positional.max_length=128 model.memory.same_length=memory_and_self',
    'model.position="table" has vectors for model.positional.max_length=128 distances, but a '
    'token attends to 129 keys: use a smaller model.memory.length, or '
    'model.positional.max_length=129',
  ),
  ('model.attention.logit_cap=0.0', 'model.attention.logit_cap=0.0 must be above 0, or None'),
  (
    'model.kernel=cudnn model.attention.logit_cap=2.0',
    "model.kernel='cudnn' does not support model.attention.logit_cap=2.0: use model.kernel=None, "
    'for automatic selection',
  ),
  (
    'model.memory.length=8 model.memory.same_length=memory model.position=table '
    'model.positional.max_length=8 evaluation.memory.length=9',
    'model.position="table" has vectors for model.positional.max_length=8 distances, but a token '
    'attends to 9 keys: use a smaller evaluation.memory.length, or model.positional.max_length=9',
  ),
  (
    'model.position=table',
    'model.position="table" has vectors for model.positional.max_length=512 distances, but a '
    'token attends to all keys of the segment and the memory: set model.memory.length and '
    'model.memory.same_length',
  ),
  (
    'model.position=absolute model.positional.max_length=128 '
    'model.memory.same_length=memory_and_self',
    'model.positional.max_length=128 is less than the 129 keys that a token attends to: raise '
    'it, or lower model.memory.length or evaluation.memory.length',
  ),
  (
    'model.position=absolute model.memory.length=500',
    'model.positional.max_length=512 is less than the 628 tokens of a segment and its memory: '
    'raise it, or lower training.segment_length or evaluation.segment_length or '
    'model.memory.length or evaluation.memory.length',
  ),
  (
    'model.attention.window=8',
    'model.attention.window=8 needs a layer with a window, but '
    'model.attention.layer_pattern=(\'full\',) has none in model.layers=4: use None, or "window" '
    'in the pattern',
  ),
  (
    'model.kernel=blocks model.span.epsilon_keys=all model.memory.same_length=memory_alone',
    'model.kernel=\'blocks\' does not support model.span.epsilon_keys="all": use '
    'model.kernel=None, for automatic selection',
  ),
  (
    'model.positional.scaling.kind=longrope',
    'model.positional.scaling.short_factors has 0 factors, but heads have 32 rotated pairs of '
    'features: give one factor for each pair',
  ),
  (
    'model.positional.scaling.kind=llama3 model.positional.scaling.low_frequency_factor=4',
    'model.positional.scaling.low_frequency_factor=4.0 must be less than '
    'model.positional.scaling.high_frequency_factor=4.0 for '
    "model.positional.scaling.kind='llama3': use another value, or a larger "
    'model.positional.scaling.high_frequency_factor',
  ),
]

SEGMENT_MEMORY_SPAN_PERSISTENT = [
  ('model.span.limit=1e12', 'model.span.limit=1000000000000 must be at most 2,147,483,647'),
  ('model.memory.length=1e10', 'model.memory.length=10000000000 must be at most 2,147,483,647'),
  ('model.memory.length=-1', 'model.memory.length=-1 must be at least 0'),
  ('model.memory.first=ones', "model.memory.first='ones' is not one of: empty, zeros"),
  (
    'model.memory.same_length=yes',
    "model.memory.same_length='yes' is not one of: no, memory, memory_and_self, memory_alone",
  ),
  (
    'model.memory.length=0 model.memory.same_length=memory',
    "model.memory.length=0 must be at least 1 for model.memory.same_length='memory': use 1; a "
    'token attends to no key; "memory_and_self" is for a memory of length 0',
  ),
  (
    'model.memory.first=zeros',
    "model.memory.first='zeros' is not for model.norm='pre', but for post, post_skip: use "
    "'empty'; zero inputs must have zero keys and values",
  ),
  (
    'model.norm=post model.attention.query_key_value_bias=True model.memory.first=zeros',
    "model.memory.first='zeros' is not for model.attention.query_key_value_bias=True, but for "
    "None, False: use 'empty'; zero inputs must have zero keys and values",
  ),
  (
    'model.memory.length=16 model.span.limit=16',
    'model.span.limit=16 must be at least model.span.ramp=32: use 32, or a smaller '
    'model.span.ramp; a span is at least its ramp',
  ),
  (
    'model.span.renormalize=False model.span.epsilon_keys=all',
    "model.span.epsilon_keys='all' is not for model.span.renormalize=False, but for True: use None",
  ),
  ('model.span.kind=fixed', "model.span.kind='fixed' is not one of: adaptive, dynamic"),
  ('model.span.limit=0', 'model.span.limit=0 must be at least 1'),
  (
    'model.span.ramp=0',
    'model.span.ramp=0 must be at least 1: a span without a ramp has no gradient (the papers use '
    '32)',
  ),
  (
    'model.span.kind=dynamic model.span.initial=-1000000000.0',
    "model.span.initial=-1000000000.0 must be at least -20 for model.span.kind='dynamic': use -20",
  ),
  ('model.span.reserve=0', 'model.span.reserve=0 must be at least 1'),
  ('model.span.penalty=-1.0', 'model.span.penalty=-1.0 must be at least 0'),
  (
    'model.span.initial=2.0',
    "model.span.initial=2.0 must be at most 1 for model.span.kind='adaptive': use 1",
  ),
  (
    'model.span.limit=128',
    'model.span=(limit=128) is not for model.memory.same_length=None, but for memory, '
    'memory_and_self, memory_alone: use model.memory.length=128 and '
    'model.memory.same_length="memory_alone" (as in the paper), or model.span=None; every token '
    'needs the same number of keys',
  ),
  (
    'model.memory.same_length=memory_alone model.span.limit=64',
    'model.memory.length=128 must be at most model.span.limit=64: use 64, or a larger '
    'model.span.limit',
  ),
  (
    'model.product_memory.top=32 model.product_memory.sub_keys=5',
    'model.product_memory.top=32 is more than the 25 values of model.product_memory.sub_keys=5: '
    'use 25, or more sub-keys',
  ),
  (
    'model.product_memory=nope',
    "model.product_memory has no preset 'nope'; available: lample2019, memory_layers",
  ),
  (
    'model.product_memory.layers=(1,1)',
    'model.product_memory.layers=(1, 1) has a block twice: use it once',
  ),
  (
    'model.product_memory.preset=lample2019',
    'model.product_memory.layers=(4,): 4 must be less than model.layers=4: use 3, or a larger '
    'model.layers',
  ),
  (
    'model.product_memory.key_width=5',
    'model.product_memory.key_width=5 must be divisible by 2: use 4',
  ),
  (
    'model.product_memory.start=neutral',
    "model.product_memory.start='neutral' is not for model.product_memory.point="
    "'in_place_of_feed_forward', but for beside_feed_forward: use None; in place of the "
    'feed-forward, it changes the trained model',
  ),
  (
    'model.product_memory.top=4 MEMORY.preset=stem MEMORY.layers=1',
    'model.product_memory.layers=(1,) replaces the feed-forward of block 1, used by MEMORY: use '
    'other layers, or model.product_memory.point="beside_feed_forward"',
  ),
  (
    'model.recurrent.hidden=8 model.product_memory.top=9',
    'model.product_memory: only for Transformers, not model.recurrent; use '
    'model.product_memory=None',
  ),
  ('model.persistent.vectors=-1', 'model.persistent.vectors=-1 must be at least 0'),
  (
    'model.persistent.vectors=0 model.persistent.kind=single_head',
    "model.persistent.vectors=0 must be at least 1 for model.persistent.kind='single_head': use 1",
  ),
  (
    'model.ngram.layer=attention model.persistent.kind=head_split',
    "model.persistent.kind='head_split' is not for model.ngram.layer='attention', but for None, "
    "input, begin, middle, end: use 'all_attention'",
  ),
  (
    'model.shared_query_key=True model.persistent.kind=head_split',
    "model.persistent.kind='head_split' is not for model.shared_query_key=True, but for False: "
    "use 'all_attention'",
  ),
  (
    'model.memory.length=4 model.memory.sinks=4',
    'model.memory.sinks=4 must be less than model.memory.length=4: use 3, or a larger '
    'model.memory.length',
  ),
  (
    'model.memory.length=0 model.memory.sinks=1',
    'model.memory.sinks=1 must be less than model.memory.length=0: use 0, or a larger '
    'model.memory.length',
  ),
  (
    'model.memory.sinks=2 model.position=relative',
    "model.memory.sinks=2 is not for model.position='relative', but for rope, none: use 0; "
    'moving the keys of the first tokens needs rotary positions',
  ),
  (
    'model.memory.sinks=2 model.memory.same_length=memory',
    "model.memory.sinks=2 is not for model.memory.same_length='memory', but for no: use 0; "
    'moving the keys of the first tokens needs rotary positions',
  ),
  (
    'model.span.ramp=16',
    'model.span=(ramp=16) is not for model.memory.same_length=None, but for memory, '
    'memory_and_self, memory_alone: use model.memory.length=1024 and '
    'model.memory.same_length="memory_alone" (as in the paper), or model.span=None; every token '
    'needs the same number of keys',
  ),
  (
    'model.span.limit=128 model.memory.length=128',
    "model.span=(limit=128) is not for model.memory.same_length='no', but for memory, "
    'memory_and_self, memory_alone: use model.memory.length=128 and '
    'model.memory.same_length="memory_alone" (as in the paper), or model.span=None; every token '
    'needs the same number of keys',
  ),
]

NGRAM = [
  ('model.ngram.orders=(1000,)', 'model.ngram.orders=(1000,): 1000 must be from 2 to 32'),
  (
    'model.ngram.vocabulary_size=1e9',
    'model.ngram.vocabulary_size=1000000000 must be from 1 to 536870912',
  ),
  (
    'model.head_width=32 model.ngram.heads=3 model.ngram.layer=attention',
    'model.ngram.heads=3 must divide model.heads x model.head_width = 128: use 2',
  ),
  (
    'model.ngram.dim=65',
    'model.ngram: n-gram dim 65 is not between 1 and the head width 64 (width 256 / 4 heads)',
  ),
  (
    "model.ngram.pairing=('next',)",
    "model.ngram.pairing=('next',): 'next' is not one of: previous, attended, none",
  ),
  (
    "model.ngram.layer=attention model.ngram.pairing=('none','attended')",
    'model.ngram.pairing has 2 entries for model.layers=4: expected one for each layer, or one '
    'for all',
  ),
  (
    'model.ngram.padding_trains=True',
    "model.ngram.padding_trains=True is not for model.ngram.layer='input', but for attention: "
    'use False',
  ),
  (
    "model.ngram.pairing=('attended',)",
    "model.ngram.pairing=('attended',) is not for model.ngram.layer='input', but for attention: "
    "use ('previous',)",
  ),
  (
    "model.ngram.layer=attention model.ngram.pairing=('none',)",
    'model.ngram.pairing is "none" for all layers: use model.ngram=None, or another pairing',
  ),
  (
    "model.position=none model.ngram.layer=attention model.ngram.pairing=('attended',)",
    "model.ngram.pairing=('attended',) is not for model.position='none', but for rope, sinusoid, "
    "absolute, relative, shaw, table, segment_sinusoid, learned: use ('previous',)",
  ),
  (
    "model.ngram.heads=8 model.ngram.pairing=('attended',)",
    "model.ngram.heads=8 must equal model.heads=4 for model.ngram.pairing=('attended',): use 4, "
    'or another model.heads',
  ),
  (
    'model.ngram.clusters=None model.ngram.layer=attention',
    "model.ngram.clusters=None is not for model.ngram.layer='attention', but for input, begin, "
    'middle, end: use 256',
  ),
  (
    "model.ngram.orders=(2,3) model.ngram.layer=attention model.ngram.pairing=('attended',)",
    "model.ngram.pairing=('attended',) is not for model.ngram.orders=(2, 3), but for (2,): use "
    "('previous',)",
  ),
  ('model.ngram.heads=3', 'model.ngram.heads=3 must divide model.width=256: use 2'),
  ('model.ngram.combine=sum', "model.ngram.combine='sum' is not one of: concat, add"),
  ('model.ngram.clusters=0', 'model.ngram.clusters=0 must be at least 1, or None'),
]

NGRAM_MEMORIES = [
  ('MEMORY.heads=1e6', 'MEMORY.heads=1000000 must be from 1 to 1024'),
  ('MEMORY.heads=0', 'MEMORY.heads=0 must be from 1 to 1024'),
  (
    'MEMORY.join=sum MEMORY.width=256 MEMORY.convolution=4',
    "MEMORY.convolution=4 is not for MEMORY.join='sum', but for gate: use 0",
  ),
  (
    'MEMORY.preset=engrm',
    "MEMORY.preset='engrm' is not one of: engram, engram_v41, ple, over_encoding, longcat, blt, "
    'bigram_hash, ngram_hash, gemma3n_ple, stem, deep_embed, value_embeddings, nanochat_values, '
    'ngram_values, or None',
  ),
  (
    'MEMORY.layers=(1,4)',
    'MEMORY.layers=(1, 4): 4 must be less than model.layers=4: use 3, or a larger model.layers',
  ),
  ('MEMORY.layers=(1,1)', 'MEMORY.layers=(1, 1) has a block twice: use it once'),
  ('MEMORY.layers=(-1,)', 'MEMORY.layers=(-1,): -1 must be at least 0'),
  (
    'MEMORY.preset=None',
    "MEMORY.join='gate' needs MEMORY.layers, but it is (): set MEMORY.layers; a gate is in "
    'blocks, such as layers=(1,); a mean is at the input, layers=()',
  ),
  (
    'MEMORY.join=mean MEMORY.layers=(1,) MEMORY.width=256',
    "MEMORY.join='mean' is not for MEMORY.layers=(1,), but for (): use 'gate'; a gate is in "
    'blocks, such as layers=(1,); a mean is at the input, layers=()',
  ),
  (
    'MEMORY.join=sum MEMORY.layers=(1,)',
    "MEMORY.width=64 must equal model.width=256 for MEMORY.join='sum' and MEMORY.projection=False "
    "and MEMORY.point='before_attention': use 256, or another model.width; with projection=True "
    'rows may have any width',
  ),
  (
    'MEMORY.layers=(1,) MEMORY.factor=0.1',
    "MEMORY.factor=0.1 is not for MEMORY.join='gate', but for sum: use None",
  ),
  (
    'MEMORY.every_block=True MEMORY.layers=(1,)',
    'MEMORY.every_block=True is not for MEMORY.layers=(1,), but for (): use False',
  ),
  (
    'MEMORY.layers=(1,) MEMORY.block_stride=2',
    'MEMORY.block_stride=2 is not for MEMORY.every_block=False, but for True: use 1',
  ),
  (
    'MEMORY.layers=(1,) MEMORY.sliced=True',
    'MEMORY.sliced=True needs MEMORY.table, which is None: set MEMORY.table, or use False',
  ),
  (
    'MEMORY.layers=(1,) MEMORY.table=grams MEMORY.key=clusters',
    "MEMORY.table='grams' is not for MEMORY.key='clusters', but for tokens, compressed, bytes: use "
    'None',
  ),
  (
    'MEMORY.layers=(1,) MEMORY.hash=speedrun MEMORY.heads=2',
    'MEMORY: hash "speedrun" has constants for one head of 2- and of 3-grams, not for orders=(2, '
    '3) with heads=2: use orders=(2,) or (2, 3), and heads=1',
  ),
  (
    'MEMORY.layers=(1,) MEMORY.hash=speedrun MEMORY.heads=1 MEMORY.fill_id=3',
    "MEMORY.fill_id=3 is not for MEMORY.hash='speedrun', but for engram, ple, polynomial, blt, "
    'salted, praxis, id: use 0',
  ),
  (
    'MEMORY.layers=(1,) MEMORY.orders=(2,4) MEMORY.signs=8 MEMORY.sign_hash=products',
    'MEMORY: sign_hash="products" has constants for 2- and 3-grams, not for orders=(2, 4): use '
    '"xor"',
  ),
  (
    'MEMORY.layers=(1,) MEMORY.sign_hash=products',
    "MEMORY.sign_hash='products' needs MEMORY.signs, which is None: set MEMORY.signs, or use 'xor'",
  ),
  (
    'MEMORY.layers=(1,) MEMORY.table=2-grams',
    "MEMORY.table='2-grams' must consist of small letters, digits and underscores, such as "
    "'bigrams'",
  ),
  (
    'MEMORY.layers=(1,) MEMORY.table=grams model.ngram_memories.1.layers=(2,) '
    'model.ngram_memories.1.table=grams model.ngram_memories.1.width=32',
    "model.ngram_memories.1.width=32 must equal MEMORY.width=64: both read the table 'grams'; use "
    '64, or another name of the table',
  ),
  (
    'MEMORY.layers=(1,) MEMORY.table=grams MEMORY.sliced=True model.ngram_memories.1.layers=(2,) '
    'model.ngram_memories.1.table=grams',
    "model.ngram_memories.1.table='grams' is also the table of MEMORY, but sliced rows are only "
    'for the layers of one memory: use sliced=False, or another name',
  ),
  (
    'MEMORY.join=mean',
    "MEMORY.width=64 must equal model.width=256 for MEMORY.join='mean' and MEMORY.projection=False "
    "and MEMORY.point='before_attention': use 256, or another model.width; with projection=True "
    'rows may have any width',
  ),
  (
    'MEMORY.join=concat MEMORY.heads=4 MEMORY.width=33',
    'MEMORY: 2 orders of n-gram dim 33 exceed the head width 64',
  ),
  (
    'MEMORY.layers=(1,) MEMORY.key=clusters MEMORY.heads=3',
    'MEMORY.heads=3 must divide model.width=256: use 2',
  ),
  (
    'MEMORY.layers=(1,) MEMORY.key=clusters MEMORY.initial=data',
    "MEMORY.initial='data' is not for MEMORY.key='clusters', but for embedding_clusters: use None",
  ),
  (
    'MEMORY.layers=(1,) MEMORY.boundary=eos_id',
    "MEMORY.boundary='eos_id' needs MEMORY.eos_id, which is None: set MEMORY.eos_id, or use "
    "'starts'",
  ),
  (
    'MEMORY.layers=(1,) MEMORY.fill_id=None',
    "MEMORY.fill_id=None is not for MEMORY.boundary='starts', but for eos_id: use 0",
  ),
  (
    'MEMORY.layers=(1,) MEMORY.orders=(2,2)',
    'MEMORY: orders (2, 2) must be distinct numbers of at least 1',
  ),
  ('MEMORY.orders=(0,1)', 'MEMORY.orders=(0, 1): 0 must be from 1 to 32'),
  ('MEMORY.orders=(2,20000)', 'MEMORY.orders=(2, 20000): 20000 must be from 1 to 32'),
  ('MEMORY.rows=(0,)', 'MEMORY.rows=(0,): 0 must be at least 1'),
  ('MEMORY.convolution=1000', 'MEMORY.convolution=1000 must be from 0 to 128'),
  ('MEMORY.displacement=131072', 'MEMORY.displacement=131072 must be from 0 to 65536'),
  (
    'MEMORY.layers=(1,) MEMORY.rows=(134217720,) MEMORY.row_rule=exact MEMORY.row_multiple=1048576',
    'MEMORY.row_multiple=1048576 gives a table of 2,147,483,648 rows, which must be less than '
    '2^31: use a smaller multiple',
  ),
  (
    'MEMORY.layers=(1,) MEMORY.rows=(16,8) MEMORY.row_rule=exact MEMORY.untrained_row=8',
    'MEMORY.untrained_row=8 is not below the 8 rows of the smallest head: use None, or more rows',
  ),
  (
    'MEMORY.layers=(1,) MEMORY.hash=blt MEMORY.heads=12',
    'MEMORY: hash "blt" has constants for 11 heads of each order, not for 12: use fewer heads',
  ),
  (
    'MEMORY.layers=(1,) MEMORY.key=clusters MEMORY.table_memory=host',
    "MEMORY.table_memory='host' is not for MEMORY.key='clusters', but for tokens, compressed, "
    "bytes: use 'device'; only the rows looked up before the step are updated",
  ),
  (
    'MEMORY.layers=(1,) MEMORY.table_memory=host MEMORY.optimizer=adam',
    "MEMORY.table_memory='host' is not for MEMORY.optimizer='adam', but for adagrad, "
    "row_adagrad, lazy_adam, frozen: use 'device'; only the rows looked up before the step are "
    'updated',
  ),
  ('MEMORY.learning_rate_factor=0.0', 'MEMORY.learning_rate_factor=0.0 must be above 0, or None'),
  (
    'MEMORY.layers=(1,) MEMORY.clusters=8',
    "MEMORY.clusters=8 is not for MEMORY.key='tokens', but for clusters, embedding_clusters: use "
    '256',
  ),
  (
    'MEMORY.layers=(1,) MEMORY.amplification=norm',
    "MEMORY.amplification='norm' is not for MEMORY.join='gate', but for sum, mean: use 'none'",
  ),
  (
    'MEMORY.join=sum MEMORY.width=256 MEMORY.bias=True',
    "MEMORY.bias=True is not for MEMORY.join='sum', but for gate: use False",
  ),
  (
    'MEMORY.join=sum MEMORY.width=256 MEMORY.hash=polynomial MEMORY.seed=1',
    "MEMORY.seed=1 is not for MEMORY.hash='polynomial', but for engram, ple: use 0",
  ),
  (
    'MEMORY.layers=(1,) MEMORY.eos_id=3',
    "MEMORY.eos_id=3 is not for MEMORY.boundary='starts', but for eos_id: use None",
  ),
  (
    'MEMORY.layers=(1,) MEMORY.fill_id=2 MEMORY.distinct_start=True',
    'MEMORY.fill_id=2 is not for MEMORY.distinct_start=True, but for False: use 0',
  ),
  (
    'MEMORY.layers=(1,) MEMORY.deviation=0.1 MEMORY.table_initial=xavier',
    "MEMORY.deviation=0.1 is not for MEMORY.table_initial='xavier', but for normal, "
    'uniform: use 0.02',
  ),
  (
    'MEMORY.join=concat MEMORY.point=after_block',
    "MEMORY.point='after_block' needs MEMORY.layers, but it is (): set MEMORY.layers, or use "
    "'before_attention'",
  ),
  (
    'MEMORY.join=add MEMORY.layers=(1,) MEMORY.point=after_attention MEMORY.pairing=attended '
    'MEMORY.heads=4 MEMORY.orders=(2,)',
    "MEMORY.pairing='attended' is not for MEMORY.key='tokens', but for clusters: use 'previous'",
  ),
  (
    'MEMORY.layers=(1,) MEMORY.table_initial=xavier MEMORY.rows=(9,11)',
    'MEMORY.table_initial="xavier" needs the same number of rows for all orders, not '
    'MEMORY.rows=(9, 11): use one number, or "normal"',
  ),
  (
    'MEMORY.layers=(64,)',
    'MEMORY.layers=(64,): 64 must be less than model.layers=4: use 3, or a larger model.layers',
  ),
  (
    'MEMORY.layers=(1,) MEMORY.point=after_block',
    "MEMORY.point='after_block' is not for MEMORY.join='gate', but for product, concat, "
    "add: use 'before_attention'",
  ),
  (
    'MEMORY.join=add MEMORY.layers=(1,) MEMORY.point=after_attention MEMORY.pairing=attended '
    'MEMORY.key=clusters MEMORY.heads=4 MEMORY.orders=(2,) model.position=none',
    "MEMORY.pairing='attended' is not for model.position='none', but for rope, sinusoid, "
    "absolute, relative, shaw, table, segment_sinusoid, learned: use 'previous'",
  ),
  (
    'MEMORY.join=add MEMORY.layers=(1,) MEMORY.point=after_attention MEMORY.pairing=attended '
    'MEMORY.key=clusters MEMORY.heads=4 MEMORY.orders=(2,) model.persistent.kind=head_split',
    "MEMORY.pairing='attended' is not for model.persistent.kind='head_split', but for None, "
    "all_attention, attention_split, single_head: use 'previous'",
  ),
  (
    'MEMORY.key=bytes',
    "MEMORY.key='bytes' is not for data.vocabulary='sentencepiece', but for bytes: use 'tokens'",
  ),
  (
    'MEMORY.key=embedding_clusters model.adaptive_softmax.cutoffs=(8,)',
    "MEMORY.key='embedding_clusters' is not for model.adaptive_softmax=(cutoffs=(8,)), but for "
    "None: use 'tokens'",
  ),
  (
    'MEMORY.join=product MEMORY.layers=(1,) MEMORY.point=after_attention',
    "MEMORY.join='product' is not for MEMORY.point='after_attention', but for before_attention, "
    "after_block: use 'gate'; a gate is in blocks, such as layers=(1,); a mean is at "
    'the input, layers=()',
  ),
  (
    'MEMORY.join=multiply MEMORY.layers=(1,)',
    "MEMORY.join='multiply' is not for MEMORY.point='before_attention', but for feed_forward, "
    "after_feed_forward: use 'gate'; a gate is in blocks, such as layers=(1,); a mean is at "
    'the input, layers=()',
  ),
  (
    'MEMORY.join=replace MEMORY.layers=(1,) MEMORY.point=after_feed_forward',
    "MEMORY.join='replace' is not for MEMORY.point='after_feed_forward', but for feed_forward: "
    "use 'gate'; a gate is in blocks, such as layers=(1,); a mean is at the input, "
    'layers=()',
  ),
  (
    'MEMORY.preset=stem MEMORY.layers=()',
    "MEMORY.point='feed_forward' needs MEMORY.layers, but it is (): set MEMORY.layers, or use "
    "'before_attention'",
  ),
  (
    'MEMORY.preset=stem MEMORY.layers=(1,) model.feed_forward_width=0',
    "MEMORY.point='feed_forward' needs a feed-forward, but model.feed_forward_width=0: use "
    'another width, or another point',
  ),
  (
    'MEMORY.preset=stem MEMORY.layers=(1,) model.gated=False',
    "MEMORY.point='feed_forward' is not for model.gated=False, but for True: use "
    "'before_attention'",
  ),
  (
    'MEMORY.preset=stem MEMORY.layers=(1,) MEMORY.width=64',
    "MEMORY.width=64 must equal model.feed_forward_width=688 for MEMORY.point='feed_forward' "
    'and MEMORY.projection=False: use None',
  ),
  (
    'MEMORY.preset=deep_embed MEMORY.layers=(1,) MEMORY.width=64',
    "MEMORY.width=64 must equal model.width=256 for MEMORY.point='after_feed_forward' and "
    'MEMORY.projection=False: use None',
  ),
  (
    'MEMORY.preset=stem MEMORY.layers=(1,) MEMORY.start=neutral',
    "MEMORY.start='neutral' is not for MEMORY.join='replace', but for gate, product, sum, mean, "
    'multiply, interpolation, weighted_sum, concat, add: use None; rows cannot replace the up '
    'projection of a trained model; join="sum" adds to it',
  ),
  (
    'MEMORY.preset=stem MEMORY.layers=(1,) MEMORY.rows=(9,)',
    "MEMORY.rows=(9,) is not for MEMORY.row_rule='vocabulary', but for prime, longcat, "
    'over_encoding, exact, multiple, multiple_plus_one, shared_prime: use (16384,)',
  ),
  (
    'MEMORY.preset=stem MEMORY.layers=(1,) MEMORY.orders=(1,2)',
    'MEMORY: hash "id" only supports single ids, not orders=(1, 2): use orders=(1,)',
  ),
  (
    'MEMORY.preset=stem MEMORY.layers=(1,) MEMORY.key=clusters MEMORY.hash=polynomial',
    "MEMORY.point='feed_forward' is not for MEMORY.key='clusters', but for tokens, compressed, "
    "bytes: use 'before_attention'",
  ),
  (
    'MEMORY.preset=stem MEMORY.layers=(1,) model.recurrent.hidden=300',
    'MEMORY.layers=(1,) is not for model.recurrent=(defaults), but for None: use ()',
  ),
  (
    'MEMORY.preset=value_embeddings MEMORY.every_block=False MEMORY.block_stride=1',
    "MEMORY.point='values' needs MEMORY.layers, but it is (): set MEMORY.layers, or use "
    "'before_attention'",
  ),
  (
    'MEMORY.preset=value_embeddings MEMORY.width=100',
    'MEMORY.width=100: the rows of a token have 1 x 100 = 100 values, but MEMORY.point="values" '
    'with MEMORY.one_head=False has 256 features: use None if 1 rows divide them, or '
    'MEMORY.projection=True',
  ),
  (
    'MEMORY.preset=value_embeddings MEMORY.value_gate.channels=257',
    'MEMORY.value_gate.channels=257 must be at most model.width=256: use 256, or a larger '
    'model.width',
  ),
  (
    'MEMORY.preset=value_embeddings MEMORY.value_gate.row_channels=257',
    'MEMORY.value_gate.row_channels=257 is more than the 256 values of the rows of a token: use '
    '256',
  ),
  (
    'MEMORY.preset=value_embeddings MEMORY.join=interpolation MEMORY.start=neutral',
    'MEMORY.deviation=0 with MEMORY.join="interpolation" and MEMORY.start="neutral" would learn '
    'nothing, because the rows and their weight are 0: use MEMORY.deviation=0.02',
  ),
  (
    'MEMORY.preset=value_embeddings MEMORY.key=clusters MEMORY.table=None',
    "MEMORY.point='values' is not for MEMORY.key='clusters', but for tokens, compressed, bytes: "
    "use 'before_attention'",
  ),
  (
    'MEMORY.preset=ngram_values MEMORY.layers=(1,) MEMORY.orders=(2,5)',
    'MEMORY: hash "salted" has constants for n-grams of up to 4 ids, not for 5: use shorter '
    'n-grams',
  ),
  (
    'MEMORY.preset=ngram_values MEMORY.layers=(1,) MEMORY.rows=(100,200)',
    'MEMORY: row_rule "shared_prime" needs the same number of rows for all orders: use one number',
  ),
  (
    'MEMORY.layers=(1,) MEMORY.value_gate.channels=5',
    "MEMORY.value_gate=(channels=5) is not for MEMORY.point='before_attention', but for values: "
    'use None',
  ),
  (
    'MEMORY.preset=value_embeddings model.memory.length=8 model.kernel=blocks',
    'model.kernel=\'blocks\' does not support MEMORY.point="values": use model.kernel=None, for '
    'automatic selection',
  ),
  (
    'MEMORY.layers=(1,) MEMORY.width=None',
    "MEMORY.width=None is not for MEMORY.point='before_attention', but for values, feed_forward, "
    'after_feed_forward: use 64',
  ),
  (
    'MEMORY.layers=(1,) MEMORY.embedding_part=True',
    "MEMORY.embedding_part=True is not for MEMORY.join='gate', but for product: use False",
  ),
  (
    'MEMORY.preset=stem MEMORY.join=sum MEMORY.layers=() MEMORY.every_block=True MEMORY.table=up '
    'model.ngram_memories.1.preset=stem model.ngram_memories.1.layers=(1,)',
    'model.ngram_memories.1.join="replace" overwrites an earlier memory in block 1: use it as '
    'the first memory, or model.ngram_memories.1.join="sum"',
  ),
  (
    'MEMORY.preset=stem MEMORY.layers=(1,) model.ngram_memories.1.preset=stem '
    'model.ngram_memories.1.layers=(0,1)',
    'model.ngram_memories.1.join="replace" overwrites an earlier memory in block 1: use it as '
    'the first memory, or model.ngram_memories.1.join="sum"',
  ),
]

RECURRENT = [
  ('model.recurrent.window=1e12', 'model.recurrent.window=1000000000000 must be from 1 to 1024'),
  (
    'model.recurrent.hidden=3e12',
    'model.recurrent.hidden=3000000000000 must be at most 2,147,483,647',
  ),
  (
    'model.recurrent.hidden=100 model.recurrent.readout=key_value_predict',
    'model.recurrent.hidden=100 must be divisible by 3 for '
    "model.recurrent.readout='key_value_predict': use 99; an output is divided into key, value and "
    'prediction',
  ),
  (
    'model.recurrent.hidden=301 model.recurrent.readout=key_value',
    "model.recurrent.hidden=301 must be divisible by 2 for model.recurrent.readout='key_value': "
    'use 300; an output is divided into key and value',
  ),
  (
    'model.recurrent.hidden=3 model.recurrent.readout=ngram',
    'model.recurrent.hidden=3 must be divisible by model.recurrent.slices=4 for '
    "model.recurrent.readout='ngram': use 4, or another model.recurrent.slices",
  ),
  (
    'model.recurrent.readout=values',
    "model.recurrent.readout='values' is not one of: none, attention, key_value, "
    'key_value_predict, ngram, recurrent_memory',
  ),
  ('model.recurrent.window=0', 'model.recurrent.window=0 must be from 1 to 1024'),
  (
    'model.recurrent.hidden=256 model.layers=2',
    'model.layers: only for Transformers, not model.recurrent; use model.layers=4',
  ),
  (
    'model.recurrent.hidden=256 model.heads=2',
    'model.heads: only for Transformers, not model.recurrent; use model.heads=4',
  ),
  (
    'model.recurrent.hidden=256 model.memory.same_length=memory model.feed_forward_width=4 '
    'model.span.limit=128',
    'model.feed_forward_width, model.memory, model.span: only for Transformers, not '
    'model.recurrent; use model.feed_forward_width=688, model.memory=None, model.span=None',
  ),
  (
    'model.recurrent.gate_bias=True model.recurrent.readout=key_value',
    "model.recurrent.gate_bias=True is not for model.recurrent.readout='key_value', but for "
    'recurrent_memory: use False',
  ),
  (
    'model.recurrent.cell=rnn model.recurrent.forget_bias=2',
    "model.recurrent.forget_bias=2.0 is not for model.recurrent.cell='rnn', but for lstm: use 1.0",
  ),
  (
    'model.recurrent.hidden=24 model.recurrent.readout=key_value model.width=10',
    'model.tie_embeddings=True needs an output as wide as the embedding, but the readout has '
    'width 12 and model.width=10: use model.recurrent.hidden=20, or model.tie_embeddings=False, '
    'or model.width=12',
  ),
  (
    'model.recurrent.hidden=24 model.tie_embeddings=False model.adaptive_softmax.divisor=1',
    'model.adaptive_softmax needs an output as wide as the embedding, but the readout has width '
    '24 and model.width=256: use model.recurrent.hidden=256, or model.width=24',
  ),
  (
    'model.recurrent.hidden=256 model.ngram.layer=end',
    "model.ngram.layer='end' is not for model.recurrent=(hidden=256), but for None: use 'input'",
  ),
  (
    'model.recurrent.hidden=256 MEMORY.layers=(1,)',
    'MEMORY.layers=(1,) is not for model.recurrent=(hidden=256), but for None: use ()',
  ),
  (
    'model.recurrent.hidden=256 evaluation.memory.length=4',
    'evaluation.memory.length=4 is not for model.recurrent=(hidden=256), but for None: use None',
  ),
  (
    'evaluation.memory.carry_memory=True',
    'evaluation.memory.carry_memory=True needs model.recurrent, which is None: set '
    'model.recurrent, or use None',
  ),
]

DATA = [
  ('data.vocabulary_size=1e10', 'data.vocabulary_size=10000000000 must be at most 2,147,483,647'),
  ('data.mixture.0.weight=-1.0', 'data.mixture.0.weight=-1.0 must be at least 0'),
  (
    'data.mixture.0.weight=0.0 data.mixture.1.weight=0',
    'data.mixture: all weights are 0: set data.mixture.0.weight=1',
  ),
  (
    'data.mixture.0.path=/a/x.txt data.mixture.1.path=/b/x.jsonl',
    "data.mixture.0 has the same name 'x': set data.mixture.1.name",
  ),
  (
    'data.mixture.0.name=a/b',
    "data.mixture.0.name='a/b': use letters, digits, '_', '-' and '.' only",
  ),
  (
    'data.vocabulary=words data.mixture.0.corpus=shards',
    "data.mixture.0.corpus='shards' is tokenised during training, but data.vocabulary='words' "
    'needs the whole text in advance: use sentencepiece or bytes',
  ),
  (
    'data.corpus=c4/en data.vocabulary=words',
    "data.corpus='c4/en' is tokenised during training, but data.vocabulary='words' needs the "
    'whole text in advance: use sentencepiece or bytes',
  ),
  (
    'data.corpus=shards data.drop_duplicates=True',
    "data.drop_duplicates=True needs a corpus tokenised in advance, but data.corpus='shards' is "
    'tokenised during training: use data.corpus=text',
  ),
  (
    'data.shuffle=3',
    "data.shuffle=3 needs a streamed corpus, but data.corpus='sotu' is tokenised in advance: use "
    'data.shuffle=None',
  ),
  (
    'data.vocabulary=tokenizer',
    "data.vocabulary='tokenizer' is not learned from the text: set data.vocabulary_path to the "
    'tokenizer.json of a Hugging Face tokenizer',
  ),
  (
    'data.vocabulary_size=4096 data.vocabulary_path=x',
    "data.vocabulary_size=4096 must equal None for data.vocabulary='sentencepiece' and "
    "data.vocabulary_path='x': use None; the size of a trained model is fixed",
  ),
  ('data.vocabulary_path=x', 'data.vocabulary_path=x: no such file'),
  (
    'data.vocabulary=bytes data.vocabulary_path=x',
    "data.vocabulary_path='x' is not for data.vocabulary='bytes', but for sentencepiece, "
    'tokenizer: use None',
  ),
  (
    'data.vocabulary=letters',
    "data.vocabulary='letters' is not one of: bytes, characters, words, sentencepiece, tokenizer",
  ),
  ('data.newlines=lose', "data.newlines='lose' is not one of: keep, drop, eos"),
  (
    'data.vocabulary_size=200',
    "data.vocabulary_size=200 must be at least 260 for data.vocabulary='sentencepiece': use 260; "
    '256 bytes, special pieces',
  ),
  ('data.text_field=()', "data.text_field=() must not be empty: use ('text',)"),
  (
    'data.chat=True data.corpus=text',
    "data.chat=True is not for data.vocabulary='sentencepiece', but for tokenizer: " + CHAT_REMEDY,
  ),
  (
    'data.chat=True data.vocabulary=tokenizer',
    "data.chat=True is not for data.corpus='sotu', but for text, shards: " + CHAT_REMEDY,
  ),
  (
    'data.loss_on=assistant',
    "data.loss_on='assistant' is not for data.chat=False, but for True: use 'all', or "
    'data.chat=True for conversations',
  ),
  ('data.loss_on=user', "data.loss_on='user' is not one of: all, assistant"),
  (
    'data.mixture.0.corpus=text data.mixture.0.loss_on=assistant',
    "data.mixture.0.loss_on='assistant' is not for data.mixture.0.chat=False, but for True: use "
    "'all', or data.mixture.0.chat=True for conversations",
  ),
  ("data.text_field=('a','')", "data.text_field=('a', '') must not be empty: use ('text',)"),
  ('data.document_separator=', "data.document_separator='' must not be empty: use None"),
  (
    'data.path=x data.mixture.0.path=y',
    "data.path='x' is not for data.mixture=((path='y')), but for (): use None; a mixture has "
    'data.mixture.0.path',
  ),
  (
    'data.mixture.0.corpus=enwik8 data.mixture.0.text_field=b',
    "data.mixture.0.text_field=('b',) is not for data.mixture.0.corpus='enwik8', but for text, "
    "shards: use ('text',)",
  ),
  ('data.mixture.0.text_field=()', "data.mixture.0.text_field=() must not be empty: use ('text',)"),
  ('data.vocabulary_size=-1', 'data.vocabulary_size=-1 must be at least 3, or None'),
]

TRAINING_OPTIMIZER = [
  (
    'training.segment_length=1e12',
    'training.segment_length=1000000000000 must be at most 2,147,483,647',
  ),
  ('training.steps=1e30', 'training.steps=1.000e+30 must be at most 2,147,483,647'),
  ('optimizer.warmup_steps=1e99', 'optimizer.warmup_steps=1.000e+99 must be at most 2,147,483,647'),
  ('training.steps=0', 'training.steps=0 must be at least 1'),
  ('training.batch_size=0', 'training.batch_size=0 must be at least 1'),
  ('training.segment_length=-1', 'training.segment_length=-1 must be at least 1'),
  ('training.segments_per_call=0', 'training.segments_per_call=0 must be at least 1'),
  ('training.log_every=0', 'training.log_every=0 must be at least 1'),
  ('training.checkpoint_every=0', 'training.checkpoint_every=0 must be at least 1'),
  ('training.evaluate_every=-10', 'training.evaluate_every=-10 must be at least 0'),
  (
    'training.log_to=mlflow',
    "training.log_to=('mlflow',): 'mlflow' is not one of: tensorboard, wandb",
  ),
  (
    'training.compiler_options=--xla_a=1',
    "training.compiler_options=('--xla_a=1',): '--xla_a=1' is not 'name=value': use for example "
    "'xla_tpu_scoped_vmem_limit_kib=32768'",
  ),
  (
    "training.compiler_options=('xla_a=1','xla_a=2')",
    "training.compiler_options=('xla_a=1', 'xla_a=2'): 'xla_a=2' sets xla_a a second time: "
    'remove one of them',
  ),
  ('training.keep_checkpoints=0', 'training.keep_checkpoints=0 must be at least 1'),
  ('optimizer.warmup_steps=-1', 'optimizer.warmup_steps=-1 must be at least 0'),
  (
    'optimizer.schedule=cosinus',
    "optimizer.schedule='cosinus' is not one of: cosine, linear, wsd, rsqrt, constant, "
    'transformer_xl, transformer_xl_tensorflow',
  ),
  (
    'optimizer.width_rule=mup',
    "optimizer.width_rule='mup' needs optimizer.base_width, which is None: set "
    'optimizer.base_width, or use None',
  ),
  (
    'optimizer.base_width=64',
    'optimizer.base_width=64 is not for optimizer.width_rule=None, but for mup: use None',
  ),
  (
    'optimizer.width_rule=mup optimizer.base_width=64 optimizer.algorithm=lamb',
    "optimizer.width_rule='mup' is not for optimizer.algorithm='lamb', but for adam, adamw, muon: "
    'use None',
  ),
  (
    'optimizer.width_rule=mup optimizer.base_width=64 model.initial.recipe=adaptive_span',
    "optimizer.width_rule='mup' is not for model.initial=(recipe='adaptive_span'), but for None: "
    'use None',
  ),
  (
    'optimizer.width_rule=mup optimizer.base_width=64 model.final_norm=False',
    'optimizer.width_rule scales the logits by the final norm or by an output matrix, and this '
    'model has neither: use model.final_norm=True or model.tie_embeddings=False',
  ),
  (
    'optimizer.schedule=wsd',
    "optimizer.schedule='wsd' needs optimizer.decay_steps, which is None: set "
    "optimizer.decay_steps, or use 'cosine'",
  ),
  (
    'optimizer.decay_from=5',
    "optimizer.decay_from=5 is not for optimizer.schedule='cosine', but for wsd: use None",
  ),
  (
    'optimizer.decay_steps=5',
    "optimizer.decay_steps=5 is not for optimizer.schedule='cosine', but for wsd: use None",
  ),
  (
    'optimizer.schedule=wsd optimizer.decay_steps=5 optimizer.decay_shape=sqrt',
    "optimizer.decay_shape='sqrt' is not one of: linear, 1-sqrt, cosine",
  ),
  (
    'optimizer.schedule=wsd optimizer.decay_steps=2000',
    'optimizer.decay_steps=2000 must be at most training.steps=1000: use 1000, or a larger '
    'training.steps',
  ),
  (
    'optimizer.schedule=wsd optimizer.decay_steps=20 optimizer.decay_from=1001',
    'optimizer.decay_from=1001 must be at most training.steps=1000: use 1000, or a larger '
    'training.steps',
  ),
  (
    'optimizer.schedule=wsd optimizer.decay_steps=20 optimizer.drop.steps=5',
    "optimizer.drop=(steps=5) is not for optimizer.schedule='wsd', but for cosine, linear, rsqrt, "
    'constant, transformer_xl, transformer_xl_tensorflow: use None; wsd has a decay of its own',
  ),
  ('optimizer.learning_rate=0.0', 'optimizer.learning_rate=0.0 must be above 0'),
  ('optimizer.table.learning_rate=-1.0', 'optimizer.table.learning_rate=-1.0 must be above 0'),
  (
    'optimizer.algorithm=sgd',
    "optimizer.algorithm='sgd' is not one of: adam, adamw, lamb, adagrad, muon",
  ),
  (
    'optimizer.algorithm=muon model.recurrent.cell=lstm',
    "optimizer.algorithm='muon' is not for model.recurrent=(defaults), but for None: use 'adam'; "
    'muon is for the matrices of blocks',
  ),
  (
    'optimizer.muon.steps=3',
    "optimizer.muon=(steps=3) is not for optimizer.algorithm='adam', but for muon: use None",
  ),
  (
    'optimizer.algorithm=muon optimizer.muon.scale=keller',
    "optimizer.muon.scale='keller' is not one of: jordan, moonlight, none",
  ),
  (
    'optimizer.train=ngrm model.ngram.layer=input',
    "optimizer.train='ngrm' is not a part of this model: did you mean 'ngram'? Its parts are all, "
    'new, embedding, blocks, head, ngram',
  ),
  (
    'optimizer.rates.0.part=new',
    "optimizer.rates.0.part='new' is not a part of this model: did you mean 'head'? Its parts are "
    'embedding, blocks, head',
  ),
  (
    "optimizer.train=('all','head')",
    "optimizer.train=('all', 'head') is not a list of parts: use \"all\" alone, or some of "
    'new, embedding, blocks, head',
  ),
  (
    'optimizer.train=()',
    'optimizer.train=() is not a list of parts: use "all" alone, or some of new, embedding, '
    'blocks, head',
  ),
  (
    'optimizer.train=new',
    "optimizer.train=('new',) needs init_from, which is None: set init_from, or use ('all',); "
    '"new" means missing in init_from',
  ),
  (
    'optimizer.rates.0.part=head optimizer.rates.1.part=head',
    'optimizer.rates has a part twice: give each part one factor',
  ),
]

EVALUATION_MESH_FINETUNE = [
  ('evaluation.streams=0', 'evaluation.streams=0 must be at least 1'),
  (
    'model.position=relative evaluation.memory.length=8',
    'evaluation.memory is set, but the model has no memory in training, and supports none in '
    "evaluation alone with model.position='relative': use evaluation.memory=None",
  ),
  (
    'model.memory.length=64 model.memory.same_length=memory_and_self model.span.limit=64 '
    'evaluation.memory.length=128',
    'evaluation.memory.length=128 must be at most model.span.limit=64: use 64, or a larger '
    'model.span.limit',
  ),
  ('evaluation.memory.length=-1', 'evaluation.memory.length=-1 must be at least 0, or None'),
  (
    'evaluation.protocol=window',
    "evaluation.protocol='window' is not one of: streams, transformer_xl, adaptive_span, "
    'sliding_window',
  ),
  ('mesh.data=0', 'mesh.data=0 must be at least 1, or -1'),
  ('mesh.fsdp=-2', 'mesh.fsdp=-2 must be at least 1, or -1'),
  ('mesh.model=0', 'mesh.model=0 must be at least 1, or -1'),
  ('mesh.zero=2', 'mesh.zero=2 must be from 0 to 1'),
  (
    'evaluation.max_examples=9',
    'evaluation.max_examples=9 needs finetune, which is None: set finetune, or use None',
  ),
  ('evaluation.max_examples=0', 'evaluation.max_examples=0 must be at least 1, or None'),
  ('finetune.wsc_spans=t6', "finetune.wsc_spans='t6' is not one of: all, t5"),
  (
    'mesh=zero',
    'mesh=zero: expected one of data, fsdp, fsdp_8, model_8, fsdp_model_4; or set data, fsdp and '
    'model of mesh',
  ),
  (
    'model.position=segment_sinusoid evaluation.memory.length=8',
    "evaluation.memory.length=8 must be at most 0 for model.position='segment_sinusoid': use "
    'evaluation.memory=None; positions in the segment exclude a memory',
  ),
  (
    'model.position=segment_sinusoid evaluation.memory.same_length=memory',
    'evaluation.memory is set, but the model has no memory in training, and supports none in '
    "evaluation alone with model.position='segment_sinusoid': use evaluation.memory=None",
  ),
  (
    'finetune.targets_length=127',
    'finetune.targets_length=127 must be at most 126, which is training.segment_length=128 minus '
    '2: use 126, or a larger training.segment_length; inputs need room, too',
  ),
  ('mesh.fsdp=-1', 'mesh: only one of data, fsdp and model may be -1'),
  ('evaluation.segment_length=-1', 'evaluation.segment_length=-1 must be at least 1, or None'),
  ('evaluation.max_tokens=-5', 'evaluation.max_tokens=-5 must be at least 1, or None'),
]

TABLES = {
  'keys': KEYS,
  'model': MODEL,
  'attention': ATTENTION,
  'segment_memory_span_persistent': SEGMENT_MEMORY_SPAN_PERSISTENT,
  'ngram': NGRAM,
  'ngram_memories': NGRAM_MEMORIES,
  'recurrent': RECURRENT,
  'data': DATA,
  'training_optimizer': TRAINING_OPTIMIZER,
  'evaluation_mesh_finetune': EVALUATION_MESH_FINETUNE,
}


def parse(overrides):
  """Returns the default config with overrides."""
  arguments = []
  for override in overrides.replace('MEMORY', 'model.ngram_memories.0').split():
    arguments.append(override if override.startswith('--') else f'--config.{override}')
  return command_line.override(config.Config(), command_line.split(arguments)[0], '*')


@pytest.mark.parametrize('table', TABLES)
def test_overrides_are_refused(table):
  wrong = []
  for overrides, message in TABLES[table]:
    try:
      parse(overrides)
      actual = 'no error'
    except errors.BadInput as error:
      actual = str(error).replace('model.ngram_memories.0', 'MEMORY')
    if actual != message.replace('model.ngram_memories.0', 'MEMORY'):
      wrong.append(f'{overrides}\n  expected: {message}\n  actual:   {actual}')
    assert '\n' not in message and len(message) < 300
  assert not wrong, '\n'.join(wrong)


# Values of a config file, which the command line would convert to the type of the key.
@each(
  'values, message',
  [
    ({'model': None}, 'model=None: the section is required'),
    ({'model': 3}, 'model=3 must be a section, not a value'),
    (None, 'the config=None must be a section, not a value'),
    ({'seed': 1.0}, 'seed=1.0 is not of type int'),
    ({'training': {'steps': '100'}}, "training.steps='100' is not of type int"),
    ({'training': {'steps': 100.0}}, 'training.steps=100.0 is not of type int'),
    ({'model': {'bias': 1}}, 'model.bias=1 is not of type bool'),
    ({'model': {'dtype': None}}, 'model.dtype=None is not of type str'),
    ({'data': {'path': 3}}, 'data.path=3 is not of type str or None'),
    ({'optimizer': {'clip_norm': '1'}}, "optimizer.clip_norm='1' is not of type float or None"),
    ({'optimizer': {'learning_rate': float('nan')}}, 'optimizer.learning_rate=nan must be finite'),
    ({'model': {'ngram': 3}}, 'model.ngram=3 must be a section, not a value'),
    ({'model': {'ngram': {'dim': '8'}}}, "model.ngram.dim='8' is not of type int"),
    (
      {'model': {'ngram': {'dmi': 8}}},
      'unknown config key model.ngram.dmi: did you mean model.ngram.dim?',
    ),
    ({'model': {'ngram_memories': 3}}, 'model.ngram_memories.0=3 must be a section, not a value'),
    (
      {'model': {'ngram_memories': [{}, None]}},
      'model.ngram_memories.1=None: the section is required',
    ),
    (
      {'model': {'ngram_memories': [{'row': 3}]}},
      'unknown config key model.ngram_memories.0.row: did you mean model.ngram_memories.0.rows?',
    ),
  ],
)
def test_values_of_a_file_are_refused(values, message):
  with bad_input(message):
    config.resolve(values)
