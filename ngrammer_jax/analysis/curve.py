"""Loss curves of runs."""

import pathlib
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.analysis import figures
from ngrammer_jax.checkpoints import workdirs
from ngrammer_jax.system import files
from ngrammer_jax.training.records import writers


def read_metrics(workdir: pathlib.Path) -> list[dict[str, float]]:
  """Reads metrics.jsonl. Raises BadInput if it is missing or damaged, or has no logged step."""
  files.check_reachable(workdir)
  if not (workdir / 'metrics.jsonl').exists():
    raise errors.BadInput(
      f'--workdir={workdir} has no metrics.jsonl: not a run directory, or training has not started'
    )
  with files.translate_damage(workdir / 'metrics.jsonl', workdirs.REMEDY):
    lines = list(writers.read_lines(workdir))
  records = []
  for number, (line, record) in enumerate(lines, 1):
    if record:
      records.append(record)
    elif line.endswith(b'\n') or not records:  # else the last line is being written
      raise errors.BadInput(
        f'--workdir={workdir} has a damaged metrics.jsonl, line {number}: expected an object of '
        f'numbers with a step; delete this line'
      )
  if not any('loss' in r for r in records):
    raise errors.BadInput(f'--workdir={workdir} has logged no step yet')
  return records


def plot(workdirs: list[pathlib.Path], axes: Any, labels: list[str] | None = None) -> None:
  """Plots the training and validation loss of runs, in nats per token, by step.

  Args:
    workdirs: run directories.
    axes: axes to draw on.
    labels: names of the runs in the legend, see `figures.run_labels`.
  """
  for workdir, name in zip(workdirs, figures.run_labels(workdirs, labels), strict=True):
    records = read_metrics(workdir)
    train = [(r['step'], r['loss']) for r in records if 'loss' in r]
    key = 'validation/nll_nats_per_token'
    validation = [(r['step'], r[key]) for r in records if key in r]
    (line,) = axes.plot(
      *zip(*train, strict=True), linewidth=1, alpha=0.6, label=f'{name}, training'
    )
    if validation:
      axes.plot(
        *zip(*validation, strict=True),
        marker='o',
        markersize=4,
        color=line.get_color(),
        label=f'{name}, validation',
      )
  axes.set(xlabel='step', ylabel='loss (nats per token)')
  axes.grid(alpha=0.3)
  axes.legend()
