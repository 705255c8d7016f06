"""Fine-tuning on SuperGLUE (Wang et al. 2019), as in Table 3 of the N-Grammer paper.

  python -m ngrammer_jax.finetune --config=configs/superglue.py:rte --workdir=runs/rte \\
    --config.init_from=runs/quickstart --config.data.superglue_dir=/path/to/superglue

Rows: the tasks boolq, cb, copa, multirc, record, rte, wic, wsc (and T5's wsc_simple, whose numbers
cannot be compared with those of wsc); `mixture`, all eight at once, in proportion to their
sizes; `all`, one after the other, and the average. The paper: the checkpoint at 1M steps, 100,000
steps at a constant rate that it does not tell. What is not in it is our own: the rate, batch and
length below, for small models on one machine.
"""

from ngrammer_jax import config, errors

ROWS = (
  *('boolq', 'cb', 'copa', 'multirc', 'record', 'rte', 'wic', 'wsc', 'wsc_simple'),
  *('mixture', 'all'),
)


def get_config(row: str = 'rte'):
  """One of ROWS."""
  if row not in ROWS:
    raise errors.BadInput(f'no row {row!r}; there are: {", ".join(ROWS)}')
  c = config.default()
  c.data.corpus = 'superglue'
  c.finetune = config.block('finetune', task=row)

  c.optimizer.schedule = 'constant'
  c.optimizer.learning_rate = 3e-4
  c.optimizer.warmup_steps = 20
  c.training.steps = 500
  c.training.batch_size = 16
  c.training.segment_length = 256
  c.training.evaluate_every = 50
  c.training.checkpoint_every = 50
  return c
