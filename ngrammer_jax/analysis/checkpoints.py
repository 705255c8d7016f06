"""The checkpoints of a run, every byte of them read."""

import pathlib

from ngrammer_jax import errors
from ngrammer_jax.training import checkpoints, manifest, workdirs


def table(workdir: pathlib.Path, arrays_of: int | str | None = None) -> str:
  """Which checkpoints there are and which are good; then the arrays of one of them.

  Args:
    workdir: of the run.
    arrays_of: a step, `newest` or `best`. None: no arrays.
  """
  workdirs.load_config(workdir)  # or it is no run
  steps, best = checkpoints.steps(workdir), checkpoints.best_step(workdir)
  named = {'newest': max(steps, default=None), 'best': best}
  chosen = named.get(arrays_of, arrays_of)
  if not steps or (arrays_of is not None and chosen not in steps):
    of = '' if not steps else f' of --step={arrays_of}'
    raise errors.BadInput(f'--workdir={workdir} has no checkpoint{of}')
  lines = [f'{"step":>9}{"MB":>10}  {"saved (UTC)":<21}{"validation":<12}{"checksum":<18}state']
  for step in steps:
    try:
      known = checkpoints.verify(workdir, step)
    except manifest.Damaged as error:
      lines.append(f'{step:>9,}{"":>10}  {"":<21}{"":<12}{"":<18}damaged: {error}')
      continue
    loss = '' if known.validation is None else f'{known.validation:.4f}'
    state = 'good, best' if step == best else 'good'
    saved = known.saved_at.removesuffix('+00:00')
    size = f'{known.size / 1e6:,.1f}'
    lines.append(f'{step:>9,}{size:>10}  {saved:<21}{loss:<12}{known.checksum:<18}{state}')
  if chosen is not None:
    try:
      leaves = manifest.read(workdir / 'checkpoints' / str(chosen)).leaves
    except manifest.Damaged as error:
      raise errors.BadInput(f'--step={arrays_of}: checkpoint {chosen}: {error}') from error
    lines += [f'{sum_}  {name} {dtype}{shape}' for name, (dtype, shape, sum_) in leaves.items()]
  return '\n'.join(lines)
