"""The pretrained model of the State of the Union addresses, and its baseline.

  python -m ngrammer_jax.train --config=studies/state_of_the_union.py:engram --workdir=runs/engram

`engram` and `wide` have equal parameters. They come from configs/ngram_memories.py, with 2,048
pieces and ten times the steps.
"""

from configs import ngram_memories
from ngrammer_jax import config

LEARNING_RATE = 4e-3  # that of the quickstart
# Learning rates of the tables that are tried; None: there are no tables.
TABLE_LEARNING_RATES = {'wide': (None,), 'engram': (1e-2, 3e-2, 1e-1)}
TABLE_LEARNING_RATE = 3e-2  # the best of them
METHODS = tuple(TABLE_LEARNING_RATES)


def get_config(method: str = 'engram'):
  """Returns the config of one of METHODS."""
  config.check_variant(method, METHODS)
  c = ngram_memories.get_config(f'quickstart_{method}')
  if method == 'engram':
    c.optimizer.table.learning_rate = TABLE_LEARNING_RATE
  c.data.vocabulary_size = 2048
  c.training.steps = 3000
  c.training.log_every = 50
  c.training.evaluate_every = c.training.checkpoint_every = 500
  c.training.keep_checkpoints = 1
  return c
