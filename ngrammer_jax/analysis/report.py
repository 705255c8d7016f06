"""A web page of runs side by side: curves, metrics, configs, samples, and the other analyses.

All numbers are those of metrics.jsonl, of the files of `evaluate`, and of the other analyses.
`report.html.j2` is the page. A section shows the runs to which it applies, and is left out if there
are none.
"""

from collections.abc import Callable, Sequence
import contextlib
import math
import pathlib
import statistics
from typing import Any, NamedTuple

from flax import traverse_util
import jinja2

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, runs
from ngrammer_jax.analysis import attention, clusters, figures, gates, ngrams, spans
from ngrammer_jax.analysis.parts import Part
from ngrammer_jax.checkpoints import workdirs
from ngrammer_jax.config import fields
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data import corpora
from ngrammer_jax.models import model_variables
from ngrammer_jax.system import file_errors, json_files
from ngrammer_jax.training import programs
from ngrammer_jax.training.records import writers

# The analyses on the page: modules with `analyze`, `parts`, `plot` and FIGURE_SIZE.
ANALYSES = dict(clusters=clusters, ngrams=ngrams, gates=gates, spans=spans, attention=attention)
MAX_DOTS = 40  # points of a curve, beyond which it is a line alone
CURVES = {'Validation loss': 'validation/nll_nats_per_token', 'Training loss': 'loss'}
# The metrics of a split: name on the page, format, and which value is the best.
SPLIT_METRICS = {
  'bits_per_byte': ('bits per byte', '.4f', min),
  'bits_per_character': ('bits per character', '.4f', min),
  'nll_nats_per_token': ('nats per token', '.4f', min),
  'perplexity': ('perplexity', ',.3f', min),
  'top1_accuracy': ('top-1 accuracy', '.2%', max),
}


class Samples(NamedTuple):
  """Samples of each run: `count` continuations of a prompt, of at most `tokens` tokens."""

  prompt: str = ''
  count: int = 3
  tokens: int = 100


class Metric(NamedTuple):
  """A number of a run.

  Attributes:
    text: what the page shows.
    value: its value.
    best: `min` or `max`, if one of several runs is the best.
    tokens: number of tokens that it was measured on.
  """

  text: str
  value: float
  best: Callable[..., float] | None = None
  tokens: int | None = None


class RunReport(NamedTuple):
  """What the page shows of a run.

  Attributes:
    name: name of the run.
    color: number of its color.
    config: its config.
    records: lines of metrics.jsonl.
    metrics: numbers by name.
    results: result of each of ANALYSES that applies.
    samples: prompts and continuations.
  """

  name: str
  color: int
  config: experiment.Config
  records: list[dict[str, float]]
  metrics: dict[str, Metric]
  results: dict[str, dict[str, Any]]
  samples: list[tuple[str, str]]


class Card(NamedTuple):
  """A card of a section: title, number of the color of its run, figures as SVG, and parts."""

  title: str
  color: int | None
  figures: Sequence[str]
  parts: Sequence[Part]


def collect(
  all_runs: Sequence[runs.Run], names: Sequence[str], split: str, samples: Samples
) -> list[RunReport]:
  """Analyzes the runs, each with the analyses that apply to it. Raises BadInput as they do."""
  for run in all_runs:
    if run.config.finetune is None:
      run.split(split)  # reports a wrong name before any checkpoint is loaded
  all_records = []
  for run in all_runs:
    has_metrics = not run.is_exported and run.published is None
    all_records.append(read_metrics(run.workdir) if has_metrics else [])
  # Before the analyses, which take longer: a prompt may not fit the vocabulary or the context.
  all_texts = [_generate(run, samples) for run in all_runs]
  reports = []
  for run, name, records, texts in zip(all_runs, names, all_records, all_texts, strict=True):
    metrics, results = _metrics(run, records), {}
    for analysis in ANALYSES if run.config.finetune is None else ():
      with contextlib.suppress(errors.NotApplicable):
        results[analysis] = ANALYSES[analysis].analyze(run, split)
    reports.append(RunReport(name, len(reports), run.config, records, metrics, results, texts))
  return reports


def read_metrics(workdir: pathlib.Path) -> list[dict[str, float]]:
  """Reads metrics.jsonl. Raises BadInput if it is missing or damaged, or has no logged step."""
  if not (workdir / 'metrics.jsonl').exists():
    raise errors.BadInput(f'--workdir={workdir} has no metrics.jsonl: training has not started')
  with file_errors.translate_damage(workdir / 'metrics.jsonl', workdirs.REMEDY):
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


def _generate(run, samples):
  """Returns prompts and continuations; none if the model cannot generate."""
  config = run.config
  can_generate = config.model.position not in model_config.SEGMENT_POSITIONS
  if config.finetune is not None or not can_generate or samples.count < 1:
    return []
  completions = run.generate([samples.prompt] * samples.count, samples.tokens)
  return [(completion.prompt, completion.text) for completion in completions]


def _metrics(run, records):
  """Returns the numbers of a run, up to the step of its checkpoint."""
  count = lambda value: Metric(f'{value:,.0f}', value)
  step = run.restored.step
  records = [record for record in records if record['step'] <= step]
  params = traverse_util.flatten_dict(run.restored.params)
  tables = sum(leaf.size for path, leaf in params.items() if path[-1] == 'table')
  metrics = {
    'step': count(step),
    'training tokens': count(step * run.config.training.tokens_per_step),
    'parameters': count(model_variables.count_elements(run.restored.params)),
    'of these in n-gram tables': count(tables),
  }
  train = [record for record in records if 'loss' in record]
  if train:
    loss = train[-1]['loss']
    metrics['training loss'] = Metric(f'{loss:.4f}', loss, min)
  validations = [record for record in records if 'validation/nll_nats_per_token' in record]
  if validations:
    newest = {key.removeprefix('validation/'): value for key, value in validations[-1].items()}
    metrics |= _split_metrics('validation in training', newest)
  for split in corpora.SPLITS:
    path = run.workdir / 'evaluation' / f'{split}.json'
    if path.exists() and run.config.finetune is None:
      with file_errors.translate_damage(path, 'evaluate it again'):
        result = json_files.read(path)
        if result['step'] <= step:
          metrics |= _split_metrics(f'{split}, evaluated', result)
  values_of = lambda key: [record[key] for record in records if key in record]
  flops = values_of('flops_per_token')  # of learned spans, which change it
  if run.config.model.span is None:
    flops = [programs.Programs(run.config, run.vocabulary_size, run.mesh).flops.forward()]
  rates = {'FLOPs per token': flops, 'tokens per second (median)': values_of('tokens_per_second')}
  return metrics | {name: count(statistics.median(rate)) for name, rate in rates.items() if rate}


def _split_metrics(name, result):
  """Returns the metrics of a split by name."""
  counts = {key: result[key] for key in ('step', 'tokens') if result.get(key) is not None}
  metrics = {f'{key} ({name})': Metric(f'{count:,}', count) for key, count in counts.items()}
  for key, (label, pattern, best) in SPLIT_METRICS.items():
    if (value := result.get(key)) is not None:
      # Bits per byte are those of a whole text, whatever its number of tokens.
      tokens = None if key == 'bits_per_byte' else result.get('tokens')
      metrics[f'{label} ({name})'] = Metric(format(value, pattern), value, best, tokens)
  return metrics


def format_page(reports: Sequence[RunReport]) -> str:
  """Formats the page of runs: headlines, links to the sections, and the sections."""
  names = ', '.join(report.name for report in reports)
  title = names if len(reports) <= 3 else f'{len(reports)} runs side by side'
  sections = {
    'curves': _curves(reports),
    'metrics': [_metrics_table(reports)],
    'configs': [_configs(reports)],
    'samples': _samples(reports),
  }
  sections |= {name: _analysis(reports, name) for name in ANALYSES}
  # The headline is a loss that all runs have.
  shared = [n for n in reports[0].metrics if all(n in report.metrics for report in reports)]
  labels = [label for label, _, best in SPLIT_METRICS.values() if best is min] + ['training loss']
  losses = [n for label in labels for n in shared[::-1] if n.partition(' (')[0] == label]
  return _render(title, sections, reports, losses[0] if losses else None)


def format_gates(result: dict[str, Any]) -> str:
  """Formats a result of `gates` as a page of its own, with all shown tokens."""
  parts = gates.parts(result, len(result['texts']))
  card = Card('', None, _draw(gates, result, 'gates'), parts)
  title = f'Gates of n-gram memories, step {result["step"]:,}'
  return _render(title, {'gates': [card]})


def _render(title, sections, reports=(), loss=None):
  environment = jinja2.Environment(
    autoescape=True,
    loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
    lstrip_blocks=True,
    trim_blocks=True,
    undefined=jinja2.StrictUndefined,
  )
  sections = {name: cards for name, cards in sections.items() if cards}
  return environment.get_template('report.html.j2').render(
    title=title, sections=sections, reports=reports, loss=loss
  )


def _curves(reports):
  svgs = figures.inline_svgs('curve', lambda axes: plot_curves(reports, axes), len(CURVES))
  return [Card('', None, [svg], ()) for svg in svgs]


def plot_curves(reports: Sequence[RunReport], axes: Any) -> None:
  """Plots CURVES by training tokens; runs with one name as their mean, where all have a value."""
  from matplotlib import ticker

  for (title, key), panel in zip(CURVES.items(), axes, strict=True):
    for name in dict.fromkeys(report.name for report in reports):
      group, values = [report for report in reports if report.name == name], {}
      for report in group:
        tokens = report.config.training.tokens_per_step
        for record in report.records:
          if math.isfinite(record.get(key, math.nan)):
            values.setdefault(record['step'] * tokens, []).append(record[key])
      points = [(x, statistics.fmean(y)) for x, y in values.items() if len(y) == len(group)]
      if points:
        style = 'o-' if len(points) <= MAX_DOTS else '-'
        label = name.replace('$', r'\$')  # no formula
        color = f'C{group[0].color}'
        panel.plot(*zip(*points, strict=True), style, ms=3, lw=1, color=color, label=label)
    panel.set(title=title, xlabel='training tokens', ylabel='nats per token')
    panel.xaxis.set_major_formatter(ticker.EngFormatter(sep=''))
    panel.grid(alpha=0.3)
    if panel.lines:
      panel.legend(fontsize='small')


def _metrics_table(reports):
  names = dict.fromkeys(name for report in reports for name in report.metrics)
  rows, best = [['', *(report.name for report in reports)]], set()
  for name in names:
    metrics = [report.metrics.get(name) for report in reports]
    rows.append([name, *('–' if metric is None else metric.text for metric in metrics)])
    present = [metric for metric in metrics if metric is not None]
    values = [metric.value for metric in present]
    can_compare = len({metric.tokens for metric in present}) == 1
    if (best_of := present[0].best) is not None and can_compare and len(set(values)) > 1:
      winner = best_of(values)
      best |= {(len(rows) - 1, c) for c, m in enumerate(metrics, 1) if m and m.value == winner}
  return Card('', None, (), [Part(rows=rows, best=best)])


def _configs(reports):
  first, *others = (report.config for report in reports)
  paths = {
    key.path
    for other in others
    for key, _, _ in fields.differences(first, other, may_differ=lambda key: False)
  }
  rows = [['key', *(report.name for report in reports)]]
  for path in sorted(paths, key=lambda path: (not path.startswith('model.'), path)):
    rows.append([path, *(_format_value(report.config, path) for report in reports)])
  parts = [Part(rows=rows, has_words=True)] if others else []
  for report in reports:
    text = experiment.describe(report.config)
    parts.append(Part(f'all keys of {report.name}', text=text, is_folded=True))
  return Card('', None, (), parts)


def _format_value(config, path):
  """Returns the value at a dotted path as text; of a block, what differs from its defaults."""
  for name in path.split('.'):
    entries = dict(enumerate(config)) if isinstance(config, tuple) else {}
    config = entries.get(int(name)) if name.isdecimal() else getattr(config, name, None)
  return fields.format_value(config)


def _samples(reports):
  return [
    Card(report.name, report.color, (), [Part(sample=sample) for sample in report.samples])
    for report in reports
    if report.samples
  ]


def _analysis(reports, name):
  """Returns a card for each run that has a result of an analysis."""
  analysis, cards = ANALYSES[name], []
  for report in (report for report in reports if name in report.results):
    result = report.results[name]
    svgs = _draw(analysis, result, f'{name} {report.color}')
    cards.append(Card(report.name, report.color, svgs, analysis.parts(result)))
  return cards


def _draw(module, result, figure):
  """Returns the figures of an analysis; tokens are shaded text instead."""
  plot = lambda axes: module.plot(result | {'texts': [], 'along': None}, axes)
  return figures.inline_svgs(figure, plot, module.FIGURE_SIZE[0])
