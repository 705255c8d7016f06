"""The config of an experiment as frozen dataclasses, one file per idea. Imports no JAX.

A config file builds a ConfigDict from `default()` and `block(...)`; `resolve` makes it a `Config`.

Names are imported on first use: a layer of `ngrammer_jax.layers` needs few of these files.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from ngrammer_jax.config.attention import AttentionConfig as AttentionConfig
  from ngrammer_jax.config.conversion import block as block
  from ngrammer_jax.config.conversion import check_variant as check_variant
  from ngrammer_jax.config.conversion import default as default
  from ngrammer_jax.config.conversion import describe as describe
  from ngrammer_jax.config.conversion import resolve as resolve
  from ngrammer_jax.config.conversion import save as save
  from ngrammer_jax.config.copy_memory import CopyMemoryConfig as CopyMemoryConfig
  from ngrammer_jax.config.data import DataConfig as DataConfig
  from ngrammer_jax.config.evaluation import EvaluationConfig as EvaluationConfig
  from ngrammer_jax.config.evaluation import EvaluationMemory as EvaluationMemory
  from ngrammer_jax.config.experiment import Config as Config
  from ngrammer_jax.config.finetune import FinetuneConfig as FinetuneConfig
  from ngrammer_jax.config.initial import InitialConfig as InitialConfig
  from ngrammer_jax.config.mesh import MeshConfig as MeshConfig
  from ngrammer_jax.config.model import ModelConfig as ModelConfig
  from ngrammer_jax.config.ngram.memory import NGramMemoryConfig as NGramMemoryConfig
  from ngrammer_jax.config.ngram.ngrammer import NGramConfig as NGramConfig
  from ngrammer_jax.config.ngram.value_gate import ValueGateConfig as ValueGateConfig
  from ngrammer_jax.config.optimizer import AdamConfig as AdamConfig
  from ngrammer_jax.config.optimizer import DropConfig as DropConfig
  from ngrammer_jax.config.optimizer import MuonConfig as MuonConfig
  from ngrammer_jax.config.optimizer import OptimizerConfig as OptimizerConfig
  from ngrammer_jax.config.optimizer import TableConfig as TableConfig
  from ngrammer_jax.config.persistent import PersistentConfig as PersistentConfig
  from ngrammer_jax.config.positions import PositionalConfig as PositionalConfig
  from ngrammer_jax.config.product_memory import ProductMemoryConfig as ProductMemoryConfig
  from ngrammer_jax.config.recurrent import RecurrentConfig as RecurrentConfig
  from ngrammer_jax.config.resume import differences as differences
  from ngrammer_jax.config.resume import with_kept_values as with_kept_values
  from ngrammer_jax.config.segment_memory import MemoryConfig as MemoryConfig
  from ngrammer_jax.config.softmax import AdaptiveSoftmaxConfig as AdaptiveSoftmaxConfig
  from ngrammer_jax.config.sources import load as load
  from ngrammer_jax.config.span import SpanConfig as SpanConfig
  from ngrammer_jax.config.token_shift import TokenShiftConfig as TokenShiftConfig
  from ngrammer_jax.config.training import AccumulationConfig as AccumulationConfig
  from ngrammer_jax.config.training import TrainingConfig as TrainingConfig

_NAMES = {  # the public names of each file
  'attention': ('AttentionConfig',),
  'conversion': ('block', 'check_variant', 'default', 'describe', 'resolve', 'save'),
  'copy_memory': ('CopyMemoryConfig',),
  'data': ('DataConfig',),
  'evaluation': ('EvaluationConfig', 'EvaluationMemory'),
  'experiment': ('Config',),
  'finetune': ('FinetuneConfig',),
  'initial': ('InitialConfig',),
  'mesh': ('MeshConfig',),
  'model': ('ModelConfig',),
  'ngram.memory': ('NGramMemoryConfig',),
  'ngram.ngrammer': ('NGramConfig',),
  'ngram.value_gate': ('ValueGateConfig',),
  'optimizer': ('AdamConfig', 'DropConfig', 'MuonConfig', 'OptimizerConfig', 'TableConfig'),
  'persistent': ('PersistentConfig',),
  'positions': ('PositionalConfig',),
  'product_memory': ('ProductMemoryConfig',),
  'recurrent': ('RecurrentConfig',),
  'resume': ('differences', 'with_kept_values'),
  'segment_memory': ('MemoryConfig',),
  'softmax': ('AdaptiveSoftmaxConfig',),
  'sources': ('load',),
  'span': ('SpanConfig',),
  'token_shift': ('TokenShiftConfig',),
  'training': ('AccumulationConfig', 'TrainingConfig'),
}


def __getattr__(name: str) -> Any:
  """Imports a public name from its file."""
  for file, names in _NAMES.items():
    if name in names:
      value = getattr(importlib.import_module(f'{__name__}.{file}'), name)
      globals()[name] = value
      return value
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
