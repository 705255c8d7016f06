"""The web page of a report: runs side by side, with curves, tables, figures and samples.

`report.html.j2` is the page. A section shows its applicable runs, and is omitted without any.
"""

from collections.abc import Sequence
import math
import pathlib
import statistics
from typing import Any, NamedTuple

import jinja2

from ngrammer_jax import config as experiment
from ngrammer_jax.analysis import compare, figures, gates
from ngrammer_jax.analysis.elements import Element
from ngrammer_jax.analysis.report import ANALYSES, RunReport
from ngrammer_jax.analysis.report_metrics import SPLIT_METRICS, Metric
from ngrammer_jax.config import fields, resume

MAX_DOTS = 40  # points of a curve, beyond which it is a line alone
CURVES = {'Validation loss': 'validation/nll_nats_per_token', 'Training loss': 'loss'}


class Card(NamedTuple):
  """A card of a section: title, number of the color of its run, figures as SVG, and elements."""

  title: str
  color: int | None
  figures: Sequence[str]
  elements: Sequence[Element]


def format_page(reports: Sequence[RunReport]) -> str:
  """Formats the page of runs: headlines, links to the sections, and the sections."""
  title = f'{len(reports)} runs side by side'
  if len(reports) <= 3:
    title = ', '.join(report.name for report in reports)
  sections = {
    'curves': _curves(reports),
    'metrics': [*_label_table(reports), _metrics_table(reports)],
    'configs': [_configs(reports)],
    'samples': _samples(reports),
  }
  for name in ANALYSES:
    sections[name] = _analysis(reports, name)
  return _render(title, sections, reports, _headline_loss(reports))


def format_gates(result: dict[str, Any]) -> str:
  """Formats a result of `gates` as a separate page, with all shown tokens."""
  elements = gates.elements(result, len(result['texts']))
  card = Card('', None, _draw(gates, result, 'gates'), elements)
  title = f'Gates of n-gram memories, step {result["step"]:,}'
  return _render(title, {'gates': [card]})


def _headline_loss(reports: Sequence[RunReport]) -> str | None:
  """Returns the name of the headline loss common to all runs; None: no common loss."""
  shared = [
    name for name in reports[0].metrics if all(name in report.metrics for report in reports)
  ]
  labels = [label for label, _, best in SPLIT_METRICS.values() if best is min]
  for label in [*labels, 'training loss']:
    for name in reversed(shared):
      if name.partition(' (')[0] == label:
        return name
  return None


def _render(
  title: str,
  sections: dict[str, list[Card]],
  reports: Sequence[RunReport] = (),
  loss: str | None = None,
) -> str:
  """Returns the page with all non-empty sections."""
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


def _curves(reports: Sequence[RunReport]) -> list[Card]:
  svgs = figures.inline_svgs('curve', lambda axes: plot_curves(reports, axes), len(CURVES))
  return [Card('', None, [svg], ()) for svg in svgs]


def plot_curves(reports: Sequence[RunReport], axes: Any) -> None:
  """Plots CURVES by training tokens; runs of one name as their mean, where all have a value."""
  from matplotlib import ticker

  names = list(dict.fromkeys(report.name for report in reports))
  for (title, key), panel in zip(CURVES.items(), axes, strict=True):
    for name in names:
      group = [report for report in reports if report.name == name]
      points = _mean_curve(group, key)
      if points:
        tokens, means = zip(*points, strict=True)
        style = 'o-' if len(points) <= MAX_DOTS else '-'
        label = name.replace('$', r'\$')  # no formula
        panel.plot(tokens, means, style, ms=3, lw=1, color=f'C{group[0].color}', label=label)
    panel.set(title=title, xlabel='training tokens', ylabel='nats per token')
    panel.xaxis.set_major_formatter(ticker.EngFormatter(sep=''))
    panel.grid(alpha=0.3)
    if panel.lines:
      panel.legend(fontsize='small')


def _mean_curve(group: Sequence[RunReport], key: str) -> list[tuple[int, float]]:
  """Returns training tokens and the mean of a value, where all runs of the group have one."""
  values: dict[int, list[float]] = {}
  for report in group:
    tokens = report.config.training.tokens_per_step
    for record in report.records:
      if math.isfinite(record.get(key, math.nan)):
        values.setdefault(record['step'] * tokens, []).append(record[key])
  return [(x, statistics.fmean(y)) for x, y in values.items() if len(y) == len(group)]


def _metrics_table(reports: Sequence[RunReport]) -> Card:
  """Returns the table of all metrics; the best of comparable values are marked."""
  names = dict.fromkeys(name for report in reports for name in report.metrics)
  rows = [['', *(report.name for report in reports)]]
  best = set()
  for name in names:
    metrics = [report.metrics.get(name) for report in reports]
    rows.append([name, *('–' if metric is None else metric.text for metric in metrics)])
    best_value = _best_value(metrics)
    for column, metric in enumerate(metrics, 1):
      if best_value is not None and metric is not None and metric.value == best_value:
        best.add((len(rows) - 1, column))
  return Card('', None, (), [Element(rows=rows, best=best)])


def _label_table(reports: Sequence[RunReport]) -> list[Card]:
  """Returns the table of means over the runs of each name, with standard errors; [] without."""
  groups: dict[str, list[RunReport]] = {}
  for report in reports:
    groups.setdefault(report.name, []).append(report)
  if len(groups) == len(reports):
    return []
  names = dict.fromkeys(name for report in reports for name in report.metrics)
  rows = [['mean ± standard error', *(f'{name} ({len(group)})' for name, group in groups.items())]]
  for name in names:
    cells = [_format_mean(group, name) for group in groups.values()]
    if any(cells):
      rows.append([name, *(cell or '–' for cell in cells)])
  return [Card('', None, (), [Element(rows=rows)])]


def _format_mean(group: Sequence[RunReport], name: str) -> str | None:
  """Formats the mean of a metric with a best value; None: missing in some runs."""
  metrics = [report.metrics.get(name) for report in group]
  if None in metrics or metrics[0].best is None or len({each.tokens for each in metrics}) > 1:
    return None
  values = [metric.value for metric in metrics]
  text = f'{statistics.fmean(values):.4f}'
  if len(values) > 1:
    text += f' ± {compare.standard_error(values):.4f}'
  return text


def _best_value(metrics: Sequence[Metric | None]) -> float | None:
  """Returns the best of different comparable values; None: not comparable."""
  present = [metric for metric in metrics if metric is not None]
  values = [metric.value for metric in present]
  can_compare = len({metric.tokens for metric in present}) == 1
  if present[0].best is None or not can_compare or len(set(values)) < 2:
    return None
  return present[0].best(values)


def _configs(reports: Sequence[RunReport]) -> Card:
  """Returns the table of different keys, and all keys of each run."""
  first, *others = (report.config for report in reports)
  paths = set()
  for other in others:
    for key, _, _ in resume.differences(first, other, may_differ=lambda key: False):
      paths.add(key.path)
  rows = [['key', *(report.name for report in reports)]]
  for path in sorted(paths, key=lambda path: (not path.startswith('model.'), path)):
    rows.append([path, *(_format_value(report.config, path) for report in reports)])
  elements = []
  if others:
    elements.append(Element(rows=rows, has_words=True))
  for report in reports:
    text = experiment.describe(report.config)
    elements.append(Element(f'all keys of {report.name}', text=text, is_folded=True))
  return Card('', None, (), elements)


def _format_value(config: Any, path: str) -> str:
  """Returns the value at a dotted path as text; a block only shows values other than defaults."""
  for name in path.split('.'):
    if not name.isdecimal():
      config = getattr(config, name, None)
    elif isinstance(config, tuple) and int(name) < len(config):
      config = config[int(name)]
    else:
      config = None
  return fields.format_value(config)


def _samples(reports: Sequence[RunReport]) -> list[Card]:
  """Returns a card for each run with samples."""
  cards = []
  for report in reports:
    if report.samples:
      elements = [Element(sample=sample) for sample in report.samples]
      cards.append(Card(report.name, report.color, (), elements))
  return cards


def _analysis(reports: Sequence[RunReport], name: str) -> list[Card]:
  """Returns a card for each run with a result of an analysis."""
  analysis = ANALYSES[name]
  cards = []
  for report in reports:
    if name in report.results:
      result = report.results[name]
      svgs = _draw(analysis, result, f'{name} {report.color}')
      cards.append(Card(report.name, report.color, svgs, analysis.elements(result)))
  return cards


def _draw(analysis: Any, result: dict[str, Any], figure: str) -> list[str]:
  """Returns the figures of an analysis; tokens become shaded text."""

  def plot(axes: Any) -> None:
    analysis.plot(result | {'texts': [], 'along': None}, axes)

  return figures.inline_svgs(figure, plot, analysis.FIGURE_SIZE[0])
