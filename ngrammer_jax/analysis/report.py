"""One web page of runs side by side: curves, metrics, configs, what the analyses find, and samples.

A section has the runs that have its part. All numbers are those of metrics.jsonl, of the files of
`evaluate`, and of the other analyses.
"""

from collections.abc import Callable, Sequence
import html
import math
import os
import pathlib
import statistics
from typing import Any, NamedTuple

from flax import traverse_util

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, files, json_files, runs
from ngrammer_jax.analysis import (
  attention,
  charts,
  clusters,
  curve,
  gates,
  lookups,
  ngrams,
  spans,
  web_page,
)
from ngrammer_jax.analysis.charts import Axis, Line
from ngrammer_jax.config import fields
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data import corpora
from ngrammer_jax.training import state as train_state
from ngrammer_jax.training import workdirs

ANALYSES = {
  **{'clusters': clusters.analyze, 'spans': spans.analyze, 'attention': attention.analyze},
  **{'ngrams': ngrams.analyze, 'gates': gates.analyze},
}
# The metrics of a split, their names on the page, formats, and which value is the best.
SPLIT_METRICS = {
  'bits_per_byte': ('bits per byte', '.4f', min),
  'bits_per_character': ('bits per character', '.4f', min),
  'nll_nats_per_token': ('nats per token', '.4f', min),
  'perplexity': ('perplexity', ',.3f', min),
  'top1_accuracy': ('top-1 accuracy', '.2%', max),
}
MAX_SHOWN_TOKENS = 300  # tokens of shaded text
MAX_CLUSTERS = 6  # of each run, the most coherent ones
MAX_WORDS = 12  # tokens of each cluster
MAX_ROWS = 13  # of a table that is not folded
MAX_NGRAMS = 6  # n-grams with the highest gate, of each order


class Samples(NamedTuple):
  """Which samples to generate: `count` continuations of a prompt, of at most `tokens` tokens."""

  prompt: str = ''
  count: int = 3
  tokens: int = 100


class Metric(NamedTuple):
  """A number of a run: its text on the page, its value, and `min` or `max` if one is the best."""

  text: str
  value: float
  best: Callable[..., float] | None = None


class RunReport(NamedTuple):
  """What the page shows of a run.

  Attributes:
    name: name of the run.
    color: number of its color.
    step: step of its checkpoint.
    config: its config.
    tokens_per_step: tokens that a training step reads.
    records: lines of metrics.jsonl.
    metrics: numbers by name.
    results: result of each of ANALYSES that applies.
    samples: prompts and continuations.
  """

  name: str
  color: int
  step: int
  config: experiment.Config
  tokens_per_step: int
  records: list[dict[str, float]]
  metrics: dict[str, Metric]
  results: dict[str, dict[str, Any]]
  samples: list[tuple[str, str]]


def check_output(path: pathlib.Path) -> None:
  """Raises BadInput for a page that cannot be written, before the analyses run."""
  files.check_reachable(path)
  if path.is_dir():
    raise errors.BadInput(f'--output={path} is a folder: name a file, such as {path}/report.html')
  if files.is_remote(path):
    return
  folder = next(parent for parent in path.absolute().parents if parent.exists())
  if not folder.is_dir() or not os.access(folder, os.W_OK):
    raise errors.BadInput(f'--output={path} cannot be written: check the path and its permissions')


def collect(
  all_runs: Sequence[runs.Run], names: Sequence[str], split: str, samples: Samples
) -> list[RunReport]:
  """Analyzes the runs. Raises BadInput as the analyses do, but leaves out those without a part."""
  for run in all_runs:
    if run.config.finetune is None:
      run.split(split)  # reports a wrong name before any checkpoint is loaded
  return [
    _collect_run(run, name, color, split, samples)
    for color, (run, name) in enumerate(zip(all_runs, names, strict=True))
  ]


def _collect_run(run, name, color, split, samples):
  training, step = run.config.training, int(run.state.step)
  is_exported = workdirs.is_exported(run.workdir)
  records = [] if is_exported else curve.read_metrics(run.workdir)
  results, texts = {}, []
  if run.config.finetune is None:
    for analysis, analyze in ANALYSES.items():
      try:
        results[analysis] = analyze(run, split)
      except errors.NotApplicable:
        continue
    if run.config.model.position not in model_config.SEGMENT_POSITIONS and samples.count > 0:
      completions = run.generate([samples.prompt] * samples.count, samples.tokens)
      texts = [(completion.prompt, completion.text) for completion in completions]
  tokens_per_step = training.batch_size * training.segment_length
  metrics = _metrics(run, step, tokens_per_step, [r for r in records if r['step'] <= step])
  return RunReport(name, color, step, run.config, tokens_per_step, records, metrics, results, texts)


def _metrics(run, step, tokens_per_step, records):
  """Returns the numbers of a run, up to the step of its checkpoint."""
  count = lambda value: Metric(f'{value:,.0f}', value)
  metrics = {
    'step': count(step),
    'training tokens': count(step * tokens_per_step),
    'parameters': count(train_state.count_elements(run.state.params)),
    'of these in n-gram tables': count(_count_table_elements(run)),
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
      with workdirs.translate_damage(run.workdir, f'evaluation/{split}.json', 'evaluate it again'):
        metrics |= _split_metrics(f'{split}, evaluated', json_files.read_object(path))
  for key, name in (
    ('flops_per_token', 'FLOPs per token'),
    ('tokens_per_second', 'tokens per second'),
  ):
    values = [record[key] for record in records if key in record]
    if values:
      metrics[f'{name} (median)'] = count(statistics.median(values))
  return metrics


def _count_table_elements(run):
  params = traverse_util.flatten_dict(run.state.params)
  try:
    return sum(params[*table.path, 'table'].size for table in lookups.tables(run))
  except errors.NotApplicable:
    return 0


def _split_metrics(name, result):
  """Returns the metrics of a split by name."""
  metrics = {f'step ({name})': Metric(f'{result["step"]:,}', result['step'])}
  for key, (label, pattern, best) in SPLIT_METRICS.items():
    if result.get(key) is not None:
      metrics[f'{label} ({name})'] = Metric(format(result[key], pattern), result[key], best)
  return metrics


def format_page(reports: Sequence[RunReport]) -> str:
  """Formats the page. A section that no run has is left out, and so is its link."""
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


def _analysis_cards(reports, analysis, title, note, make):
  """Returns the section of an analysis, with a card for each run that has a result."""
  having = [report for report in reports if analysis in report.results]
  if not having:
    return ''
  cards = _cards(having, lambda report: make(report.results[analysis]))
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
    known = [metric for metric in metrics if metric is not None]
    values = [metric.value for metric in known]
    if known[0].best is not None and len(set(values)) > 1:
      winner = known[0].best(values)
      best |= {(len(rows) - 1, c) for c, m in enumerate(metrics, 1) if m and m.value == winner}
  note = len(reports) > 1 and (
    'The best of each row is marked. Losses per token and perplexities can only be compared '
    'between runs with the same vocabulary; bits per byte always can, on the same text.'
  )
  table = f'<div class="card fit">{web_page.table(rows, best)}</div>\n'
  return web_page.section('metrics', 'Metrics', note or '', table)


def _configs(reports):
  values = [
    {key.path: (key, value) for key, value in fields.walk_values(report.config)}
    for report in reports
  ]
  paths = dict.fromkeys(path for each in values for path in each)
  rows = [['key', *(report.name for report in reports)]]
  for path in sorted(paths, key=lambda path: path.partition('.')[0] not in ('model',)):
    cells = [_format_value(each, path) for each in values]
    is_default = all(path not in each or each[path][1] == each[path][0].default for each in values)
    if len(set(cells)) > 1 and not (is_default and not all(path in each for each in values)):
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
    found = [
      (cluster['coherence'], f'head {n}, cluster {k}', cluster['tokens'])
      for n, head in enumerate(result['heads'])
      for k, cluster in clusters.most_coherent(head, MAX_CLUSTERS).items()
    ]
    rows = [['cluster', 'most frequent tokens', 'coherence']]
    for coherence, name, tokens in sorted(found, key=lambda each: -each[0])[:MAX_CLUSTERS]:
      words = ' '.join(repr(text)[1:-1].replace(' ', '_') for text in tokens[:MAX_WORDS])
      rows.append([name, words, f'{coherence:.3f}'])
    heads = web_page.fold('statistics of all heads', web_page.table(clusters.table_rows(result)))
    examples = '<h4>the most coherent clusters of four or more tokens</h4>\n'
    examples += web_page.table(rows, of_words=True) if len(rows) > 1 else '<p>none</p>\n'
    return [charts.line_chart(lines, x, y), examples + heads]

  note = 'Tokens of the vocabulary that share a cluster of the latent n-grams.'
  return _analysis_cards(reports, 'clusters', 'Clusters', note, make)


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
      scale = web_page.scale('mean span of each token:', limits, '.0f')
      parts.append(scale + web_page.shaded_text(along['texts'], along['spans'], limits, '.0f'))
    return parts

  note = 'How far each head looks back, by layer and head.'
  return _analysis_cards(reports, 'spans', 'Attention spans', note, make)


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
  return _analysis_cards(reports, 'attention', 'Attention by distance', note, make)


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
    rows = ngrams.table_rows(result)
    rows = [(f'{name}, order {order}, head {head}', *others) for name, order, head, *others in rows]
    table = web_page.table([('table', *rows[0][1:]), *rows[1:]])
    is_long = len(rows) > MAX_ROWS
    return [chart, web_page.fold('rows and collisions of all heads', table) if is_long else table]

  note = 'How often the rows of the n-gram tables are visited along a text.'
  return _analysis_cards(reports, 'ngrams', 'N-gram visits', note, make)


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
  return _analysis_cards(reports, 'gates', 'Gates', note, make)


def _gate(result, number, gate):
  """Returns the n-grams and the shaded text of a gate; those of all but the first are folded."""
  values = gate['values'][:MAX_SHOWN_TOKENS]
  limits = min(values), max(values)
  rows = [['n-gram', 'mean gate', 'count']]
  for listed in gate['ngrams'].values():
    for ngram in listed[:MAX_NGRAMS]:
      rows.append([repr(ngram['text']), f'{ngram["gate"]:.3f}', f'{ngram["count"]:,}'])
  content = (
    f'{web_page.scale("gate of each token:", limits)}'
    f'{web_page.shaded_text(result["texts"][: len(values)], values, limits)}'
    f'<h4>n-grams with the highest mean gate</h4>\n{web_page.table(rows)}'
  )
  name = f'{gate["name"]}: mean {gate["mean"]:.3f}, standard deviation {gate["deviation"]:.3f}'
  return f'<h4>{html.escape(name)}</h4>\n{content}' if not number else web_page.fold(name, content)


def _samples(reports):
  having = [report for report in reports if report.samples]
  if not having:
    return ''
  make = lambda report: [
    f'<div class="sample"><b>{html.escape(prompt)}</b>{html.escape(text)}</div>\n'
    for prompt, text in report.samples
  ]
  note = 'The first continuations, with seeds 0, 1, 2, ...; none is chosen.'
  return web_page.section('samples', 'Samples', note, _cards(having, make))


SECTIONS = {
  **{'curves': _curves, 'metrics': _metrics_table, 'configs': _configs, 'samples': _samples},
  **{'clusters': _clusters, 'ngrams': _ngrams, 'gates': _gates, 'spans': _spans},
  **{'attention': _attention},
}
