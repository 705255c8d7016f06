"""Presets of n-gram memories: the values of published codes and papers."""

from ngrammer_jax.config.ngram.value_gate import ValueGateConfig

_ADAM = dict(optimizer='adam', learning_rate_factor=1.0)
# A row for each token, which no n-gram shares.
_TOKEN_ROWS = dict(hash='id', orders=(1,), heads=1, row_rule='vocabulary')
_TOKEN_VALUES = _TOKEN_ROWS | dict(point='values', join='sum', width=None)
_OVER_ENCODING = dict(hash='polynomial', join='mean', heads=4, width=256, projection=True)
# A table from 0, added to the input of each block with a learned factor.
_SPEEDRUN = dict(
  hash='speedrun',
  join='sum',
  every_block=True,
  heads=1,
  row_rule='exact',
  width=768,
  deviation=0.0,
  boundary='none',
  signs=8192,
  factor=0.1,
  optimizer='adam',
  learning_rate_factor=75.0,
)

# Values of the published codes and papers; other fields have their defaults. `rows` and `layers`
# are of large models: small models need other ones. See docs and configs/ngram_memories.py.
PRESETS = {
  # The demo, deepseek-ai/Engram. The optimizer is from the paper, arXiv 2601.07372.
  'engram': dict(
    key='compressed',
    layers=(1, 15),
    rows=(5 * 129_280,),  # 5 times the vocabulary of DeepSeek-V3
    boundary='none',
    fill_id=2,
    bias=True,
    convolution=4,
    deviation=1.0,
    optimizer='adam',
  ),
  # DeepSeek-V4.1-Flash.
  'engram_v41': dict(
    key='compressed',
    layers=(1, 14),
    orders=(2, 3, 4),
    rows=(16_000_000,),
    width=256,
    fill_id=2,
    norm_epsilon=1e-6,
    zero_score='positive',
    optimizer='sinkhorn',
  ),
  # Qwen3.8-Flash-Next. The id of the end of a document depends on the vocabulary.
  'ple': dict(
    hash='ple',
    layers=(1,),
    rows=(20_000_000,),
    row_multiple=128,
    width=160,
    seed=1234,
    boundary='eos_id',
    fill_id=None,
    norm_epsilon=1e-6,
    norm_offset=True,
    convolution=4,
    convolution_epsilon=1e-6,
    **_ADAM,
  ),
  # Huang et al., arXiv 2501.16975: OE-12.8M with 4 tables for each order.
  'over_encoding': _OVER_ENCODING | _ADAM | dict(rows=(12_800_000,), row_rule='over_encoding'),
  # LongCat-Flash-Lite, arXiv 2601.21204: tables of 78 times its vocabulary.
  'longcat': _OVER_ENCODING
  | _ADAM
  | dict(orders=(2, 3, 4), rows=(78 * 131_072,), row_rule='longcat', boundary='eos_id', eos_id=2),
  # Byte Latent Transformer, arXiv 2412.09871. The width must equal the model width.
  'blt': dict(
    key='bytes',
    hash='blt',
    join='sum',
    orders=(3, 4, 5, 6, 7, 8),
    heads=1,
    rows=(500_000,),
    row_rule='exact',
    width=1024,
    deviation=None,
    **_ADAM,
  ),
  # Records 62 to 91 of modded-nanogpt (engram-lite); sizes, signs and optimizer of 3 February 2026.
  'bigram_hash': _SPEEDRUN | dict(table='bigrams', orders=(2,), rows=(377_280,)),
  # Record 92, with its table in halves of bigrams and trigrams; it adds rows in six layers, by
  # gates of each token that start at 0.05, and has an optimizer of its own.
  'ngram_hash': _SPEEDRUN
  | dict(table='ngrams', orders=(2, 3), rows=(42_301_440,), sign_hash='products', factor=0.05),
  # Per-layer embeddings of Gemma 3n (35 blocks, one table), on one residual stream as in Gemma 4.
  'gemma3n_ple': dict(
    join='product',
    point='after_block',
    layers=tuple(range(35)),
    table='per_layer',
    sliced=True,
    width=256,
    untrained_row=0,
    embedding_part=True,
    norm_epsilon=1e-6,
    **_TOKEN_ROWS,
    **_ADAM,
  ),
  # STEM, arXiv 2601.10639: all blocks but the first; the number of blocks is ours.
  'stem': dict(
    join='replace',
    point='feed_forward',
    layers=tuple(range(1, 16)),
    width=None,
    table_initial='xavier_normal',
    **_TOKEN_ROWS,
    **_ADAM,
  ),
  # DeepEmbed of RWKV-8; the number of blocks and the optimizer are ours.
  'deep_embed': dict(
    join='multiply',
    point='after_feed_forward',
    layers=tuple(range(12)),
    width=None,
    deviation=0.0,
    **_TOKEN_ROWS,
    **_ADAM,
  ),
  # Record 55 of modded-nanogpt, with one table in place of three, in every second block.
  'value_embeddings': _TOKEN_VALUES
  | dict(
    every_block=True,
    block_stride=2,
    value_gate=ValueGateConfig(channels=12),
    table='value_embeddings',
    deviation=0.0,
    optimizer='adam',
    learning_rate_factor=75.0,
  ),
  # nanochat, with a table for each of every second block. The learning rate is ours.
  'nanochat_values': _TOKEN_VALUES
  | dict(
    every_block=True,
    block_stride=2,
    value_gate=ValueGateConfig(channels=12, factor=3.0, initial=0.02),
    table_initial='uniform',
    deviation=None,
    optimizer='adam',
  ),
  # Pull request 854 of nanochat: 24 blocks, and a table on the host. Its optimizer averages the
  # squared gradients of a row, where `row_adagrad` sums them.
  'ngram_values': dict(
    point='values',
    join='sum',
    hash='salted',
    layers=(3, 7, 11, 15),
    table='ngram_values',
    sliced=True,
    heads=2,
    rows=(300_000_000,),
    row_rule='shared_prime',
    width=32,
    deviation=0.0,
    boundary='none',
    projection=True,
    value_gate=ValueGateConfig(channels=12, factor=1.0, initial=0.02, mean=True, per_head=False),
    optimizer='row_adagrad',
  ),
}
