"""Tables 1 and 2 of the N-Grammer paper (Roy et al. 2022, arXiv 2207.06366): C4, width 1024.

  python -m ngrammer_jax.train --config=configs/ngrammer_c4.py:393k_8k_50 --workdir=runs/c4

This reads c4/en as prepared by TFDS, in its data directory or in --config.data.path, with the
packages of the extra `tasks`. To read the files of C4 instead, with the vocabulary of T5:

    --config.data.corpus=shards --config.data.path=/path/to/c4/en \\
    --config.data.vocabulary_path=/path/to/t5_32k.model --config.data.vocabulary_size=None

Variants, with the parameters and the perplexity after 1M steps in the paper, and the parameters of
this code. The paper counts the centroids (4.2M or 8.4M); the last column counts only parameters
trained by gradient. With the centroids, all but primer_l equal the paper, truncated to millions:

  transformer                 16 layers          234M 15.32               234,210,560
  transformer_l               20 layers          284M 14.70               284,562,688
  primer                      16 layers          234M 15.10               234,341,632
  primer_l                    18 layers          284M 15.01               259,534,080
  196k_12, _25, _50           raw bi-grams       246M 15.36               246,795,648
                                                 259M 15.27, 284M 15.50   259,378,688, 284,544,768
  196k_4k_12, _25, _50        4,096 clusters     251M 15.26, 263M 15.07, 288M 15.01   as above
  196k_8k_12, _25, _50        8,192 clusters     255M 15.58, 267M 15.44, 292M 15.01   as above
  393k_8k_12, _25, _50        8,192 clusters     267M 15.32               259,378,560
                                                 292M 15.97, 343M 14.79   284,544,512, 334,876,416

Table 2 moves the layer of the best variant: 393k_8k_50_begin 14.92, _middle 15.13, _end 15.17.

Ambiguities of the paper: the n-gram dimensions of 12.5, 25 and 50 % agree with the parameter counts
only as 64, 128 and 256 over all heads, half of what the text says; the variants have these. 18
layers of this width have 259.5M parameters, not 284M; primer_l has the number of layers of the
paper. Table 2 repeats 14.79 without the position of the layer, assumed to be the input. The number
of heads (8), the batch (256 rows of 1024 tokens) and the learning rates are not in the paper; these
are the defaults of the library of the same authors. None of these has been trained with this code.
"""

from ngrammer_jax import config

VARIANTS = (
  'transformer',
  'transformer_l',
  'primer',
  'primer_l',
  '196k_12',
  '196k_25',
  '196k_50',
  '196k_4k_12',
  '196k_4k_25',
  '196k_4k_50',
  '196k_8k_12',
  '196k_8k_25',
  '196k_8k_50',
  '393k_8k_12',
  '393k_8k_25',
  '393k_8k_50',
  '393k_8k_50_begin',
  '393k_8k_50_middle',
  '393k_8k_50_end',
)
PLACES = ('begin', 'middle', 'end')
LAYERS = {'transformer_l': 20, 'primer_l': 18}
VOCABULARY_SIZE = {'196k': 768 * 256, '393k': 1536 * 256}
CLUSTERS = {'4k': 4096, '8k': 8192}
DIM = {'12': 8, '25': 16, '50': 32}  # per head


def get_config(variant: str = '393k_8k_50'):
  """Returns the config of one of VARIANTS."""
  config.check_variant(variant, VARIANTS)
  c = config.default()

  c.data.corpus = 'c4/en'
  c.data.vocabulary = 'sentencepiece'
  c.data.vocabulary_size = 32_000
  c.data.shuffle = 0

  c.model.layers = LAYERS.get(variant, 16)
  c.model.width = 1024
  c.model.heads = 8
  c.model.feed_forward_width = 2731  # 8/3 of the width: gated, it has 8 width^2 parameters
  c.model.remat = 'minimal'
  if variant.startswith('primer'):
    c.model.activation = 'squared_relu'
    c.model.gated = False
    c.model.feed_forward_width = 4096
    c.model.convolution = 3
  elif not variant.startswith('transformer'):
    table, *clusters, dim = [part for part in variant.split('_') if part not in PLACES]
    c.model.ngram = config.block(
      'model.ngram',
      clusters=CLUSTERS[clusters[0]] if clusters else None,
      vocabulary_size=VOCABULARY_SIZE[table],
      dim=DIM[dim],
      initial='uniform',  # as in the code of the authors
      layer=next((place for place in PLACES if variant.endswith(place)), 'input'),
    )

  c.training.steps = 1_000_000
  c.training.batch_size = 256
  c.training.segment_length = 1024
  c.training.log_every = 100
  c.training.evaluate_every = 10_000
  c.training.checkpoint_every = 2_000
  c.optimizer.learning_rate = 1e-3
  c.optimizer.warmup_steps = 4_000
  c.optimizer.schedule = 'rsqrt'
  c.evaluation.streams = 256
  c.evaluation.max_tokens = 2**22
  return c
