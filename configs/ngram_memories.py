"""N-gram memories of tokens: the published tables, and small variants at equal total parameters.

  python -m ngrammer_jax.train --config=configs/ngram_memories.py:quickstart_engram \\
    --workdir=runs/engram
  python -m ngrammer_jax.train --config=configs/ngram_memories.py:text8_engram \\
    --config.data.path=/path/to/text8.zip --workdir=runs/text8_engram

Published tables (a preset of `model.ngram_memories` and the values below), with the number of rows
of each table and the parameters of all tables:

  engram_demo    10,344,164 and 10,348,242 rows of 64     1.32B  demo of deepseek-ai/Engram
  engram_27b     36.2M rows of 80 in each of two layers   5.79B  Cheng et al. 2026, arXiv 2601.07372
  engram_40b     115.8M rows of 80 in each of two layers 18.53B  the same
  v41            384,006,168 and 384,016,682 rows of 256 196.61B  DeepSeek-V4.1-Flash
  ple            320,001,446 rows of 160, and 90 of padding 51.20B  Qwen3.8-Flash-Next
  over_encoding  102,400,024 rows of 256                 26.21B  Huang et al. 2025, arXiv 2501.16975
  longcat_lite   122,683,536 rows of 256                 31.41B  arXiv 2601.21204
  blt            3,000,000 rows of 1024                   3.07B  Pagnoni et al. 2024, 2412.09871

Published are keys, hashes, tables and joins, the optimizers of the tables, the vocabulary sizes
(but not that of over_encoding), and the model widths (but not those of engram_demo, ple and blt;
that of over_encoding follows from its 26.3B table parameters); of engram_27b and engram_40b also
the 30 blocks and 32 heads. All else is ours: the blocks are dense with one residual stream, where
the originals have experts, up to four streams and other attention. eos_id=1 of ple is ours too.
None of these variants has been trained with this code.

Small variants for 2 CPU cores are named TEXT_METHOD. TEXT is quickstart (State of the Union) or
wikitext2, with the model of configs/quickstart.py, or text8, with the one of
configs/ngrammer_text8.py. METHOD is one of:

  plain          the model without a memory: fewer parameters than the others
  wide           the same with a wider feed-forward
  ngrammer       the N-Grammer of those files (Roy et al. 2022)
  over_encoding  2- and 3-grams of tokens, projected, mean with the token embedding, layer norm
  engram         2- and 3-grams of compressed tokens, gated, in the second block
  latent_engram  2-grams of cluster ids of the second block's input, with Engram's hash and gate
  bigram_hash    2-grams of tokens with random signs, added in every block from one table
  ngram_values   2- and 3-grams of tokens, projected and added to the values of two blocks
  product_keys   Memory+ in place of the feed-forward of the second block: no n-grams
  blt            3- to 8-grams of bytes, added to the byte embedding; only quickstart_blt
  gemma3n_ple    a second embedding of each token, which multiplies after each block
  stem           a row of each token in place of the up projection of the second block
  deep_embed     a row of each token that multiplies the output of its feed-forward
  value_embeddings  a row of each token in the values of the first and the last block, one table
  nanochat_values   the same in the last block, with another start and another gate
  copies         the token after the longest earlier match, at the input and before the head
  token_shift    each token mixed with the three before it, in every block

The last seven are quickstart_METHOD only: characters have few rows, and the last two no table.
studies/ngram_memories.py has copies and token_shift at equal parameters.

All but plain, copies and token_shift have the total parameters of ngrammer within 1 %, counting
tables, projections and all other parameters trained by gradient, so not centroids: the rows of a
head, their width, or the feed-forward width are chosen to match. The tables are trained by Adagrad,
as in the N-Grammer, with a learning rate of their own; those with a row of each token by Adam, with
the factor of their preset for the learning rate. The sizes of the small variants are ours.
"""

from typing import Any

from ml_collections import ConfigDict

from ngrammer_jax import config

# Preset, vocabulary size, model width, blocks and heads; values that differ from the preset.
PUBLISHED = {
  'engram_demo': ('engram', 129_280, 1024, 30, 16, {}),
  'engram_27b': ('engram', 129_280, 2560, 30, 32, dict(rows=2_262_400, width=80, layers=(1, 14))),
  'engram_40b': ('engram', 129_280, 2560, 30, 32, dict(rows=7_239_680, width=80, layers=(1, 14))),
  'v41': ('engram_v41', 129_280, 5120, 30, 40, {}),
  'ple': ('ple', 248_320, 2560, 30, 32, dict(eos_id=1)),
  'over_encoding': ('over_encoding', 50_304, 2048, 16, 16, {}),
  'longcat_lite': ('longcat', 131_072, 3072, 14, 24, {}),
  'blt': ('blt', None, 1024, 16, 16, {}),
}
TEXTS = ('quickstart', 'text8', 'wikitext2')
METHODS = ('plain', 'wide', 'ngrammer', 'over_encoding', 'engram', 'latent_engram')  # of the study
OTHER_METHODS = ('bigram_hash', 'ngram_values', 'product_keys')
OURS = dict(boundary='starts', fill_id=0, deviation=0.02)
SMALL_MEMORIES = {
  'over_encoding': dict(preset='over_encoding', heads=2, width=16, amplification='norm'),
  'engram': dict(preset='engram', layers=(1,), heads=2, width=16, **OURS),
  'latent_engram': dict(
    preset='engram', key='clusters', layers=(1,), orders=(2,), heads=6, width=8, **OURS
  ),
  'bigram_hash': dict(preset='bigram_hash', width=192, boundary='starts'),
  'gemma3n_ple': dict(preset='gemma3n_ple', layers=(0, 1, 2), width=56),
  'stem': dict(preset='stem', layers=(1,)),
  'deep_embed': dict(preset='deep_embed', layers=(1,)),
  'value_embeddings': dict(preset='value_embeddings'),
  'nanochat_values': dict(preset='nanochat_values', layers=(2,), every_block=False, block_stride=1),
  'ngram_values': dict(preset='ngram_values', layers=(0, 2), width=8, boundary='starts'),
  'blt': dict(preset='blt', width=192),
}
# Base rows of a head and width of the feed-forward that match the N-Grammer's parameters.
ROWS = {
  'over_encoding': {'quickstart': 12_102, 'wikitext2': 12_102, 'text8': 2883},
  'engram': {'quickstart': 11_870, 'wikitext2': 11_870, 'text8': 2660},
  'latent_engram': {'quickstart': 15_930, 'wikitext2': 15_930, 'text8': 3660},
  'bigram_hash': {'quickstart': 4098, 'wikitext2': 4098, 'text8': 1026},
  'ngram_values': {'quickstart': 48_412, 'wikitext2': 48_412, 'text8': 11_548},
  'blt': {'quickstart': 1326},
}
# The best of 0.03, 0.1 and 0.3 on enwik8 (docs/results.md has others too). Not tried for blt,
# bigram_hash and ngram_values.
TABLE_LEARNING_RATES = {
  'ngrammer': 0.03,
  'over_encoding': 0.3,
  'engram': 0.3,
  'latent_engram': 0.3,
  'bigram_hash': 0.3,
  'ngram_values': 0.3,
  'blt': 0.03,
}
TOKEN_METHODS = ('gemma3n_ple', 'stem', 'deep_embed', 'value_embeddings', 'nanochat_values')
SUB_KEYS = {'quickstart': 70, 'wikitext2': 70, 'text8': 43}  # of product keys, to match
STEM_FEED_FORWARD = 296  # its rows are as wide
WIDE = {'quickstart': 968, 'wikitext2': 968, 'text8': 626}
SMALL = [f'{text}_{method}' for text in TEXTS for method in (*METHODS, *OTHER_METHODS)]
OTHER_MEMORIES = {  # without tables
  'copies': ('copy_memory', {}),
  'token_shift': ('token_shift', {}),
}
QUICKSTART = [f'quickstart_{method}' for method in ('blt', *TOKEN_METHODS, *OTHER_MEMORIES)]
VARIANTS = (*PUBLISHED, *SMALL, *QUICKSTART)


def get_config(variant: str = 'quickstart_engram') -> ConfigDict:
  """Returns the config of one of VARIANTS."""
  config.check_variant(variant, VARIANTS)
  c = config.default()
  if variant in PUBLISHED:
    _use_published_tables(c, *PUBLISHED[variant])
    return c
  text, _, method = variant.partition('_')
  _use_small_model(c, text)
  if method == 'wide':
    c.model.feed_forward_width = WIDE[text]
  elif method == 'ngrammer':
    c.model.ngram = _ngrammer(text)
  elif method in OTHER_MEMORIES:
    name, values = OTHER_MEMORIES[method]
    c.model[name] = config.block(f'model.{name}', **values)
  elif method == 'product_keys':
    c.model.product_memory = _product_memory(text)
  elif method != 'plain':
    c.model.ngram_memories = (_small_memory(text, method),)
  if method == 'stem':
    c.model.feed_forward_width = STEM_FEED_FORWARD
  if method in TABLE_LEARNING_RATES:
    rate = TABLE_LEARNING_RATES[method]
    c.optimizer.table = config.block('optimizer.table', learning_rate=rate)
  if method in TOKEN_METHODS:
    c.data.matched_vocabulary_size = c.data.vocabulary_size
  if method == 'blt':
    c.data.vocabulary = 'bytes'
    c.data.vocabulary_size = None
    c.training.segment_length = 256
  return c


def _use_published_tables(
  c: ConfigDict,
  preset: str,
  vocabulary_size: int | None,
  width: int,
  layers: int,
  heads: int,
  values: dict[str, Any],
) -> None:
  """Sets a published memory, and a model of our own around it."""
  c.data.corpus = 'c4/en'
  c.data.vocabulary = 'sentencepiece' if vocabulary_size else 'bytes'
  c.data.vocabulary_size = vocabulary_size
  c.data.shuffle = 0

  c.model.layers = layers
  c.model.width = width
  c.model.heads = heads
  c.model.feed_forward_width = 8 * width // 3
  c.model.remat = 'minimal'
  c.model.vocabulary_chunk = 8192
  c.model.ngram_memories = (config.block('model.ngram_memories', preset=preset, **values),)

  c.training.steps = 50_000
  c.training.batch_size = 1280
  c.training.segment_length = 4096
  c.training.log_every = 100
  c.training.evaluate_every = 1_000
  c.training.checkpoint_every = 1_000
  c.optimizer.learning_rate = 4e-4
  c.optimizer.weight_decay = 0.1
  c.optimizer.weight_decay_on = 'all'  # all but the tables, which have their own optimizer
  c.optimizer.warmup_steps = 2_000
  c.evaluation.streams = 256
  c.evaluation.max_tokens = 2**22


def _use_small_model(c: ConfigDict, text: str) -> None:
  """Sets the text and the model of configs/quickstart.py or configs/ngrammer_text8.py."""
  c.data.corpus = {'quickstart': 'sotu', 'text8': 'text8', 'wikitext2': 'wikitext'}[text]
  if text == 'text8':
    c.data.vocabulary = 'characters'
    c.data.vocabulary_size = None
    c.training.steps = 240
    c.training.segment_length = 256
  else:
    c.data.vocabulary = 'sentencepiece'
    c.data.vocabulary_size = 4096
    c.training.steps = 300
    c.training.segment_length = 128

  c.model.layers = 3
  c.model.width = 192
  c.model.heads = 6
  c.model.feed_forward_width = 512

  c.optimizer.learning_rate = 4e-3
  c.optimizer.warmup_steps = 50

  c.training.batch_size = 16
  c.training.evaluate_every = c.training.steps // 2
  c.training.checkpoint_every = c.training.steps // 2
  c.evaluation.max_tokens = 65_536


def _ngrammer(text: str) -> ConfigDict:
  """Returns the N-Grammer of configs/quickstart.py or configs/ngrammer_text8.py."""
  if text == 'text8':
    return config.block('model.ngram', clusters=64, vocabulary_size=4096, dim=8)
  return config.block('model.ngram', clusters=128, vocabulary_size=16_384, dim=8)


def _product_memory(text: str) -> ConfigDict:
  """Returns product keys in place of the feed-forward of the second block."""
  return config.block(
    'model.product_memory',
    preset='memory_layers',
    layers=(1,),
    sub_keys=SUB_KEYS[text],
    key_width=64,
    top=16,
    learning_rate_factor=None,
  )


def _small_memory(text: str, method: str) -> ConfigDict:
  """Returns the memory of a method, with about as many parameters as the N-Grammer."""
  if method in TOKEN_METHODS:  # a row for each token, trained by Adam as published
    return config.block('model.ngram_memories', **SMALL_MEMORIES[method])
  values = dict(optimizer='adagrad', learning_rate_factor=None, rows=ROWS[method][text])
  if method == 'latent_engram':
    values['clusters'] = _ngrammer(text).clusters
  return config.block('model.ngram_memories', **SMALL_MEMORIES[method], **values)
