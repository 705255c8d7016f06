"""A tiny text, and configs of a tiny N-Grammer on it."""

import pathlib

import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax.config import data as data_config
from ngrammer_jax.config import evaluation as evaluation_config
from ngrammer_jax.config import model as model_config


def write_text(path: pathlib.Path) -> pathlib.Path:
  """The tiny text: 4,000 words of six."""
  words = np.random.RandomState(0).choice(['the', 'union', 'of', 'states', 'is\n', 'strong'], 4000)
  path.write_text(' '.join(words))
  return path


def config(
  text: pathlib.Path, model=(), optimizer=(), training=(), **sections
) -> experiment.Config:
  """A tiny N-Grammer on a text; keyword arguments replace keys, or whole sections."""
  ngram = model_config.NGramConfig(clusters=8, vocabulary_size=64, dim=4)
  sizes = {'layers': 2, 'width': 16, 'heads': 2, 'feed_forward_width': 32, 'ngram': ngram}
  every = {'log_every': 2, 'evaluate_every': 6, 'checkpoint_every': 4}
  steps = {'steps': 12, 'batch_size': 8, 'segment_length': 16, 'segments_per_call': 2}
  return experiment.Config(
    model=model_config.ModelConfig(**sizes | dict(model)),
    data=data_config.DataConfig(corpus='text', path=str(text), vocabulary='bytes'),
    optimizer=experiment.OptimizerConfig(**{'warmup_steps': 2} | dict(optimizer)),
    training=experiment.TrainingConfig(**steps | every | dict(training)),
    **{'evaluation': evaluation_config.EvaluationConfig(streams=4)} | sections,
  )
