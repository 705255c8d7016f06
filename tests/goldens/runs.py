"""Four small runs, a config file for the commands: --config=tests/goldens/runs.py:ROW."""

import json
import pathlib

import numpy as np

from ngrammer_jax import config

ROWS = ('ngrammer', 'transformer_xl', 'span', 'key_value_predict')
STEPS, RESTORED = 12, 6


def write_text(path: pathlib.Path) -> None:
  """The text of all runs: words drawn by NumPy."""
  words = ['state', 'union', 'of', 'the', 'is', 'strong', 'memory', 'gram\n']
  path.write_text(' '.join(np.random.RandomState(7).choice(words, 3000)))


def get_config(row: str = 'ngrammer'):
  """A tiny model of the family, on `text.txt` in the working directory."""
  c = config.default()
  c.data.corpus, c.data.path, c.data.vocabulary = 'text', 'text.txt', 'bytes'
  c.training.update(steps=STEPS, batch_size=8, segment_length=16, segments_per_call=1, log_every=1)
  c.training.update(evaluate_every=0, checkpoint_every=RESTORED)
  c.optimizer.update(learning_rate=4e-3, warmup_steps=4)
  c.evaluation.update(streams=4, max_tokens=256)
  m = c.model
  if row == 'key_value_predict':
    m.width, m.tie_embeddings = 12, False
    m.recurrent = config.block('model.recurrent', hidden=24, readout=row, window=3)
    return c
  m.update(layers=2, width=16, heads=2, feed_forward_width=32)
  if row == 'ngrammer':
    m.ngram = config.block('model.ngram', clusters=8, vocabulary_size=64, dim=2, orders=(2, 3))
    m.dropout = 0.1
  elif row == 'transformer_xl':
    m.position, m.norm = 'relative', 'post_skip'
    m.memory = config.block('model.memory', length=16, same_length='memory')
  elif row == 'span':
    m.position = 'table'
    m.positional = config.block('model.positional', max_length=128)
    m.memory = config.block('model.memory', length=128, same_length='memory_alone')
    m.span = config.block('model.span', limit=128, ramp=4, penalty=1e-3, initial=0.1)
    m.persistent = config.block('model.persistent', vectors=4)
  else:
    raise ValueError(f'{row!r} is not one of {", ".join(ROWS)}')
  return c


def losses(workdir: pathlib.Path) -> dict:
  """Training losses after the restored step, by step, and the validation at the end."""
  records = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  validation = [r['validation/nll_nats_per_token'] for r in records if 'validation/tokens' in r]
  by_step = {str(r['step']): r['loss'] for r in records if 'loss' in r and r['step'] > RESTORED}
  return {'loss': by_step, 'validation': validation[-1]}
