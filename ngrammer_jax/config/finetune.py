"""Fine-tuning of a trained model."""

import dataclasses

from ngrammer_jax.config.fields import field
from ngrammer_jax.config.relations import at_most

CODEBOOKS = ('frozen', 'learning')
CHOOSING = ('rank', 'greedy')
FORMATS = ('t5', 'question')
WSC_SPANS = ('all', 't5')


@dataclasses.dataclass(frozen=True)
class FinetuneConfig:
  """Fine-tuning task of a trained model (see `ngrammer_jax.finetune`)."""

  task: str = field('rte', 'SuperGLUE task; mixture: all jointly, all: one after the other')
  format: str = field('t5', 'T5 texts, or questions for published models', choices=FORMATS)
  targets_length: int = field(
    32,
    'maximum tokens of a target, including its end',
    at_least=2,
    relations=(at_most('training.segment_length', minus=2, reason='inputs need room, too'),),
  )
  packed: bool = field(True, 'pack several examples into a row; they do not attend to each other')
  truncate: bool = field(True, 'truncate long inputs on the side without the question')
  prefix: str = field('causal', 'attention within the inputs', choices=('causal', 'bidirectional'))
  codebook: str = field('frozen', 'whether the centroids are trained', choices=CODEBOOKS)
  dropout: float | None = field(None, 'dropout; None: as in pre-training', at_least=0, below=1)
  choosing: str | None = field(
    None, 'selection of answers; None: rank, or greedy for tasks without labels', choices=CHOOSING
  )
  wsc_spans: str = field('all', 'spans marked in wsc: all, or the spans of T5', choices=WSC_SPANS)
  patience: int | None = field(None, 'early stopping: validations without improvement', at_least=1)
  tfds_dir: str | None = field(None, 'folder of tasks prepared by TFDS', free_on_resume=True)
  download: bool = field(False, 'let TFDS download the tasks', free_on_resume=True)
