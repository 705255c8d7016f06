"""Fine-tuning on SuperGLUE (Wang et al. 2019), as in Table 3 of the N-Grammer paper.

  pip install -e '.[tasks]'
  python -m ngrammer_jax.finetune --config=configs/superglue.py:rte --workdir=runs/rte \\
    --config.init_from=runs/quickstart --config.data.superglue_dir=/path/to/superglue

Variants: the tasks boolq, cb, copa, multirc, record, rte, wic, wsc (and wsc_simple, the format of
T5, whose results are not comparable with those of wsc); `mixture`, all eight jointly, in proportion
to their sizes; `all`, one after the other, with the average. The paper fine-tunes the checkpoint at
1M steps for 100,000 steps at a constant learning rate that it does not report. The learning rate
and batch size below are our own, for small models on one machine. The lengths are measured, see
docs/superglue.md: at most 5 % of the inputs of a task are truncated.
"""

from ngrammer_jax import config

# Tokens of a row: `training.segment_length`. Rows of short tasks hold several examples.
ROW_LENGTHS = {
  'boolq': 512,
  'cb': 384,
  'copa': 256,
  'multirc': 1024,
  'record': 768,
  'rte': 384,
  'wic': 256,
  'wsc': 256,
  'wsc_simple': 256,
  'mixture': 1024,
  'all': 1024,
}
VARIANTS = tuple(ROW_LENGTHS)
# Tokens of a row that are reserved for the target: `finetune.targets_length`. Labels are short.
FREE_TEXT = ('record', 'wsc_simple', 'mixture', 'all')


def get_config(variant: str = 'rte'):
  """Returns the config of one of VARIANTS."""
  config.check_variant(variant, VARIANTS)
  c = config.default()
  c.data.corpus = 'superglue'
  c.finetune = config.block('finetune', task=variant)
  c.finetune.targets_length = 32 if variant in FREE_TEXT else 16

  c.optimizer.schedule = 'constant'
  c.optimizer.learning_rate = 3e-4
  c.optimizer.warmup_steps = 20
  c.training.steps = 500
  c.training.batch_size = 16
  c.training.segment_length = ROW_LENGTHS[variant]
  c.training.evaluate_every = 50
  c.training.checkpoint_every = 50
  return c
