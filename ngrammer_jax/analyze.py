"""Analyzes runs.

python -m ngrammer_jax.analyze report --workdir=DIR [--workdir=DIR ...] [--output=FILE]
python -m ngrammer_jax.analyze compare --workdir=DIR [...] --baseline=DIR [...] [--output=FILE]
python -m ngrammer_jax.analyze gates --workdir=DIR [--split=SPLIT] [--text=TEXT]

For one run, --pretrained=NAME instead of --workdir analyzes a model of the package.
python -m ngrammer_jax.analyze ANALYSIS --help lists all flags of an analysis.
"""

import argparse
import contextlib
import dataclasses
import importlib
import json
import pathlib
import typing
from typing import Any

from ngrammer_jax import errors, flags
from ngrammer_jax.runs import model_source
from ngrammer_jax.system import result_files, storage

if typing.TYPE_CHECKING:
  from ngrammer_jax import runs

HELP = {
  'report': 'one web page of runs side by side: curves, metrics, configs, analyses, samples',
  'compare': 'differences of losses from baselines, with errors, at the same tokens',
  'checkpoint': 'all checkpoints, verified by checksum',
  'clusters': 'coherence and usage of the token clusters',
  'ngrams': 'visits of table rows and hash collisions of all n-gram memories',
  'gates': 'gates of n-gram memories over a text, as a web page and a figure',
  'retention': 'loss without the n-gram memories, and with exchanged rows, by n-gram frequency',
  'copies': 'share of tokens with a copy in the document, and accuracy of the copies',
  'product_keys': 'usage of the values of product keys: share and evenness',
  'spans': 'attention spans by layer and head, attention on persistent vectors',
  'attention': 'mean attention weight by distance',
  'recl': 'relative effective context length of runs: the longest useful context',
  'cloze': 'paired comparison of two runs on the same cloze questions',
}
OF_SEVERAL_RUNS = ('report', 'compare', 'recl', 'cloze')
PRINTED = ('compare', 'checkpoint', 'cloze')  # without a figure


def main(argv: list[str]) -> int:
  """Runs one analysis."""
  options = _make_parser().parse_args(argv)
  if options.analysis == 'report':
    flags.read_escapes(options, 'prompt')
    options.output = options.output or _default_path(options, 'output', 'report.html')
    _report(options)
  elif options.analysis == 'compare':
    _compare(options)
  elif options.analysis == 'checkpoint':
    _checkpoint(options)
  elif options.analysis == 'cloze':
    _cloze(options)
  else:
    if options.analysis == 'gates':
      flags.read_escapes(options, 'text')
    options.figure = options.figure or _default_path(options, 'figure', _figure_name(options))
    _draw(options)
  return 0


def _figure_name(options: argparse.Namespace) -> str:
  """Returns the name of a figure, with the split and the step if they are not the default."""
  names = [options.analysis]
  if options.split != 'validation':
    names.append(options.split)
  if options.step != 'newest':
    names.append(options.step)
  return f'{"_".join(names)}.png'.replace('/', '_')


def _make_parser() -> argparse.ArgumentParser:
  parser = flags.make_parser('analyze', __doc__)
  parser.usage = '%(prog)s ANALYSIS [flags]'
  analyses = parser.add_subparsers(
    dest='analysis', required=True, metavar='ANALYSIS', prog=parser.prog
  )
  parsers = {}
  for name, text in HELP.items():
    analysis = analyses.add_parser(
      name, help=text, usage=flags.USAGE, formatter_class=flags.HelpFormatter
    )
    parsers[name] = analysis
    if name in OF_SEVERAL_RUNS:
      analysis.add_argument(
        '--workdir',
        type=storage.path,
        action='append',
        required=True,
        metavar='DIR',
        help='run directory; may be repeated',
      )
    elif name == 'checkpoint':
      analysis.add_argument('--workdir', type=storage.path, required=True, help='run directory')
    else:
      flags.add_source(analysis)
    if name not in PRINTED:
      text = 'name of the run in the figure, one for each --workdir; default: its folder'
      analysis.add_argument('--label', action='append', help=text)
    if name not in ('report', *PRINTED):
      text = 'a .png or .svg file, other results beside it; default: in the first workdir'
      analysis.add_argument('--figure', type=storage.path, help=text)
    if name not in ('checkpoint', 'cloze'):
      analysis.add_argument('--step', default='newest', help="step number, 'newest' or 'best'")
      analysis.add_argument('--split', default='validation', help='split of the corpus to read')

  def add(name: str, flag: str, text: str, **rules: Any) -> None:
    """Adds a flag to the parser of an analysis."""
    parsers[name].add_argument(flag, help=text, **rules)

  add('report', '--output', 'page; default: report.html in the workdir', type=storage.path)
  add('report', '--figure', 'image of the curves: the mean of each --label', type=storage.path)
  add('report', '--prompt', "prompt of the samples; '': a new document", default='')
  add('report', '--samples', 'number of samples of each run', type=int, default=3)
  add('report', '--tokens', 'maximum length of a sample', type=int, default=100)
  parsers['compare'].add_argument(
    '--baseline',
    type=storage.path,
    action='append',
    required=True,
    metavar='DIR',
    help='run or model to compare with; may be repeated',
  )
  text = 'label of each --workdir, then of each --baseline; equal labels: mean over seeds; '
  add('compare', '--label', f'{text}default: names without the seed', action='append')
  add('compare', '--max_tokens', 'number of tokens to score', type=int, default=2**16)
  add('compare', '--output', 'JSON file for the result', type=storage.path)
  add('gates', '--text', 'text for the gates; default: the first tokens of the split')
  add('clusters', '--memory', 'path of its module; default: the first with clusters of tokens')
  add('checkpoint', '--step', "also list its parts: a step number, 'newest' or 'best'")
  add(
    'checkpoint',
    '--arrays',
    'list arrays of --step by the beginning of their names',
    metavar='PREFIX',
  )
  add('recl', '--context_step', 'growth of the context in tokens', type=int, default=100)
  add('recl', '--max_context', 'longest context, in tokens', type=int, default=1000)
  add('cloze', '--results', 'file of evaluate --cloze, without .jsonl', default='cloze_test')
  flags.add_literal(parsers['report'])
  flags.add_literal(parsers['gates'])
  return parser


def _open(options: argparse.Namespace) -> tuple[list['runs.Run'], list[str]]:
  """Returns the runs, baselines last, and their names.

  A published model as baseline has no text: it is scored like the first run.
  """
  from ngrammer_jax import runs
  from ngrammer_jax.analysis import figures

  step = model_source.read_step(options.step)
  if getattr(options, 'pretrained', None) is not None:
    names = options.label or [options.pretrained]
    return [dataclasses.replace(runs.load_pretrained(options.pretrained), step=step)], names
  workdirs = options.workdir
  if not isinstance(workdirs, list):
    workdirs = [workdirs]
  baselines = getattr(options, 'baseline', [])
  labels = getattr(options, 'label', None)
  if baselines:  # several runs have one label
    figures.run_labels(workdirs + baselines, labels)
    labels = None
  names = figures.run_labels(workdirs + baselines, labels)
  all_runs = [runs.load_run(workdir, step) for workdir in workdirs]
  for baseline in baselines:
    run = model_source.resolve(str(baseline), '--baseline').open(step)
    if run.published is not None:
      config = dataclasses.replace(all_runs[0].config, model=run.config.model)
      run = dataclasses.replace(run, config=config)
    all_runs.append(run)
  return all_runs, names


def _compare(options: argparse.Namespace) -> None:
  from ngrammer_jax.analysis import compare

  if options.output:
    result_files.check_output_file('--output', options.output, 'compare.json')
  all_runs, names = _open(options)
  count = len(options.workdir)
  result = compare.analyze(
    all_runs[:count], all_runs[count:], names, options.split, options.max_tokens, options.label
  )
  print(compare.format_table(result))
  if options.output:
    result_files.write_results({options.output: _format_json(result)})
    print(f'wrote {options.output}')


def _checkpoint(options: argparse.Namespace) -> None:
  from ngrammer_jax.analysis import checkpoints

  step = options.step
  if options.arrays is not None and step is None:
    step = 'newest'
  if step is not None:
    step = model_source.read_step(step)
  print(checkpoints.format_table(options.workdir, step, options.arrays))


def _cloze(options: argparse.Namespace) -> None:
  from ngrammer_jax.analysis import cloze

  print(cloze.format_table(cloze.compare(options.workdir, options.results)))
  first, second = options.workdir
  print(f"1st {first}, 2nd {second}; p: McNemar's exact test of the strict accuracies")


def _report(options: argparse.Namespace) -> None:
  from ngrammer_jax.analysis import figures, report, report_page

  result_files.check_output_file('--output', options.output, 'report.html')
  samples = report.Samples(options.prompt, options.samples, options.tokens)
  contents: dict[pathlib.Path, str | bytes] = {}
  with contextlib.ExitStack() as stack:
    if options.figure:
      figure = figures.drawn_figure(contents, options.figure, len(report_page.CURVES), 11.0)
      panels = stack.enter_context(figure)
    reports = report.collect(*_open(options), options.split, samples)
    contents[options.output] = report_page.format_page(reports)
    if options.figure:
      report_page.plot_curves(reports, panels)
  _write(contents)


def _draw(options: argparse.Namespace) -> None:
  """Prints the tables of an analysis, and writes JSON and a figure; of gates also a web page."""
  from ngrammer_jax.analysis import elements, figures, report_page

  analysis = importlib.import_module(f'ngrammer_jax.analysis.{options.analysis}')
  all_runs, names = _open(options)
  figure = options.figure
  title = options.split
  if options.analysis == 'recl':
    arguments = all_runs, names, options.split, options.context_step, options.max_context
  else:
    # Before the corpus is read, and a wrong split before the checkpoint is.
    analysis.check_applicable(all_runs[0])
    all_runs[0].split(options.split)
    others = [getattr(options, name) for name in ('memory', 'text') if name in options]
    arguments = all_runs[0], options.split, *others
  contents: dict[pathlib.Path, str | bytes] = {}
  with figures.drawn_figure(contents, figure, *analysis.FIGURE_SIZE) as axes:
    result = analysis.analyze(*arguments)
    contents[figure.with_suffix('.json')] = _format_json(result)
    analysis.plot(result, axes)
    if 'step' in result:
      title = f'{names[0]}, step {result["step"]:,}, {options.split}'
    figures.set_title(axes, title)
    print(f'{title}\n{elements.format_tables(analysis.elements(result))}')
  if options.analysis == 'gates':
    contents[figure.with_suffix('.html')] = report_page.format_gates(result)
  _write(contents)


def _write(contents: dict[pathlib.Path, str | bytes]) -> None:
  result_files.write_results(contents)
  print(f'wrote {" and ".join(map(str, contents))}')


def _format_json(result: Any) -> str:
  return json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + '\n'


def _default_path(options: argparse.Namespace, flag: str, name: str) -> pathlib.Path:
  """Returns the default file of a flag without a value, in the first workdir."""
  workdir = options.workdir
  if options.analysis in OF_SEVERAL_RUNS:
    workdir = options.workdir[0]
  elif options.pretrained is not None:
    raise errors.BadInput(
      f'--pretrained={options.pretrained} has no run directory for the results: name their file '
      f'with --{flag}={name}'
    )
  if model_source.ModelSource.from_path(workdir).is_published:
    raise errors.BadInput(
      f'--workdir={workdir} is a published model, to which no files are added: name the file of '
      f'the results with --{flag}={name}'
    )
  return workdir / name


if __name__ == '__main__':
  flags.run(main)
