"""Looks into runs.

python -m ngrammer_jax.analyze curve --workdir=DIR [--workdir=DIR ...]
python -m ngrammer_jax.analyze checkpoint --workdir=DIR [--step=STEP]
"""

import argparse
import pathlib

from ngrammer_jax import errors, flags


def main(argv: list[str]) -> int:
  """Dispatches to one analysis."""
  parser = argparse.ArgumentParser(
    prog='python -m ngrammer_jax.analyze',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  analyses = parser.add_subparsers(dest='analysis', required=True)
  curve = analyses.add_parser('curve', help='training and validation loss by step, as a figure')
  curve.add_argument('--workdir', type=pathlib.Path, action='append', required=True)
  curve.add_argument(
    '--figure', type=pathlib.Path, help='a .png or .svg; default: in the first workdir'
  )
  checkpoint = analyses.add_parser('checkpoint', help='the checkpoints, and which are good')
  checkpoint.add_argument('--workdir', type=pathlib.Path, required=True)
  checkpoint.add_argument('--step', type=int, help='list the arrays of this one')
  options = parser.parse_args(argv)
  if options.analysis == 'checkpoint':
    list_checkpoints(options.workdir, options.step)
    return 0
  figure = options.figure or options.workdir[0] / 'curve.png'
  draw_curve(options.workdir, figure)
  print(f'written to {figure}')
  return 0


def read_metrics(workdir: pathlib.Path) -> list[dict[str, float]]:
  """The records of metrics.jsonl. Raises BadInput where there are none."""
  from ngrammer_jax.training import writers

  if not (workdir / 'metrics.jsonl').exists():
    raise errors.BadInput(f'--workdir={workdir} holds no metrics.jsonl: not a run, or not begun')
  records = [record for _, record in writers.lines(workdir)]
  if not any('loss' in r for r in records):
    raise errors.BadInput(f'--workdir={workdir} has logged no step yet')
  return records


def list_checkpoints(workdir: pathlib.Path, arrays_of: int | None = None) -> None:
  """Reads every checkpoint, all of it, and prints a table; then the arrays of one step."""
  from ngrammer_jax.training import checkpoints, manifest, workdirs

  workdirs.load_config(workdir)  # or it is no run
  steps = checkpoints.steps(workdir)
  if not steps or (arrays_of is not None and arrays_of not in steps):
    raise errors.BadInput(
      f'--workdir={workdir} has no checkpoint{"" if not steps else f" of --step={arrays_of}"}'
    )
  best = checkpoints.best_step(workdir)
  print(f'{"step":>9}{"MB":>10}  {"saved (UTC)":<21}{"validation":<12}{"checksum":<18}state')
  for step in steps:
    try:
      known = checkpoints.verify(workdir, step)
    except manifest.Damaged as error:
      print(f'{step:>9,}{"":>10}  {"":<21}{"":<12}{"":<18}damaged: {error}')
      continue
    loss = '' if known.validation is None else f'{known.validation:.4f}'
    state = 'good, best' if step == best else 'good'
    saved = known.saved_at.removesuffix('+00:00')
    size = f'{known.size / 1e6:,.1f}'
    print(f'{step:>9,}{size:>10}  {saved:<21}{loss:<12}{known.checksum:<18}{state}')
  if arrays_of is not None:
    try:
      leaves = manifest.read(workdir / 'checkpoints' / str(arrays_of)).leaves
    except manifest.Damaged as error:
      raise errors.BadInput(f'--step={arrays_of}: checkpoint {arrays_of}: {error}') from error
    for name, (dtype, shape, checksum) in leaves.items():
      print(f'{checksum}  {name} {dtype}{shape}')


def draw_curve(workdirs: list[pathlib.Path], figure: pathlib.Path) -> None:
  """Draws the loss of some runs, in nats per token, by step."""
  try:
    import matplotlib
  except ImportError as error:
    raise errors.BadInput('figures need matplotlib: pip install matplotlib') from error
  matplotlib.use('agg')
  from matplotlib import pyplot

  canvas, axes = pyplot.subplots(figsize=(6.4, 3.6), layout='constrained')
  for workdir in workdirs:
    records = read_metrics(workdir)
    train = [(r['step'], r['loss']) for r in records if 'loss' in r]
    key = 'validation/nll_nats_per_token'
    validation = [(r['step'], r[key]) for r in records if key in r]
    (line,) = axes.plot(
      *zip(*train, strict=True), linewidth=1, alpha=0.6, label=f'{workdir.name}, training'
    )
    if validation:
      axes.plot(
        *zip(*validation, strict=True),
        marker='o',
        markersize=4,
        color=line.get_color(),
        label=f'{workdir.name}, validation',
      )
  axes.set_xlabel('step')
  axes.set_ylabel('loss (nats per token)')
  axes.grid(alpha=0.3)
  axes.legend()
  try:
    figure.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(figure, dpi=150)
  except (OSError, ValueError) as error:
    raise errors.BadInput(f'--figure={figure} cannot be written: {error}') from error
  pyplot.close(canvas)


if __name__ == '__main__':
  flags.run(main)
