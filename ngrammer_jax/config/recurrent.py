"""Recurrent models and their sizes."""

import dataclasses
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config.fields import field

CELLS = {'lstm': 4, 'rnn': 1}  # number of gates
# Number of parts that each divides the hidden state into; None: `slices`.
READOUTS = {
  'none': 1,
  'attention': 1,
  'key_value': 2,
  'key_value_predict': 3,
  'ngram': None,
  'recurrent_memory': 1,
}
ATTENTION = ('attention', 'key_value', 'key_value_predict')
EMPTY_SLOTS = ('mask', 'zeros')  # see `layers.readout.AttentionReadout`
# What of a model config a recurrent model has; everything else is of Transformers.
SHARED = (
  *('width', 'heads', 'tie_embeddings', 'scale_embeddings', 'softmax_bias', 'vocabulary_chunk'),
  *('dropout', 'dtype', 'scan_layers', 'ngram', 'adaptive_softmax', 'recurrent'),
)
_MEMORY = ('readout', ('recurrent_memory',))
UNBOUNDED = 2**31 - 1  # tokens that are predicted from: all


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
  """One recurrent layer in place of the Transformer's, and what reads its outputs (`readout`)."""

  hidden: int = field(300, 'hidden size K', at_least=1)
  cell: str = field('lstm', 'recurrent cell', choices=tuple(CELLS))
  readout: str = field('none', 'what reads the outputs', choices=tuple(READOUTS))
  window: int = field(
    5,
    'attention: outputs before the current one; recurrent memory: words up to it',
    at_least=1,
    only_for=('readout', (*ATTENTION, 'recurrent_memory')),
  )
  slices: int = field(4, 'slices of the hidden state', at_least=2, only_for=('readout', ('ngram',)))
  # The paper does not. Token by token, in generation and rankings, it is always carried. It may be
  # set without anything to carry, for models that are compared with others that carry a memory.
  carry_memory: bool = field(False, 'carry what the readout looks back at to the next segment')
  empty_slots: str = field(
    'mask', 'slots before a document', choices=EMPTY_SLOTS, only_for=('readout', ATTENTION)
  )
  temporal_tables: int = field(
    1, "number of temporal tables; 2 in the authors' code", at_least=1, at_most=2, only_for=_MEMORY
  )
  gate_bias: bool = field(False, "biases of the gates; True in the authors' code", only_for=_MEMORY)
  forget_bias: float = field(1.0, 'initial bias of the forget gate', only_for=('cell', ('lstm',)))
  initial: float = field(
    0.1, 'parameters begin in [-initial, initial], except n-grams and adaptive softmax', above=0
  )

  @property
  def parts(self) -> int:
    """Number of parts that the readout divides the hidden state into."""
    return READOUTS[self.readout] or self.slices

  @property
  def width(self) -> int:
    """Width J of the input of the output layer."""
    return self.hidden // self.parts

  @property
  def slots(self) -> int:
    """Tokens that the readout looks back at, the current one not counted."""
    if self.readout in ATTENTION:
      return self.window
    return {'ngram': self.slices - 1, 'recurrent_memory': self.window - 1}.get(self.readout, 0)

  def parameters(self, width: int, vocabulary_size: int) -> int:
    """The number of parameters without the embedding, with an output layer that is not tied.

    Args:
      width: of the embedding.
      vocabulary_size: V.
    """
    K, J, V, G = self.hidden, self.width, vocabulary_size, CELLS[self.cell]
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
    self._check_division()
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

  def _check_others(self, model) -> None:
    defaults = {f.name: f.default for f in dataclasses.fields(model)}
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
        option = 'tie_embeddings=True' if key == 'tie_embeddings' else key
        other = f'model.width={self.width}'
        if key == 'tie_embeddings':
          other = f'model.tie_embeddings=False, or {other}'
        raise errors.BadInput(
          f'model.{option} needs an output as wide as the embedding, but the readout has '
          f'{self.width} and model.width={model.width}: use model.recurrent.hidden='
          f'{model.width * self.parts}, or {other}'
        )
