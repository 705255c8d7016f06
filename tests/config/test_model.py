import pytest

from ngrammer_jax import errors
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config import recurrent as recurrent_config
from tests.checks import bad_input

NGRAM = {'clusters': 4, 'vocabulary_size': 64, 'dim': 8}


def check(ngram=None, **fields):
  block = None if ngram is None else model_config.NGramConfig(**NGRAM | ngram)
  model_config.ModelConfig(ngram=block, **fields).check()


ATTENTION_NGRAM = {'layer': 'attention'}


@pytest.mark.parametrize(
  'possible, impossible',
  [
    ({}, {'heads': 3}),
    ({'ngram': {'heads': 8}}, {'ngram': {'heads': 7}}),
    ({'ngram': {'clusters': None}}, {'ngram': ATTENTION_NGRAM | {'clusters': None}}),
    ({'ngram': {'combine': 'add', 'dim': 64}}, {'ngram': {'combine': 'add', 'dim': 32}}),
    ({'ngram': {'orders': (3, 2)}}, {'ngram': {'orders': (3, 3)}}),
    (
      {'position': 'sinusoid', 'width': 12, 'heads': 4},
      {'position': 'sinusoid', 'width': 9, 'heads': 3},
    ),
    ({'dropout': 0.9}, {'dropout': 1.0}),
    (
      {'memory': model_config.MemoryConfig(length=0)},
      {'memory': model_config.MemoryConfig(length=0, sinks=1)},
    ),
    (
      {'memory': model_config.MemoryConfig(length=1, same_length='memory')},
      {'memory': model_config.MemoryConfig(length=0, same_length='memory')},
    ),
    (
      {'memory': model_config.MemoryConfig(length=2, sinks=1)},
      {'memory': model_config.MemoryConfig(length=2, sinks=2)},
    ),
    (
      {'ngram': ATTENTION_NGRAM | {'pairing': ('previous', 'attended', 'none', 'none')}},
      {'ngram': ATTENTION_NGRAM | {'pairing': ('previous', 'attended', 'none')}},
    ),
    (  # heads of its own, unless it pairs by the heads of attention
      {'ngram': ATTENTION_NGRAM | {'heads': 8}},
      {'ngram': ATTENTION_NGRAM | {'heads': 8, 'pairing': ('attended',)}},
    ),
  ],
)
def test_a_possible_model_passes_and_the_next_one_does_not(possible, impossible):
  check(**possible)
  with pytest.raises(errors.BadInput):
    check(**impossible)


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


def test_learned_positions_repeat_with_a_memory():
  limits = lambda **fields: (
    (model := model_config.ModelConfig(position='absolute', **fields)).num_positions,
    model.longest_document,
  )
  assert limits() == (512, 512)
  assert limits(memory=model_config.MemoryConfig()) == (512, None)


def test_a_tail_without_words():
  config = model_config.AdaptiveSoftmaxConfig((8, 20))
  config.check_vocabulary(21)
  with bad_input(
    'model.adaptive_softmax.cutoffs=(8, 20): the vocabulary has only 20 words: use smaller ones'
  ):
    config.check_vocabulary(20)
