"""Table of the checkpoints of a run; every file is read and verified."""

from collections.abc import Mapping
import hashlib
import itertools
import math
import pathlib
import re

import jax.numpy as jnp

from ngrammer_jax import errors
from ngrammer_jax.checkpoints import manifest, reader, workdirs
from ngrammer_jax.runs import model_source
from ngrammer_jax.system import text_tables


def format_table(
  workdir: pathlib.Path, arrays_step: int | str | None = None, prefix: str | None = None
) -> str:
  """Lists the checkpoints and their state, then the parts or arrays of one checkpoint.

  Args:
    workdir: run directory.
    arrays_step: the checkpoint to list parts of: a step, `newest` or `best`. None: no parts.
    prefix: list arrays with this name prefix instead of parts. None: parts.

  Raises:
    BadInput: not a run directory, no such checkpoint, no such array, or its manifest cannot be
      read.
  """
  if model_source.ModelSource.from_path(workdir).is_published:
    raise errors.BadInput(
      f'--workdir={workdir} is a published model without checkpoints: expected the workdir of '
      f'ngrammer_jax.train'
    )
  workdirs.load_config(workdir)  # raises if this is not a run directory
  steps = reader.steps(workdir)
  best = reader.best_step(workdir)
  step_by_name = {'newest': max(steps, default=None), 'best': best}
  selected = step_by_name.get(arrays_step, arrays_step)
  if not steps or (arrays_step is not None and selected not in steps):
    suffix = f' of --step={arrays_step}' if steps else ''
    raise errors.BadInput(f'--workdir={workdir} has no checkpoint{suffix}')
  rows = [('step', 'MB', 'saved (UTC)', 'validation', 'checksum', 'state')]
  for step in steps:
    try:
      checkpoint = reader.verify(workdir, step)
    except manifest.CorruptError as error:
      rows.append((f'{step:,}', '', '', '', '', f'damaged: {error}'))
      continue
    validation = ''
    if checkpoint.validation is not None:
      validation = f'{checkpoint.validation:.4f}'
    status = 'good'
    if step == best:
      status = 'good, best'
    rows.append(
      (
        f'{step:,}',
        f'{checkpoint.size / 1e6:,.1f}',
        checkpoint.saved_at.removesuffix('+00:00'),
        validation,
        checkpoint.checksum,
        status,
      )
    )
  lines = text_tables.align_columns(rows, '>><')
  if selected is not None:
    try:
      leaves = manifest.read(workdir / 'checkpoints' / str(selected)).leaves
    except manifest.CorruptError as error:
      raise errors.BadInput(f'--step={arrays_step}: checkpoint {selected}: {error}') from error
    if prefix is None:
      lines += _format_parts(leaves)
    else:
      lines += _format_arrays(leaves, prefix)
  return '\n'.join(lines)


Leaf = tuple[str, tuple[int, ...], str]  # dtype, shape and checksum of an array


def _format_parts(leaves: Mapping[str, Leaf]) -> list[str]:
  """Formats one row for each part of a train state, such as the blocks: `params/layer_*`."""
  rows = [('checksum', 'arrays', 'values', 'MB', 'part')]
  for part, names in itertools.groupby(leaves, _part):
    group = [leaves[name] for name in names]
    counts = [math.prod(shape) for _, shape, _ in group]
    size = sum(n * jnp.dtype(leaf[0]).itemsize for n, leaf in zip(counts, group, strict=True))
    digests = [digest for _, _, digest in group]
    if len(digests) == 1:
      checksum = digests[0]
    else:
      checksum = hashlib.sha256(''.join(digests).encode()).hexdigest()[:16]
    rows.append((checksum, f'{len(group):,}', f'{sum(counts):,}', f'{size / 1e6:,.1f}', part))
  return [*text_tables.align_columns(rows, '<>>><'), '--arrays=PREFIX lists single arrays']


def _part(name: str) -> str:
  """Returns the part of an array in the train state."""
  return re.sub(r'_\d+$', '_*', '/'.join(name.split('/')[:2]))


def _format_arrays(leaves: Mapping[str, Leaf], prefix: str) -> list[str]:
  """Formats one line for each array with a name prefix."""
  selected = {name: leaf for name, leaf in leaves.items() if name.startswith(prefix)}
  if not selected:
    parts = ', '.join(dict.fromkeys(map(_part, leaves)))
    raise errors.BadInput(f'--arrays={prefix}: no array begins so; parts: {parts}')
  return [f'{digest}  {name} {dtype}{shape}' for name, (dtype, shape, digest) in selected.items()]
