"""Table of the checkpoints of a run; every file is read and verified."""

import pathlib

from ngrammer_jax import errors, tables
from ngrammer_jax.training import checkpoints, manifest, workdirs


def format_table(workdir: pathlib.Path, arrays_step: int | str | None = None) -> str:
  """Lists the checkpoints and whether they are good, then the arrays of one checkpoint.

  Args:
    workdir: run directory.
    arrays_step: the checkpoint whose arrays are listed: a step, `newest` or `best`. None: none.

  Raises:
    BadInput: not a run directory, no such checkpoint, or its manifest cannot be read.
  """
  workdirs.load_config(workdir)  # raises if this is not a run directory
  steps, best = checkpoints.steps(workdir), checkpoints.best_step(workdir)
  step_by_name = {'newest': max(steps, default=None), 'best': best}
  selected = step_by_name.get(arrays_step, arrays_step)
  if not steps or (arrays_step is not None and selected not in steps):
    suffix = f' of --step={arrays_step}' if steps else ''
    raise errors.BadInput(f'--workdir={workdir} has no checkpoint{suffix}')
  rows = [('step', 'MB', 'saved (UTC)', 'validation', 'checksum', 'state')]
  for step in steps:
    try:
      checkpoint = checkpoints.verify(workdir, step)
    except manifest.CorruptError as error:
      rows.append((f'{step:,}', '', '', '', '', f'damaged: {error}'))
      continue
    size, saved_at = f'{checkpoint.size / 1e6:,.1f}', checkpoint.saved_at.removesuffix('+00:00')
    loss = '' if checkpoint.validation is None else f'{checkpoint.validation:.4f}'
    state = 'good, best' if step == best else 'good'
    rows.append((f'{step:,}', size, saved_at, loss, checkpoint.checksum, state))
  lines = tables.align_columns(rows, '>><')
  if selected is not None:
    try:
      leaves = manifest.read(workdir / 'checkpoints' / str(selected)).leaves
    except manifest.CorruptError as error:
      raise errors.BadInput(f'--step={arrays_step}: checkpoint {selected}: {error}') from error
    lines += [f'{digest}  {name} {dtype}{shape}' for name, (dtype, shape, digest) in leaves.items()]
  return '\n'.join(lines)
