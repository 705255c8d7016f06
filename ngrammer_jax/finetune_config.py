"""What a trained model is taught in addition, as a block of the config."""

import dataclasses

from ngrammer_jax import errors

PREFIXES, CODEBOOKS, CHOOSING = (
  ('causal', 'bidirectional'),
  ('frozen', 'learning'),
  ('rank', 'greedy'),
)


@dataclasses.dataclass(frozen=True)
class FinetuneConfig:
  """What a trained model is taught in addition (see `ngrammer_jax.finetune`)."""

  task: str = 'rte'  # of SuperGLUE; `mixture`: all at once, `all`: one after the other
  targets_length: int = 32  # tokens, with the end; what is left of a segment is for the inputs
  packed: bool = True  # several examples in a row, that do not see each other
  truncate: bool = True  # inputs that are too long, on the side without the question
  prefix: str = 'causal'  # or bidirectional: the inputs see all of themselves
  codebook: str = 'frozen'  # or learning, as in pre-training
  dropout: float | None = None  # None: as in pre-training
  choosing: str | None = None  # rank, greedy; None: greedy for what has no labels
  patience: int | None = None  # evaluations without progress after which it is over
  tfds_dir: str | None = None  # where TFDS has prepared the tasks, if there is no superglue_dir
  download: bool = False  # let TFDS fetch them

  def check(self) -> None:
    """Raises BadInput for what cannot work."""
    errors.check_choices('finetune', self, {'prefix': PREFIXES, 'codebook': CODEBOOKS})
    if self.choosing is not None:
      errors.check_choices('finetune', self, {'choosing': CHOOSING})
    if self.targets_length < 2:
      raise errors.BadInput(f'finetune.targets_length={self.targets_length} must be at least 2')
    if self.patience is not None and self.patience < 1:
      raise errors.BadInput(f'finetune.patience={self.patience} must be at least 1')
    if self.dropout is not None and not 0 <= self.dropout < 1:
      raise errors.BadInput(f'finetune.dropout={self.dropout} must be at least 0 and below 1')
