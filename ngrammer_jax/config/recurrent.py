"""Recurrent models, and their number of parameters."""

import dataclasses
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config.fields import field
from ngrammer_jax.config.relations import divisible_by

CELLS = {'lstm': 4, 'rnn': 1}  # number of gates
# Number of parts that each readout divides the hidden state into; None: `slices`.
READOUTS = {
  'none': 1,
  'attention': 1,
  'key_value': 2,
  'key_value_predict': 3,
  'ngram': None,
  'recurrent_memory': 1,
}
ATTENTION = ('attention', 'key_value', 'key_value_predict')
EMPTY_SLOTS = ('mask', 'zeros')  # see `layers.recurrent.readout.AttentionReadout`
# Fields of `ModelConfig` that apply to recurrent models; the others are only for Transformers.
SHARED = (
  'width',
  'heads',
  'tie_embeddings',
  'scale_embeddings',
  'softmax_bias',
  'vocabulary_chunk',
  'dropout',
  'dtype',
  'logits_dtype',
  'loss_dtype',
  'scan_layers',
  'ngram',
  'ngram_memories',
  'adaptive_softmax',
  'recurrent',
)
_MEMORY = {'readout': ('recurrent_memory',)}
UNBOUNDED = 2**31 - 1  # context length of recurrent models, in tokens


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
  """One recurrent layer instead of a Transformer, and the readout of its outputs."""

  hidden: int = field(
    300,
    'hidden size K',
    at_least=1,
    relations=(
      divisible_by(
        2, where={'readout': ('key_value',)}, reason='an output is divided into key and value'
      ),
      divisible_by(
        3,
        where={'readout': ('key_value_predict',)},
        reason='an output is divided into key, value and prediction',
      ),
      divisible_by('slices', where={'readout': ('ngram',)}),
    ),
  )
  cell: str = field('lstm', 'recurrent cell', choices=tuple(CELLS))
  readout: str = field('none', 'readout of the outputs', choices=tuple(READOUTS))
  window: int = field(
    5,
    'attention: number of previous outputs; recurrent memory: number of words',
    at_least=1,
    at_most=1024,
    only_for={'readout': (*ATTENTION, 'recurrent_memory')},
  )
  slices: int = field(4, 'slices of the hidden state', at_least=2, only_for={'readout': ('ngram',)})
  # False in the paper. Generation and ranking always carry it. It may be set for a readout without
  # memory, so that models can be compared with equal options.
  carry_memory: bool = field(False, 'carry the memory of the readout to the next segment')
  empty_slots: str = field(
    'mask', 'masked, or visible zeros', choices=EMPTY_SLOTS, only_for={'readout': ATTENTION}
  )
  temporal_tables: int = field(
    1, "number of temporal tables; 2 in the authors' code", at_least=1, at_most=2, only_for=_MEMORY
  )
  gate_bias: bool = field(False, "biases of the gates; True in the authors' code", only_for=_MEMORY)
  forget_bias: float = field(1.0, 'initial bias of the forget gate', only_for={'cell': ('lstm',)})
  initial: float = field(0.1, 'uniform range of initial parameters, not of n-grams', above=0)

  @property
  def num_slices(self) -> int:
    """Number of parts of the hidden state in the readout."""
    return READOUTS[self.readout] or self.slices

  @property
  def width(self) -> int:
    """Width J of the input of the output layer."""
    return self.hidden // self.num_slices

  @property
  def slots(self) -> int:
    """Number of previous tokens in the memory of the readout."""
    if self.readout in ATTENTION:
      return self.window
    match self.readout:
      case 'ngram':
        return self.slices - 1
      case 'recurrent_memory':
        return self.window - 1
      case _:
        return 0

  def parameters(self, width: int, vocabulary_size: int) -> int:
    """Returns the number of parameters without the embedding, for an untied output layer.

    Args:
      width: width of the embedding.
      vocabulary_size: V.
    """
    K = self.hidden
    J = self.width
    cell = CELLS[self.cell] * K * (width + K + 1)
    output_layer = vocabulary_size * (J + 1)
    return cell + self._readout_parameters(vocabulary_size) + output_layer

  def _readout_parameters(self, vocabulary_size: int) -> int:
    """Returns the number of parameters of the readout."""
    K = self.hidden
    J = self.width
    if self.readout in ATTENTION:
      return 4 * J * J + J  # four matrices and a vector for the scores
    match self.readout:
      case 'ngram':
        return K * J
      case 'recurrent_memory':
        gates = 6 * K * (K + self.gate_bias)
        temporal_tables = self.temporal_tables * self.window * K
        return 2 * vocabulary_size * K + temporal_tables + gates
      case _:
        return 0

  def matched(self, budget: int, width: int, vocabulary_size: int) -> 'RecurrentConfig':
    """Returns this config with the hidden size whose number of parameters is closest to a budget.

    The hidden size is a multiple of the number of parts; of two equally close sizes, it is the
    smaller one. For the arguments see `parameters`.
    """
    larger = self._with_width(1)
    smaller = larger
    while larger.parameters(width, vocabulary_size) < budget:
      smaller = larger
      larger = self._with_width(larger.width + 1)
    excess = larger.parameters(width, vocabulary_size) - budget
    deficit = abs(budget - smaller.parameters(width, vocabulary_size))
    return smaller if deficit <= excess else larger

  def _with_width(self, J: int) -> 'RecurrentConfig':
    """Returns this config with another width of the output of the readout."""
    return dataclasses.replace(self, hidden=self.num_slices * J)

  def check(self, model: Any) -> None:
    """Raises BadInput for sizes or other options that are invalid for a recurrent model."""
    self._check_transformer_options(model)
    if model.tie_embeddings:
      remedy = f'model.tie_embeddings=False, or model.width={self.width}'
      self._check_output_width(model, 'tie_embeddings=True', remedy)
    if model.adaptive_softmax is not None:
      self._check_output_width(model, 'adaptive_softmax', f'model.width={self.width}')

  def _check_transformer_options(self, model: Any) -> None:
    """Raises BadInput for options that recurrent models do not support."""
    shared = set(SHARED)
    if model.ngram is None:
      shared -= {'heads'}
    keys = []
    remedies = []
    if model.remat == 'none':  # the default of earlier versions
      shared.add('remat')
    for option in dataclasses.fields(model):
      if option.name not in shared and getattr(model, option.name) != option.default:
        keys.append(f'model.{option.name}')
        remedies.append(f'model.{option.name}={option.default!r}')
    if keys:
      raise errors.BadInput(
        f'{", ".join(keys)}: only for Transformers, not model.recurrent; use {", ".join(remedies)}'
      )

  def _check_output_width(self, model: Any, option: str, remedy: str) -> None:
    """Raises BadInput if an option requires equal widths and they differ."""
    if self.width != model.width:
      raise errors.BadInput(
        f'model.{option} needs an output as wide as the embedding, but the readout has width '
        f'{self.width} and model.width={model.width}: use model.recurrent.hidden='
        f'{model.width * self.num_slices}, or {remedy}'
      )
