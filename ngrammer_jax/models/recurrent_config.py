"""What a recurrent model is made of, and how large it is."""

import dataclasses
from typing import Any

from flax import linen as nn

from ngrammer_jax import errors
from ngrammer_jax.layers import readout, recurrence

# And in how many parts each divides the hidden state; the n-gram readout in its slices.
READOUTS = {
  'none': 1,
  'attention': 1,
  'key_value': 2,
  'key_value_predict': 3,
  'ngram': None,
  'recurrent_memory': 1,
}
ATTENTION = ('attention', 'key_value', 'key_value_predict')
# What of a model config a recurrent model has; everything else is of Transformers.
SHARED = (
  *('width', 'heads', 'tie_embeddings', 'scale_embeddings', 'softmax_bias', 'vocabulary_chunk'),
  *('dropout', 'dtype', 'scan_layers', 'ngram', 'adaptive_softmax', 'recurrent'),
)
UNBOUNDED = 2**31 - 1  # tokens that are predicted from: all


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
  """One recurrent layer in place of the Transformer's, and what reads its outputs (`readout`)."""

  hidden: int = 300
  cell: str = 'lstm'
  readout: str = 'none'
  # Of attention: outputs before the current one; of a recurrent memory: words, with the current.
  window: int = 5
  slices: int = 4  # of the n-gram readout
  # Training and evaluation hand what the readout looks back at from segment to segment. The paper's
  # does not; token by token, in generation and rankings, it always is.
  carry_memory: bool = False
  empty_slots: str = 'mask'  # of attention, see `layers.readout.AttentionReadout`
  temporal_tables: int = 1  # of a recurrent memory; 2 in its authors' code
  gate_bias: bool = False  # the same; True in its authors' code
  forget_bias: float = 1.0
  initial: float = 0.1  # parameters begin in [-initial, initial], but n-grams, adaptive softmax

  @property
  def parts(self) -> int:
    """In which the readout divides the hidden state."""
    return READOUTS[self.readout] or self.slices

  @property
  def width(self) -> int:
    """Of what the output layer sees, J."""
    return self.hidden // self.parts

  @property
  def slots(self) -> int:
    """Tokens that the readout looks back at, the current one not counted."""
    if self.readout in ATTENTION:
      return self.window
    return {'ngram': self.slices - 1, 'recurrent_memory': self.window - 1}.get(self.readout, 0)

  def initializer(self) -> nn.initializers.Initializer:
    """Of all parameters."""
    return recurrence.symmetric(self.initial)

  def products(self, width: int) -> int:
    """Multiplications for one token, the output layer not counted."""
    K, J, G = self.hidden, self.width, recurrence.CELLS[self.cell]
    of_readout = {
      'ngram': K * J,
      'recurrent_memory': 6 * K * K + 2 * self.window * K,
      **dict.fromkeys(ATTENTION, 4 * J * J + 2 * self.window * J),
    }
    return G * K * (width + K) + of_readout.get(self.readout, 0)

  def parameters(self, width: int, vocabulary_size: int) -> int:
    """The number of parameters without the embedding, with an output layer that is not tied.

    Args:
      width: of the embedding.
      vocabulary_size: V.
    """
    K, J, V, G = self.hidden, self.width, vocabulary_size, recurrence.CELLS[self.cell]
    gates = 6 * K * (K + self.gate_bias)
    of_readout = {
      'ngram': K * J,
      'recurrent_memory': 2 * V * K + self.temporal_tables * self.window * K + gates,
      **dict.fromkeys(ATTENTION, 4 * J * J + J),
    }
    return G * K * (width + K + 1) + of_readout.get(self.readout, 0) + V * (J + 1)

  def matched(self, budget: int, width: int, vocabulary_size: int) -> 'RecurrentConfig':
    """The same with the hidden size whose number of parameters is closest to a budget.

    Sizes are multiples of the parts; of two that are equally close it is the smaller one. For the
    arguments see `parameters`.
    """
    sized = lambda parts: dataclasses.replace(self, hidden=self.parts * parts)
    count = lambda parts: sized(parts).parameters(width, vocabulary_size)
    above = 1
    while count(above) < budget:
      above += 1
    return sized(min(range(max(above - 1, 1), above + 1), key=lambda k: abs(count(k) - budget)))

  def check(self, model: Any) -> None:
    """Raises BadInput for a model that cannot be."""
    choices = {'readout': tuple(READOUTS), 'cell': tuple(recurrence.CELLS)}
    errors.check_choices('model.recurrent', self, choices | {'empty_slots': readout.EMPTY})
    for key, least in (('hidden', 1), ('window', 1), ('slices', 2), ('temporal_tables', 1)):
      if getattr(self, key) < least:
        raise errors.BadInput(
          f'model.recurrent.{key}={getattr(self, key)} must be at least {least}'
        )
    if self.temporal_tables > 2:
      raise errors.BadInput(f'model.recurrent.temporal_tables={self.temporal_tables}: use 1 or 2')
    if not 0 < self.initial < float('inf'):
      raise errors.BadInput(f'model.recurrent.initial={self.initial} must be above 0')
    self._check_division()
    self._check_in_use()
    self._check_others(model)

  def _check_division(self) -> None:
    if self.hidden % self.parts:
      below = self.hidden // self.parts * self.parts
      near = f'{below} or {below + self.parts}' if below else str(self.parts)
      of = 'slices' if self.readout == 'ngram' else 'parts'
      raise errors.BadInput(
        f'model.recurrent.hidden={self.hidden} does not divide into the {self.parts} {of} of '
        f'model.recurrent.readout={self.readout!r}: use {near}'
      )

  def _check_in_use(self) -> None:
    """No switch that does nothing: whoever compares two runs would compare one with itself.

    But `carry_memory`, which a model without anything to carry shares with those it is beside.
    """
    of = {
      'window': (*ATTENTION, 'recurrent_memory'),
      'slices': ('ngram',),
      'empty_slots': ATTENTION,
      'temporal_tables': ('recurrent_memory',),
      'gate_bias': ('recurrent_memory',),
    }
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value != field.default and self.readout not in of.get(field.name, (self.readout,)):
        raise errors.BadInput(
          f'model.recurrent.{field.name}={value!r} is not for readout={self.readout!r}, but for '
          f'{", ".join(of[field.name])}: leave it at {field.default!r}'
        )
    if self.cell != 'lstm' and self.forget_bias != 1:
      raise errors.BadInput(
        f'model.recurrent.forget_bias={self.forget_bias} is not for cell={self.cell!r}: leave it '
        f'at 1.0'
      )

  def _check_others(self, model) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(model)}
    shared = set(SHARED) if model.ngram is not None else {*SHARED} - {'heads'}  # of the n-grams
    wrong = [k for k, v in defaults.items() if k not in shared and getattr(model, k) != v]
    if wrong:
      keys = ', '.join(f'model.{key}' for key in wrong)
      mend = ', '.join(f'model.{key}={defaults[key]!r}' for key in wrong)
      raise errors.BadInput(f'of Transformers, and not of model.recurrent: {keys}; leave {mend}')
    if model.ngram is not None and model.ngram.layer != 'input':
      raise errors.BadInput(
        f'model.ngram.layer={model.ngram.layer!r} is of Transformers: with model.recurrent use '
        f'"input"'
      )
    joined = {'tie_embeddings': model.tie_embeddings, 'adaptive_softmax': model.adaptive_softmax}
    for key, there in joined.items():
      if there and self.width != model.width:
        said = 'tie_embeddings=True' if key == 'tie_embeddings' else key
        other = f'model.width={self.width}'
        if key == 'tie_embeddings':
          other = f'model.tie_embeddings=False, or {other}'
        raise errors.BadInput(
          f'model.{said} needs an output as wide as the embedding, but the readout has '
          f'{self.width} and model.width={model.width}: use model.recurrent.hidden='
          f'{model.width * self.parts}, or {other}'
        )
