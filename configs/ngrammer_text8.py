"""A character-level N-Grammer on text8, sized for two CPU cores.

  python -m ngrammer_jax.train --config=configs/ngrammer_text8.py \\
    --config.data.path=/path/to/text8.zip --workdir=runs/text8

The layer is from Roy et al. 2022 (arXiv 2207.06366), which has no result on text8; sizes and
learning rates are our own. Expected after 2 minutes on 2 cores: 2.37 bits per character on the
first 65,536 characters of validation, 2.31 on the test split; `transformer`: 2.58, `primer`: 2.52
(see README).

Variants: `ngrammer` (the default); `transformer`, the same network without the n-gram layer; and
`primer`, a Transformer with squared ReLU and causal convolutions (So et al. 2021,
arXiv 2109.08668). text8 is 100 MB of lower-case Wikipedia with 27 symbols, split 90M / 5M / 5M
(http://mattmahoney.net/dc/textdata). The checksum must be that of the published file.
"""

from ngrammer_jax import config

VARIANTS = ('ngrammer', 'transformer', 'primer')


def get_config(variant: str = 'ngrammer'):
  """Returns the config of one of VARIANTS."""
  config.check_variant(variant, VARIANTS)
  c = config.default()

  c.data.corpus = 'text8'
  c.data.vocabulary = 'characters'

  c.model.layers = 3
  c.model.width = 192
  c.model.heads = 6
  c.model.feed_forward_width = 512
  if variant == 'primer':
    c.model.activation = 'squared_relu'
    c.model.gated = False
    c.model.feed_forward_width = 768
    c.model.convolution = 3
  if variant == 'ngrammer':
    c.model.ngram = config.block('model.ngram', clusters=64, vocabulary_size=4096, dim=8)
    c.optimizer.table = config.block('optimizer.table', learning_rate=0.03)

  c.training.steps = 240
  c.training.batch_size = 16
  c.training.segment_length = 256
  c.training.log_every = 10
  c.training.evaluate_every = 40
  c.training.checkpoint_every = 120
  c.optimizer.learning_rate = 4e-3
  c.optimizer.warmup_steps = 50
  c.evaluation.streams = 32
  c.evaluation.max_tokens = 65_536
  return c
