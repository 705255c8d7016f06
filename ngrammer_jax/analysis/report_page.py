"""The web page of a report: runs side by side.

A section shows the runs to which it applies. It is left out if it applies to none.
"""

from collections.abc import Callable, Sequence
import html
import math

from ngrammer_jax import config as experiment
from ngrammer_jax.analysis import charts, clusters, gates, ngrams, web_page
from ngrammer_jax.analysis.charts import Axis, Line
from ngrammer_jax.analysis.report import SPLIT_METRICS, RunReport
from ngrammer_jax.config import fields

MAX_SHOWN_TOKENS = 300  # tokens of shaded text
MAX_CLUSTERS = 6  # of each run, the most coherent ones
MAX_WORDS = 12  # tokens of each cluster
MAX_ROWS = 13  # of a table that is not folded
MAX_NGRAMS = 6  # n-grams with the highest gate, of each order


def format_page(reports: Sequence[RunReport]) -> str:
  """Formats the page: headlines, links to the sections, and the sections."""
  sections = {name: make(reports) for name, make in SECTIONS.items()}
  links = ''.join(f'<a href="#{name}">{name}</a>' for name, part in sections.items() if part)
  names = ', '.join(report.name for report in reports)
  return web_page.document(
    names if len(reports) <= 3 else f'{len(reports)} runs side by side',
    f'{_headlines(reports)}<nav>{links}</nav>\n',
    '\n'.join(sections.values()),
  )


def _headlines(reports):
  """Returns a card for each run with its sizes, and with a loss that all runs have."""
  has = lambda name: all(name in report.metrics for report in reports)
  labels = [label for label, _, best in SPLIT_METRICS.values() if best is min] + ['training loss']
  by_label = (
    [name for name in reports[0].metrics if name.partition(' (')[0] == label and has(name)]
    for label in labels
  )
  loss_name = next((names[-1] for names in by_label if names), None)

  def make(report):
    metrics = report.metrics
    loss = ''
    if loss_name:
      loss = f'<div class="headline">{metrics[loss_name].text} <small>{loss_name}</small></div>\n'
    sizes = (
      f'{charts.format_number(metrics[name].value)} {name}'
      for name in ('parameters', 'training tokens')
    )
    note = f'<p class="note">{", ".join(sizes)}</p>\n'
    return [loss + note]

  return _cards(reports, make)


def _cards(reports: Sequence[RunReport], make: Callable[[RunReport], list[str]]) -> str:
  """Returns a card for each run, with the parts that `make` returns."""
  title = lambda report: (
    f'<h3 class="run c{report.color % charts.COLORS}">{html.escape(report.name)}</h3>\n'
  )
  return web_page.cards([(title(report), make(report)) for report in reports])


def _analysis_section(reports, analysis, title, note, make):
  """Returns the section of an analysis, with a card for each run that has a result."""
  shown_reports = [report for report in reports if analysis in report.results]
  if not shown_reports:
    return ''
  cards = _cards(shown_reports, lambda report: make(report.results[analysis]))
  return web_page.section(analysis, title, note, cards)


def _curves(reports):
  cards = []
  for title, key in (
    ('Validation loss', 'validation/nll_nats_per_token'),
    ('Training loss', 'loss'),
  ):
    lines = []
    for report in reports:
      points = [
        (record['step'] * report.tokens_per_step, record[key])
        for record in report.records
        if math.isfinite(record.get(key, math.nan))
      ]
      if points:
        lines.append(Line(report.name, points, report.color, has_dots=len(points) <= 40))
    if lines:
      chart = charts.line_chart(lines, Axis('training tokens'), Axis('nats per token'))
      cards.append((f'<h3>{title}</h3>\n', [chart]))
  if not cards:
    return ''
  per_step = '; '.join(f'{report.name}: {report.tokens_per_step:,}' for report in reports)
  note = f'Tokens of a step: {per_step}.'
  return web_page.section('curves', 'Curves', note, web_page.cards(cards))


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
  note = (
    'The best of each row is marked; of losses per token, perplexities and accuracies only if all '
    'runs were evaluated on the same number of tokens. These can only be compared between runs '
    'with the same vocabulary; bits per byte always can, on the same text.'
  )
  table = f'<div class="card fit">{web_page.table(rows, best)}</div>\n'
  return web_page.section('metrics', 'Metrics', note if len(reports) > 1 else '', table)


def _configs(reports):
  values = [
    {key.path: (key, value) for key, value in fields.walk_values(report.config)}
    for report in reports
  ]
  paths = dict.fromkeys(path for each in values for path in each)
  rows = [['key', *(report.name for report in reports)]]
  for path in sorted(paths, key=lambda path: not path.startswith('model.')):
    cells = [_format_value(each, path) for each in values]
    own = [each[path] for each in values if path in each]
    # Of a block that only some runs have, the default values are left out.
    is_shown = len(own) == len(values) or any(value != key.default for key, value in own)
    if len(set(cells)) > 1 and is_shown:
      rows.append([path, *cells])
  table = ''
  if len(reports) > 1:
    table = web_page.table(rows, of_words=True) if len(rows) > 1 else '<p>All keys are equal.</p>\n'
  folds = ''.join(
    web_page.fold(
      f'all keys of {report.name}',
      f'<pre>{html.escape(experiment.describe(report.config))}</pre>\n',
    )
    for report in reports
  )
  note = 'Keys that differ; –: the run does not have the key.' if len(reports) > 1 else ''
  return web_page.section(
    'configs', 'Configs', note, f'<div class="card fit">{table}{folds}</div>\n'
  )


def _format_value(values, path):
  """Returns a value of a config as text, also for a block that is set, or is not there."""
  if path in values:
    return repr(values[path][1])
  return 'set, see below' if any(other.startswith(f'{path}.') for other in values) else '–'


def _clusters(reports):
  def make(result):
    lines = [
      Line(f'head {n}', list(enumerate(clusters.cluster_sizes(head), 1)), n, has_dots=False)
      for n, head in enumerate(result['heads'])
    ]
    x, y = Axis('cluster, the largest first'), Axis('tokens in the cluster', is_log=True)
    coherent = [
      (cluster['coherence'], f'head {n}, cluster {k}', cluster['tokens'])
      for n, head in enumerate(result['heads'])
      for k, cluster in clusters.most_coherent(head, MAX_CLUSTERS).items()
    ]
    rows = [['cluster', 'most frequent tokens', 'coherence']]
    for coherence, name, tokens in sorted(coherent, key=lambda each: -each[0])[:MAX_CLUSTERS]:
      words = ' '.join(repr(text)[1:-1].replace(' ', '_') for text in tokens[:MAX_WORDS])
      rows.append([name, words, f'{coherence:.3f}'])
    heads = web_page.fold('statistics of all heads', web_page.table(clusters.table_rows(result)))
    examples = '<h4>the most coherent clusters of four or more tokens</h4>\n'
    examples += web_page.table(rows, of_words=True) if len(rows) > 1 else '<p>none</p>\n'
    return [charts.line_chart(lines, x, y), examples + heads]

  note = 'Tokens of the vocabulary that share a cluster of the latent n-grams.'
  return _analysis_section(reports, 'clusters', 'Clusters', note, make)


def _spans(reports):
  def make(result):
    parts = []
    if result['spans'] is not None:
      title = f'<h4>span in tokens; the limit is {result["limit"]:,}</h4>\n'
      parts.append(title + web_page.heat_map(result['spans'], ('layer', 'head'), ',.0f'))
    if result['persistent'] is not None:
      title = '<h4>share of attention on persistent vectors</h4>\n'
      parts.append(title + web_page.heat_map(result['persistent'], ('layer', 'head'), '.1%'))
    if result['along'] is not None:
      along = {key: values[:MAX_SHOWN_TOKENS] for key, values in result['along'].items()}
      limits = min(along['spans']), max(along['spans'])
      legend = web_page.shading_legend('mean span of each token:', limits, '.0f')
      parts.append(legend + web_page.shaded_text(along['texts'], along['spans'], limits, '.0f'))
    return parts

  note = 'How far each head looks back, by layer and head.'
  return _analysis_section(reports, 'spans', 'Attention spans', note, make)


def _attention(reports):
  def make(result):
    place = lambda weights: [
      (-distance, 100 * weight)
      for distance, weight in zip(result['distances'], weights, strict=True)
    ]
    lines = [
      Line(f'layer {n}', place(weights), n, has_dots=False)
      for n, weights in enumerate(result['layers'])
    ]
    mean = Line('mean', place(result['mean']), charts.INK)
    x = Axis('relative position of the key (tokens)')
    chart = charts.line_chart(
      [*lines, mean] if len(lines) > 1 else [mean], x, Axis('attention weight (%)', from_zero=True)
    )
    return [f'{chart}<p class="note">All other keys: {result["rest"]:.1%}.</p>\n']

  note = 'Mean attention weight by distance, over tokens that can attend to all distances shown.'
  return _analysis_section(reports, 'attention', 'Attention by distance', note, make)


def _ngrams(reports):
  def make(result):
    ranges, shares = ngrams.visit_shares(result)
    lines = [
      Line(name, list(enumerate(values)), color)
      for color, (name, values) in enumerate(shares.items())
    ]
    # Names are the smallest numbers of visits: ranges are too long for a phone.
    smallest = [range_.partition('–')[0] for range_ in ranges]
    label = f'visits of a row in {result["tokens"]:,} tokens of {result["split"]}, at least'
    x = Axis(label, names=smallest)
    chart = charts.line_chart(lines, x, Axis('rows of the table (%)', from_zero=True))
    (_, _, _, *columns), *heads = ngrams.table_rows(result)
    rows = [('table', *columns)]
    rows += [(f'{name}, order {order}, head {head}', *cells) for name, order, head, *cells in heads]
    table = web_page.table(rows)
    is_long = len(rows) > MAX_ROWS
    return [chart, web_page.fold('rows and collisions of all heads', table) if is_long else table]

  note = 'How often the rows of the n-gram tables are visited along a text.'
  return _analysis_section(reports, 'ngrams', 'N-gram visits', note, make)


def _gates(reports):
  def make(result):
    width = 1 / gates.BINS
    lines = [
      Line(
        gate['name'],
        [
          ((bin_ + 0.5) * width, 100 * count / result['tokens'])
          for bin_, count in enumerate(gate['histogram'])
        ],
        number,
        has_dots=False,
      )
      for number, gate in enumerate(result['gates'])
    ]
    y = Axis(f'tokens of {result["split"]} (%)', from_zero=True)
    chart = charts.line_chart(lines, Axis('gate'), y)
    return [chart, ''.join(_gate(result, *each) for each in enumerate(result['gates']))]

  note = 'How much of its n-gram memory a layer lets in at each token, between 0 and 1.'
  return _analysis_section(reports, 'gates', 'Gates', note, make)


def _gate(result, number, gate):
  """Returns the n-grams and the shaded text of a gate; those of all but the first are folded."""
  values = gate['values'][:MAX_SHOWN_TOKENS]
  limits = min(values), max(values)
  rows = [['n-gram', 'mean gate', 'count']]
  for listed in gate['ngrams'].values():
    for ngram in listed[:MAX_NGRAMS]:
      rows.append([repr(ngram['text']), f'{ngram["gate"]:.3f}', f'{ngram["count"]:,}'])
  content = (
    f'{web_page.shading_legend("gate of each token:", limits)}'
    f'{web_page.shaded_text(result["texts"][: len(values)], values, limits)}'
    f'<h4>n-grams with the highest mean gate</h4>\n{web_page.table(rows)}'
  )
  name = f'{gate["name"]}: mean {gate["mean"]:.3f}, standard deviation {gate["deviation"]:.3f}'
  return web_page.fold(name, content) if number else f'<h4>{html.escape(name)}</h4>\n{content}'


def _samples(reports):
  shown_reports = [report for report in reports if report.samples]
  if not shown_reports:
    return ''
  make = lambda report: [
    f'<div class="sample"><b>{html.escape(prompt)}</b>{html.escape(text)}</div>\n'
    for prompt, text in report.samples
  ]
  note = 'The first continuations, with seeds 0, 1, 2, ...; none is chosen.'
  return web_page.section('samples', 'Samples', note, _cards(shown_reports, make))


SECTIONS = {
  'curves': _curves,
  'metrics': _metrics_table,
  'configs': _configs,
  'samples': _samples,
  'clusters': _clusters,
  'ngrams': _ngrams,
  'gates': _gates,
  'spans': _spans,
  'attention': _attention,
}
