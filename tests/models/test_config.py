import pytest

from ngrammer_jax import errors
from ngrammer_jax.models import config as model_config

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
    {'ngram': {'layer': 'attention', 'pairing': ('previous', 'attended', 'none', 'none')}},
  ],
)
def test_possible_model_passes(fields):
  check(**fields)


@pytest.mark.parametrize(
  'fields, message',
  [
    (
      {'activation': 'swish'},
      "model.activation='swish' is not one of: gelu, relu, silu, squared_relu",
    ),
    (
      {'position': 'alibi'},
      "model.position='alibi' is not one of: rope, sinusoid, relative, shaw, "
      'segment_sinusoid, learned, none',
    ),
    ({'dtype': 'float16'}, "model.dtype='float16' is not one of: auto, bfloat16, float32, float64"),
    ({'remat': 'some'}, "model.remat='some' is not one of: none, minimal, full"),
    ({'layers': 0}, 'model.layers=0 must be at least 1'),
    ({'width': 0}, 'model.width=0 must be at least 1'),
    ({'heads': -2}, 'model.heads=-2 must be at least 1'),
    ({'feed_forward_width': 0}, 'model.feed_forward_width=0 must be at least 1'),
    (
      {'heads': 7},
      'model.heads=7 does not divide model.width=256: '
      'use model.heads=8, or a width that is a multiple of 14',
    ),
    (
      {'width': 12, 'heads': 4},
      'model.position="rope" needs an even head width, not 3 (model.width=12 / model.heads=4): '
      'use model.heads=3, or a width that is a multiple of 8',
    ),
    ({'dropout': 1.0}, 'model.dropout=1.0 must be at least 0 and below 1'),
    ({'dropout': -0.1}, 'model.dropout=-0.1 must be at least 0 and below 1'),
    (
      {'ngram': {'dim': 65}},
      'model.ngram: n-gram dim 65 is not between 1 and the head width 64 (width 256 / 4 heads)',
    ),
    (
      {'ngram': {'layer': 'attention', 'pairing': ('next',)}},
      "model.ngram.pairing: 'next' is not one of: previous, attended, none",
    ),
    (
      {'ngram': {'layer': 'attention', 'pairing': ('none', 'attended')}},
      'model.ngram.pairing has 2 entries for model.layers=4: '
      'give one for each layer, or a single one for all',
    ),
    (
      {'ngram': {'pairing': ('attended',)}},
      'model.ngram.pairing=(\'attended\',) needs model.ngram.layer="attention": '
      'elsewhere a token pairs with the one before',
    ),
    (
      {'ngram': {'layer': 'attention', 'pairing': ('none',)}},
      'model.ngram.pairing is "none" for all layers: use model.ngram=None, or pair in some',
    ),
    (
      {'ngram': {'layer': 'attention', 'pairing': ('attended',)}, 'position': 'none'},
      'model.ngram.pairing has "attended", but with model.position="none" equal tokens are '
      'attended to alike, and chance decides which one a token pairs with: use "rope"',
    ),
    (
      {'ngram': {'layer': 'attention', 'heads': 8}},
      'model.ngram.heads=8 after attention, whose model.heads=4 are those of the layer: '
      'leave model.ngram.heads=None',
    ),
    (
      {'ngram': {'layer': 'attention', 'clusters': None}},
      'model.ngram.clusters=None after attention: what it finds has no token id, give clusters',
    ),
    (
      {'ngram': {'layer': 'attention', 'pairing': ('attended',), 'orders': (2, 3)}},
      'model.ngram.orders=(2, 3): what is attended to makes pairs, orders=(2,)',
    ),
    ({'ngram': {'heads': 3}}, 'model.ngram: 3 heads do not divide the width 256'),
    (
      {'ngram': {'combine': 'add'}},
      'model.ngram: combine "add" needs n-gram dim 8 to equal the head width 64',
    ),
    ({'ngram': {'combine': 'sum'}}, "model.ngram: combine 'sum' is not one of concat, add"),
    (
      {'ngram': {'vocabulary_size': 16, 'heads': 8}},
      'model.ngram: 8 heads need 8 primes between 16 and 32, but there are only 5: '
      'use a larger n-gram vocabulary or fewer heads',
    ),
    ({'ngram': {'clusters': 0}}, 'model.ngram.clusters=0 must be at least 1, or None'),
  ],
)
def test_impossible_model_says_what_to_change(fields, message):
  with pytest.raises(errors.BadInput) as caught:
    check(**fields)
  assert str(caught.value) == message


def test_auto_dtype_is_float32_on_cpu():
  assert model_config.ModelConfig().compute_dtype() == 'float32'
  assert model_config.ModelConfig(dtype='bfloat16').compute_dtype() == 'bfloat16'
