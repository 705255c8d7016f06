"""The record of a run: metrics.jsonl, TensorBoard, and lines on the console."""

import json
import logging
import pathlib
from typing import Any

import tensorboardX

from ngrammer_jax import files, progress


class Writer:
  """Writes scalars by step.

  `metrics.jsonl` in the workdir is the record; TensorBoard shows the same numbers. After a
  resume both go on from the restored step, so that no step appears twice.
  """

  def __init__(self, workdir: pathlib.Path, restored_step: int):
    path = workdir / 'metrics.jsonl'
    self._restored = _cut(path, restored_step)
    self._file = path.open('a', encoding='utf-8')
    self._board = tensorboardX.SummaryWriter(
      str(workdir / 'tensorboard'), purge_step=restored_step + 1
    )

  def scalars(self, step: int, values: dict[str, float]) -> None:
    """Records the values of a step."""
    self._file.write(json.dumps({'step': step, **values}) + '\n')
    self._file.flush()
    for name, value in values.items():
      self._board.add_scalar(name, value, step)
    self._board.flush()  # a killed run loses no point

  def has(self, step: int, name: str) -> bool:
    """Whether a value of a step was on record when this run began."""
    return any(r['step'] == step and name in r for r in self._restored)

  def close(self) -> None:
    self._file.close()
    self._board.close()


def _cut(path: pathlib.Path, step: int) -> list[dict[str, float]]:
  """Drops the lines after a step, and a last line that was never finished; returns the rest."""
  if not path.exists():
    return []
  kept, records = [], []
  for line in path.read_text(encoding='utf-8').splitlines(keepends=True):
    try:
      record = json.loads(line)
      if line.endswith('\n') and record['step'] <= step:
        kept.append(line)
        records.append(record)
    except (json.JSONDecodeError, KeyError):
      logging.warning('%s: dropping a line that is not a record: %.40s', path, line)
  files.write(path, ''.join(kept))
  return records


def line(step: int, steps: int, values: dict[str, Any], seconds_left: float) -> str:
  """A line for the console."""
  parts = [f'step {step:,}/{steps:,}', f'loss {values["loss"]:.4f}']
  if 'tokens_per_second' in values:
    parts.append(f'{values["tokens_per_second"]:,.0f} tokens/s')
  if 'mfu' in values:
    parts.append(f'MFU {values["mfu"]:.1%}')
  parts.append(f'{progress.duration(seconds_left)} left')
  return '  '.join(parts)
