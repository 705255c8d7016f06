"""Looks into runs.

python -m ngrammer_jax.analyze curve --workdir=DIR [--workdir=DIR ...]
python -m ngrammer_jax.analyze checkpoint --workdir=DIR [--step=STEP]
python -m ngrammer_jax.analyze clusters --workdir=DIR [--split=SPLIT]
python -m ngrammer_jax.analyze spans --workdir=DIR [--split=SPLIT]
python -m ngrammer_jax.analyze attention --workdir=DIR [--split=SPLIT]
python -m ngrammer_jax.analyze cloze --workdir=DIR --workdir=DIR [--results=cloze_test]
"""

import argparse
import json

from ngrammer_jax import files, flags


def main(argv: list[str]) -> int:
  """Dispatches to one analysis."""
  parser = argparse.ArgumentParser(
    prog='python -m ngrammer_jax.analyze',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  analyses = parser.add_subparsers(dest='analysis', required=True)
  curve = analyses.add_parser('curve', help='training and validation loss by step, as a figure')
  curve.add_argument('--workdir', type=files.path, action='append', required=True)
  checkpoint = analyses.add_parser('checkpoint', help='the checkpoints, and which are good')
  checkpoint.add_argument('--workdir', type=files.path, required=True)
  checkpoint.add_argument('--step', help='list the arrays of this one: a step, newest or best')
  clusters = analyses.add_parser(
    'clusters', help='which tokens share a cluster, which n-grams a row'
  )
  spans = analyses.add_parser('spans', help='how far heads look, and what persistent vectors take')
  attention = analyses.add_parser('attention', help='how much attention goes how far back')
  read = 'that is looked at'
  for analysis, what in ((clusters, 'whose n-grams are hashed'), (spans, read), (attention, read)):
    analysis.add_argument('--workdir', type=files.path, required=True)
    analysis.add_argument('--step', default='newest', help='a checkpoint: a step, newest or best')
    analysis.add_argument('--split', default='validation', help=f'of the text {what}')
  for analysis in (curve, clusters, spans, attention):
    analysis.add_argument(
      '--figure', type=files.path, help='a .png or .svg; default: in the first workdir'
    )
  cloze = analyses.add_parser('cloze', help='two runs on the same questions, compared in pairs')
  cloze.add_argument('--workdir', type=files.path, action='append', required=True)
  cloze.add_argument(
    '--results', default='cloze_test', help='what evaluate --cloze has written, without .jsonl'
  )
  options = parser.parse_args(argv)
  run = {'curve': _curve, 'checkpoint': _checkpoint, 'clusters': _clusters, 'spans': _spans}
  run |= {'attention': _attention, 'cloze': _cloze}
  run[options.analysis](options)
  return 0


def _curve(options: argparse.Namespace) -> None:
  from ngrammer_jax.analysis import curve, figures

  figure = options.figure or options.workdir[0] / 'curve.png'
  with figures.saved_figure(figure) as axes:
    curve.plot(options.workdir, axes)
  print(f'wrote {figure}')


def _checkpoint(options: argparse.Namespace) -> None:
  from ngrammer_jax.analysis import checkpoints

  print(checkpoints.format_table(options.workdir, options.step and flags.step(options.step)))


def _clusters(options: argparse.Namespace) -> None:
  from ngrammer_jax.analysis import clusters

  _analyze_run(options, clusters, panels=3, width=13)


def _spans(options: argparse.Namespace) -> None:
  from ngrammer_jax.analysis import spans

  _analyze_run(options, spans, panels=2, width=11)


def _attention(options: argparse.Namespace) -> None:
  from ngrammer_jax.analysis import attention

  _analyze_run(options, attention)


def _cloze(options: argparse.Namespace) -> None:
  from ngrammer_jax.analysis import cloze

  print(cloze.format_table(cloze.compare(options.workdir, options.results)))
  print(
    f'first {options.workdir[0]}, second {options.workdir[1]}; p of the strict ones: McNemar, exact'
  )


def _analyze_run(options, analysis, **size) -> None:
  """Analyses a run: a table on the screen, JSON and a figure in the workdir."""
  from ngrammer_jax import runs
  from ngrammer_jax.analysis import figures

  figure = options.figure or options.workdir / f'{options.analysis}.png'
  run = runs.load_run(options.workdir, flags.step(options.step))
  run.split(options.split)  # a wrong name is found before anything is loaded
  with figures.saved_figure(figure, **size) as axes:
    result = analysis.analyze(run, options.split)
    analysis.plot(result, axes)
  path = options.workdir / f'{options.analysis}.json'
  files.write(path, json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + '\n')
  print(analysis.format_table(result))
  print(f'wrote {path} and {figure}')


if __name__ == '__main__':
  flags.run(main)
