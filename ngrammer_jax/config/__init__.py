"""The config of an experiment as frozen dataclasses, one file per idea. Imports no JAX.

A config file builds a ConfigDict from `default()` and `block(...)`; `resolve` makes it a `Config`.
"""

from ngrammer_jax.config.attention import AttentionConfig
from ngrammer_jax.config.conversion import (
  block,
  check_variant,
  default,
  describe,
  load,
  resolve,
  save,
)
from ngrammer_jax.config.data import DataConfig
from ngrammer_jax.config.evaluation import EvaluationConfig, EvaluationMemory
from ngrammer_jax.config.experiment import Config
from ngrammer_jax.config.fields import differences
from ngrammer_jax.config.finetune import FinetuneConfig
from ngrammer_jax.config.initial import InitialConfig
from ngrammer_jax.config.mesh import MeshConfig
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.config.ngram.ngrammer import NGramConfig
from ngrammer_jax.config.optimizer import AdamConfig, DropConfig, OptimizerConfig, TableConfig
from ngrammer_jax.config.persistent import PersistentConfig
from ngrammer_jax.config.positions import PositionalConfig
from ngrammer_jax.config.recurrent import RecurrentConfig
from ngrammer_jax.config.segment_memory import MemoryConfig
from ngrammer_jax.config.softmax import AdaptiveSoftmaxConfig
from ngrammer_jax.config.span import SpanConfig
from ngrammer_jax.config.training import AccumulationConfig, TrainingConfig

__all__ = [
  'AccumulationConfig',
  'AdamConfig',
  'AdaptiveSoftmaxConfig',
  'AttentionConfig',
  'Config',
  'DataConfig',
  'DropConfig',
  'EvaluationConfig',
  'EvaluationMemory',
  'FinetuneConfig',
  'InitialConfig',
  'MemoryConfig',
  'MeshConfig',
  'ModelConfig',
  'NGramConfig',
  'NGramMemoryConfig',
  'OptimizerConfig',
  'PersistentConfig',
  'PositionalConfig',
  'RecurrentConfig',
  'SpanConfig',
  'TableConfig',
  'TrainingConfig',
  'block',
  'check_variant',
  'default',
  'describe',
  'differences',
  'load',
  'resolve',
  'save',
]
