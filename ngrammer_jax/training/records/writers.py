"""The records of a run: metrics.jsonl, TensorBoard, wandb, and lines on the console."""

from collections.abc import Iterator
import contextlib
import json
import logging
import pathlib
from typing import Any

from ngrammer_jax import config as experiment
from ngrammer_jax.system import file_errors, files, hosts, progress, synced_folder
from ngrammer_jax.training.records import wandb_run

# The page `custom scalars` of TensorBoard shows both losses in one chart.
TENSORBOARD_LAYOUT = {'loss': {'loss': ['Multiline', ['train/loss', 'validation/loss']]}}


class MetricsWriter:
  """Writes scalars by step, in the primary process.

  `metrics.jsonl` in the workdir is the record; TensorBoard and wandb show the same numbers: the
  values of training with the prefix `train/`, and the nats per token of validation as
  `validation/loss`. On resume, metrics.jsonl and TensorBoard are cut to the restored step: no step
  appears twice. wandb cannot be cut, see `wandb_run`.

  Args:
    workdir: run directory.
    restored_step: step of the restored checkpoint.
    config: the experiment; `training.log_to` names TensorBoard and wandb. None: the defaults.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    restored_step: int,
    config: experiment.Config | None = None,
  ):
    if not hosts.is_primary():
      return
    self._synced = synced_folder.SyncedFolder(workdir, 'metrics.jsonl')
    folder = self._synced.folder
    self._path = folder / 'metrics.jsonl'
    with file_errors.translate_disk_full(self._disk_full_message):
      removed = _truncate(folder, restored_step)
      self._file = self._path.open('a', encoding='utf-8')
    config = config or experiment.Config()
    self._tensorboard = None
    if 'tensorboard' in config.training.log_to:
      self._tensorboard = self._open_tensorboard(folder, restored_step)
    self._wandb = None
    if 'wandb' in config.training.log_to:
      recorded = {(record['step'], _chart_name(name)) for record in removed for name in record}
      self._wandb = wandb_run.WandbRun(workdir, folder, config, recorded)
    self.sync()

  def _open_tensorboard(self, folder: pathlib.Path, restored_step: int) -> Any:
    """Returns the writer of TensorBoard; None: unavailable."""
    import tensorboardX  # heavy, as it imports the clients of object stores

    try:
      tensorboard = tensorboardX.SummaryWriter(
        str(folder / 'tensorboard'), purge_step=restored_step + 1
      )
      tensorboard.add_custom_scalars(TENSORBOARD_LAYOUT)
    except OSError as error:  # it needs /dev/shm, which containers may lack
      message = 'TensorBoard files are left out: %s; %s has all values'
      logging.warning(message, error.strerror or error, self._path)
      return None
    return tensorboard

  def scalars(self, step: int, values: dict[str, float]) -> None:
    """Writes the values of a step. Raises BadInput if the disk is full."""
    if not hosts.is_primary():
      return
    with file_errors.translate_disk_full(self._disk_full_message):
      self._file.write(json.dumps({'step': step, **values}) + '\n')
      self._file.flush()
      charts = {_chart_name(name): value for name, value in values.items()}
      if self._tensorboard is not None:
        for name, value in charts.items():
          self._tensorboard.add_scalar(name, value, step)
        self._tensorboard.flush()  # so that a killed run loses no point
    if self._wandb is not None:
      self._wandb.scalars(step, charts)

  def sync(self) -> None:
    """Uploads the records to a remote workdir."""
    if hosts.is_primary():
      self._synced.sync()

  def close(self) -> None:
    if not hosts.is_primary():
      return
    try:
      self._file.close()
      if self._tensorboard is not None:
        self._tensorboard.close()
      if self._wandb is not None:
        self._wandb.close()
    except OSError as error:  # this must not change the exit status
      logging.warning('%s cannot be closed: %s', self._path, error.strerror)
    self._synced.close()

  def _disk_full_message(self) -> str:
    return (
      f'{self._path} cannot be written: No space left on device. Free some space, then rerun the '
      f'same command to resume from the last checkpoint'
    )


def read_lines(workdir: pathlib.Path) -> Iterator[tuple[bytes, dict[str, float]]]:
  """Yields each line of metrics.jsonl with its record; an invalid line has an empty record."""
  path = workdir / 'metrics.jsonl'
  if not path.exists():
    return
  for line in path.read_bytes().splitlines(keepends=True):
    record = None
    if line.endswith(b'\n'):
      with contextlib.suppress(*file_errors.DAMAGE_ERRORS):
        record = json.loads(line)
    if not _is_record(record):
      record = {}
    yield line, record


def _is_record(value: Any) -> bool:
  """Whether a JSON value is an object of numbers with a step."""
  if not isinstance(value, dict):
    return False
  is_object = all(isinstance(number, int | float) for number in value.values())
  return is_object and type(value.get('step')) is int


def _chart_name(name: str) -> str:
  """Returns the name of a value of metrics.jsonl in TensorBoard and wandb."""
  if name == 'validation/nll_nats_per_token':
    return 'validation/loss'
  if '/' in name:
    return name
  return f'train/{name}'


def _truncate(workdir: pathlib.Path, step: int) -> list[dict[str, float]]:
  """Drops the lines after a step, and invalid lines, such as one truncated by a kill.

  Returns the records of the dropped lines.
  """
  path = workdir / 'metrics.jsonl'
  lines = []
  removed = []
  for line, record in read_lines(workdir):
    if not record:
      text = line[:40].decode(errors='replace')
      logging.warning('%s: dropping a line that is not a record: %r', path, text)
    elif record['step'] <= step:
      lines.append(line)
    else:
      removed.append(record)
  if path.exists():
    files.write(path, b''.join(lines))
  return removed


def format_line(step: int, steps: int, values: dict[str, Any], seconds_left: float | None) -> str:
  """Formats the metrics of a step for the console. A time left of None is unknown."""
  parts = [f'step {step:,}/{steps:,}', f'loss {values["loss"]:.4f}']
  parts.append(f'{values["tokens_per_second"]:,.0f} tokens/s')
  if 'mfu' in values:
    parts.append(f'MFU {values["mfu"]:.1%}')
  if seconds_left is not None:
    parts.append(f'{progress.format_duration(seconds_left)} left')
  return '  '.join(parts)
