"""The cases of `benchmarks.accelerator`: models, their sizes, and how they are measured."""

import dataclasses
from typing import Any

ENGRAM = {
  'model.ngram_memories.0.preset': 'engram',
  'model.ngram_memories.0.key': 'tokens',  # compressed ids need the texts of tokens
  'model.ngram_memories.0.layers': '(1,8)',
  'model.ngram_memories.0.rows': '(20000,)',
  'model.ngram_memories.0.width': 32,  # 2 orders of 8 heads: 512 values a token
}
# 2 orders of 8 heads of a million rows of 32.
TABLES = ENGRAM | {
  'model.ngram_memories.0.layers': '(1,)',
  'model.ngram_memories.0.rows': '(1000000,)',
  'model.ngram_memories.0.optimizer': 'row_adagrad',
}
HOST = {'model.ngram_memories.0.table_memory': 'host'}
C4, XL = 'configs/ngrammer_c4.py', 'configs/transformer_xl.py:wt103_large'
LLAMA = 'configs/transformer.py:llama_c4'
TRANSFORMER = f'{C4}:transformer'
N_GRAMMER = f'{C4}:393k_8k_50'
XL_WORDS = {'data.vocabulary_size': 267_735}


@dataclasses.dataclass(frozen=True)
class Case:
  """One measurement.

  Attributes:
    config: file and variant of the config.
    changes: values of config keys.
    rows: batch rows of each device.
    kind: `attention`, `step`, `torch` or `run`, see `benchmarks.accelerator`.
  """

  config: str = TRANSFORMER
  changes: dict[str, Any] = dataclasses.field(default_factory=dict)
  rows: int = 16
  kind: str = 'step'


FREE = ', not deterministic'
XLA = {'model.kernel': 'xla'}
IN_A_ROW = {'model.scan_layers': False}
# Most others are compared with the first step, or with the case without their last suffix.
CASES = {
  'transformer': Case(),
  f'transformer{FREE}': Case(),
  'attention': Case(kind='attention'),
  f'torch{FREE}': Case(kind='torch'),
  'transformer, layers in a row': Case(changes=IN_A_ROW),
  'n-grammer': Case(N_GRAMMER),
  'llama': Case(LLAMA),
  'engram': Case(changes=ENGRAM),
  'transformer, plain attention': Case(changes=XLA),
  'transformer_xl': Case(XL, XL_WORDS, 8),
  'transformer, loss in bfloat16': Case(changes={'model.loss_dtype': 'bfloat16'}),
  'transformer, remat auto': Case(changes={'model.remat': 'auto'}),
  'transformer, remat full': Case(changes={'model.remat': 'full'}),
  'transformer, windows': Case(
    changes={'model.attention.window': 256, 'model.attention.layer_pattern': "('window',)"}
  ),
  'tables': Case(changes=TABLES, kind='run'),
  'tables, on the host': Case(changes=TABLES | HOST, kind='run'),
  f'n-grammer{FREE}': Case(N_GRAMMER),
  f'llama{FREE}': Case(LLAMA),
  f'engram{FREE}': Case(changes=ENGRAM),
  f'transformer_xl{FREE}': Case(XL, XL_WORDS, 8),
  f'transformer{FREE}, plain attention': Case(changes=XLA),
  f'llama{FREE}, plain attention': Case(LLAMA, XLA),
}
TINY = {'model.layers': 2, 'model.width': 64, 'model.heads': 4, 'model.feed_forward_width': 96}
TINY |= {'training.segment_length': 32, 'model.vocabulary_chunk': None}
TINY_NGRAMS = {
  'model.ngram.vocabulary_size': 4096,
  'model.ngram.clusters': 16,
  'model.ngram.dim': 8,
}
TINY_ENGRAM = {'model.ngram_memories.0.layers': '(1,)', 'model.ngram_memories.0.rows': '(100,)'}


def changes_of(case: Case, is_tiny: bool) -> tuple[dict[str, Any], int]:
  """Returns the changes of the config of a case, and its rows; --tiny has more changes."""
  changes = case.changes
  if not is_tiny:
    return changes, case.rows
  changes = changes | TINY
  if case.config == N_GRAMMER:
    changes |= TINY_NGRAMS
  if 'model.ngram_memories.0.preset' in changes:
    changes |= TINY_ENGRAM
  if case.config == XL:
    changes |= {'model.memory.length': 32}
  if 'model.attention.window' in changes:
    changes |= {'model.attention.window': 8}
  return changes, 2


def resolve(name: str, is_tiny: bool) -> tuple[Any, int]:
  """Returns the config of a case, and its rows on all devices."""
  import jax

  from ngrammer_jax import command_line

  case = CASES[name]
  changes, rows = changes_of(case, is_tiny)
  rows *= jax.device_count()
  changes = changes | {'training.batch_size': rows, 'training.segments_per_call': 1}
  config = command_line.resolve(case.config, [(key, str(value)) for key, value in changes.items()])
  return config, rows
