"""The record of a run: metrics.jsonl, TensorBoard, and lines on the console."""

from collections.abc import Iterator
import json
import logging
import pathlib
from typing import Any

import tensorboardX

from ngrammer_jax import files, hosts, progress


class Writer:
  """Writes scalars by step.

  `metrics.jsonl` in the workdir is the record; TensorBoard shows the same numbers. After a
  resume both go on from the restored step, so that no step appears twice. Of several processes
  the first one writes.
  """

  def __init__(self, workdir: pathlib.Path, restored_step: int):
    if not hosts.first():
      return
    self._growing = files.Growing(workdir, 'metrics.jsonl')
    folder = self._growing.folder
    self._path = folder / 'metrics.jsonl'
    with files.full_disk(self._full):
      _cut(folder, restored_step)
      self._file = self._path.open('a', encoding='utf-8')
      self._board = tensorboardX.SummaryWriter(
        str(folder / 'tensorboard'), purge_step=restored_step + 1
      )
    self.put()

  def scalars(self, step: int, values: dict[str, float]) -> None:
    """Records the values of a step. Raises BadInput where the disk is full."""
    if not hosts.first():
      return
    with files.full_disk(self._full):
      self._file.write(json.dumps({'step': step, **values}) + '\n')
      self._file.flush()
      for name, value in values.items():
        self._board.add_scalar(name, value, step)
      self._board.flush()  # a killed run loses no point

  def put(self) -> None:
    """Has an object store hold all that was recorded; a disk does."""
    if hosts.first():
      self._growing.put()

  def close(self) -> None:
    if not hosts.first():
      return
    try:
      self._file.close()
      self._board.close()
    except OSError as error:  # no reason to end otherwise than the run did
      logging.warning('%s cannot be closed: %s', self._path, error.strerror)
    self._growing.close()

  def _full(self) -> str:
    return (
      f'{self._path} cannot be written: No space left on device. Free some space, then the same '
      f'command goes on from the last checkpoint'
    )


def value_of(workdir: pathlib.Path, step: int, name: str) -> float | None:
  """A value of a step that is on record, None where it is not."""
  values = [r[name] for _, r in lines(workdir) if r.get('step') == step and name in r]
  return values[-1] if values else None


def lines(workdir: pathlib.Path) -> Iterator[tuple[str, dict[str, float]]]:
  """Every line of metrics.jsonl and its record, empty where the line is not a whole one."""
  path = workdir / 'metrics.jsonl'
  for line in path.read_text(encoding='utf-8').splitlines(keepends=True) if path.exists() else ():
    try:
      yield line, json.loads(line) if line.endswith('\n') else {}
    except json.JSONDecodeError:
      yield line, {}


def _cut(workdir: pathlib.Path, step: int) -> None:
  """Drops the lines after a step, and a last line that was never finished."""
  path, kept = workdir / 'metrics.jsonl', []
  for line, record in lines(workdir):
    if 'step' not in record:
      logging.warning('%s: dropping a line that is not a record: %.40s', path, line)
    elif record['step'] <= step:
      kept.append(line)
  if path.exists():
    files.write(path, ''.join(kept))


def line(step: int, steps: int, values: dict[str, Any], seconds_left: float) -> str:
  """A line for the console."""
  parts = [f'step {step:,}/{steps:,}', f'loss {values["loss"]:.4f}']
  if 'tokens_per_second' in values:
    parts.append(f'{values["tokens_per_second"]:,.0f} tokens/s')
  if 'mfu' in values:
    parts.append(f'MFU {values["mfu"]:.1%}')
  parts.append(f'{progress.duration(seconds_left)} left')
  return '  '.join(parts)
