"""`analyze report`: the HTML, its numbers, and how a browser shows it."""

import html.parser
import json
import re
import shutil

import jax
import numpy as np
import pytest

from ngrammer_jax import analyze, runs
from ngrammer_jax.analysis import charts, clusters, ngrams, report, report_page
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.training.records import writers
from tests import browser
from tests.checks import bad_input

VOID = ('meta', 'wbr')
LABELS = ('<b>"first"&amp;', "second's")


class Page(html.parser.HTMLParser):
  """Checks that a page is self-contained and well-formed, and collects what it shows.

  `tables` has the rows of each section by its id, `titles` what is shown under the pointer.
  """

  def __init__(self, text):
    super().__init__()
    self.open, self.ids, self.links, self.section = [], [], [], ''
    self.tables, self.titles, self.texts = {}, {}, {}
    self.feed(text)
    assert not self.open, 'elements that are not closed'
    assert len(set(self.ids)) == len(self.ids) and set(self.links) <= {f'#{i}' for i in self.ids}
    style = re.search('<style>(.*)</style>', text, re.DOTALL)[1]
    assert not re.search(r'url\(|@import|http', style)

  def handle_starttag(self, tag, attributes):
    attributes = dict(attributes)
    assert tag not in ('script', 'link', 'img', 'iframe', 'object', 'base', 'use', 'form')
    assert not {a for a in attributes if a.startswith('on')} | ({'src', 'action'} & set(attributes))
    self.ids += [attributes['id']] if 'id' in attributes else []
    self.links += [attributes['href']] if 'href' in attributes else []
    if tag == 'section':
      self.section = attributes['id']
    if tag == 'tr':
      self.tables.setdefault(self.section, []).append([])
    if tag in ('td', 'th'):
      self.tables[self.section][-1].append('')
    if 'title' in attributes:
      self.titles.setdefault(self.section, []).append(attributes['title'])
    if tag not in VOID:
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.texts[self.section] = self.texts.get(self.section, '') + data
    if {'td', 'th'} & set(self.open[-2:]):
      self.tables[self.section][-1][-1] += data
    if self.open[-1:] == ['title']:
      self.titles.setdefault(self.section, []).append(data)


def points(page, section, name):
  """The values of the points of a line."""
  values = [re.fullmatch(f'{re.escape(name)}: (.*), (.*)', title) for title in page.titles[section]]
  return [(match[1], float(match[2])) for match in values if match]


def write_report(*flags):
  assert analyze.main(['report', '--samples=2', '--tokens=4', *flags]) == 0


@pytest.fixture
def collected(monkeypatch):
  """Collects what `report.collect` returns."""
  original, collected = report.collect, []
  spy = lambda *args: collected.extend(original(*args)) or collected
  monkeypatch.setattr(report, 'collect', spy)
  return collected


PAIR = []  # made once


@pytest.fixture
def pair(one_device, trained_copy, tmp_path, collected):
  """A page of two runs, one of them evaluated on the test split, what it shows, and the runs."""
  if not PAIR:
    other = shutil.copytree(trained_copy, tmp_path / 'other')
    evaluated = {'step': 8, 'bits_per_byte': 1.23456, 'nll_nats_per_token': 2.0, 'perplexity': None}
    evaluated['tokens'] = 1234
    evaluated['top1_accuracy'] = 0.6
    worse = {'step': 12, 'nll_nats_per_token': 2.1, 'top1_accuracy': 0.5, 'tokens': 1234}
    for workdir, result in ((trained_copy, worse), (other, evaluated)):
      (workdir / 'evaluation').mkdir()
      (workdir / 'evaluation' / 'test.json').write_text(json.dumps(result))
    config = json.loads((other / 'config.json').read_text())
    config['seed'], config['evaluation']['max_tokens'] = 7, 64
    (other / 'config.json').write_text(json.dumps(config))
    page = tmp_path / 'pages' / 'page.html'
    labels = [f'--label={label}' for label in LABELS]
    write_report(f'--workdir={trained_copy}', f'--workdir={other}', *labels, f'--output={page}')
    PAIR.append((page, collected, trained_copy))
  return PAIR[0]


def test_two_runs_side_by_side(pair):
  path, (found, _), first = pair
  text = path.read_text()
  page = Page(text)
  assert page.ids == [link[1:] for link in page.links]
  assert page.ids == ['curves', 'metrics', 'configs', 'samples', 'clusters', 'ngrams', 'attention']
  records = [record for _, record in writers.read_lines(first)]
  for name in LABELS:
    validation, train = (
      [(charts.format_number(r['step'] * 128), r[key]) for r in records if key in r]
      for key in ('validation/nll_nats_per_token', 'loss')
    )
    shown = points(page, 'curves', name)
    assert [x for x, _ in shown] == [x for x, _ in validation + train]
    np.testing.assert_allclose([y for _, y in shown], [y for _, y in validation + train], rtol=1e-5)

  metrics = {name: cells for name, *cells in page.tables['metrics']}
  params = runs.load_run(first).state.params
  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  assert metrics[''] == list(LABELS) and metrics['parameters'] == [f'{count:,}'] * 2
  assert metrics['of these in n-gram tables'] == [f'{2 * 64 * 4:,}'] * 2
  assert metrics['training loss'] == [f'{train[-1][1]:.4f}'] * 2
  assert metrics['nats per token (validation in training)'] == [f'{validation[-1][1]:.4f}'] * 2
  assert metrics['bits per byte (test, evaluated)'] == ['–', '1.2346']
  assert metrics['nats per token (test, evaluated)'] == ['2.1000', '2.0000']
  assert metrics['step (test, evaluated)'] == ['12', '8']
  assert metrics['tokens (test, evaluated)'] == ['1,234', '1,234']
  before_evaluation = report._metrics(runs.load_run(first, 4), 4, 1, [])
  assert not [name for name in before_evaluation if 'evaluated' in name]
  assert 'perplexity (test, evaluated)' not in metrics
  assert re.findall('<td class=best>(.*?)<', text) == ['2.0000', '60.00%']
  losses = {'a': report.Metric('1', 1, min, 10), 'b': report.Metric('2', 2, min, 9)}
  shown = [
    report.RunReport(*(name, 0, 1, None, 1, [], {'loss': loss}, {}, []))
    for name, loss in losses.items()
  ]
  assert 'class=best' not in report_page._metrics_table(shown)  # on other tokens
  metrics = report._split_metrics('test', {'step': 1, 'tokens': 9, 'bits_per_byte': 1.0})
  assert metrics['bits per byte (test)'].tokens is None
  (bits,) = (r['validation/bits_per_byte'] for r in records[-1:])
  assert re.findall('class="headline">(.*?) <', text) == [f'{bits:.4f}'] * 2
  assert page.tables['configs'] == [
    ['key', *LABELS],
    ['evaluation.max_tokens', 'None', '64'],
    ['seed', '0', '7'],
  ]
  assert page.texts['configs'].count('model.ngram.clusters=8') == 2

  rows = [[*row] for row in clusters.table_rows(found.results['clusters'])]
  assert [row for row in page.tables['clusters'] if len(row) == len(rows[0])] == rows * 2
  x_names, shares = ngrams.visit_shares(found.results['ngrams'])
  ((name, values),) = shares.items()
  shown = points(page, 'ngrams', name)
  np.testing.assert_allclose([y for _, y in shown], values * 2, rtol=1e-5)
  assert [x for x, _ in shown] == [name.split('–')[0] for name in x_names] * 2
  result = found.results['attention']
  shown = points(page, 'attention', 'mean')[: len(result['mean'])]
  assert [int(x) for x, _ in shown] == [-distance for distance in result['distances']]
  np.testing.assert_allclose([y / 100 for _, y in shown], result['mean'], rtol=1e-5)
  completions = runs.load_run(first).generate(['', ''], 4)
  assert found.samples == [('', completion.text) for completion in completions]
  for _, text in found.samples:
    assert text in page.texts['samples']


def test_a_run_with_spans_and_gates(one_device, tiny, untrained, collected):
  gated = NGramMemoryConfig(key='tokens', layers=(0,), orders=(2,), heads=1, rows=(31,), width=4)
  workdir = untrained(
    tiny(
      {
        **{'ngram': None, 'ngram_memories': (gated,), 'feed_forward_width': 0},
        'memory': model_config.MemoryConfig(16, same_length='memory_and_self'),
        'span': model_config.SpanConfig(limit=16, ramp=4, kind='dynamic', initial=0.0),
        'persistent': model_config.PersistentConfig(3),
      }
    )
  )
  (workdir / 'metrics.jsonl').write_text('{"step": 4, "loss": 2.5}\n')
  write_report(f'--workdir={workdir}', '--prompt=the <i>', '--label=spans')
  page = Page((workdir / 'report.html').read_text())
  assert page.ids == [link[1:] for link in page.links]
  names = ['curves', 'metrics', 'configs', 'samples', 'ngrams', 'gates', 'spans', 'attention']
  assert page.ids == names and page.texts['samples'].count('the <i>') == 2
  (found,) = collected
  result = found.results['spans']
  values = [f'{value:,.0f}' for row in result['spans'] for value in row]
  values += [f'{value:.1%}' for row in result['persistent'] for value in row]
  rows = [row[1:] for row in page.tables['spans'] if row[0] != 'head']
  assert [cell for row in rows for cell in row] == values
  shown = [float(title) for title in page.titles['spans']]
  assert shown == [float(f'{value:.0f}') for value in result['along']['spans'][: len(shown)]]
  (gate,) = found.results['gates']['gates']
  titles = [title for title in page.titles['gates'] if ':' not in title]
  assert titles == [f'{value:.3f}' for value in gate['values'][: report_page.MAX_SHOWN_TOKENS]]
  best = gate['ngrams'][2][0]
  row = [repr(best['text']), f'{best["gate"]:.3f}', f'{best["count"]:,}']
  assert page.tables['gates'][1] == row


def test_a_report_that_fails_writes_nothing(one_device, trained_copy, tmp_path, monkeypatch):
  before = sorted(trained_copy.rglob('*'))
  (tmp_path / 'file').write_text('')
  with bad_input(f'--output={tmp_path} is a folder: name a file, such as {tmp_path}/report.html'):
    write_report(f'--workdir={trained_copy}', f'--output={tmp_path}')
  output = tmp_path / 'file' / 'x.html'
  with bad_input(f'--output={output} cannot be written: check the path and its permissions'):
    write_report(f'--workdir={trained_copy}', f'--output={output}')
  with bad_input('--split=none is not one of: train, validation, test'):
    write_report(f'--workdir={trained_copy}', '--split=none')
  with monkeypatch.context() as patch, bad_input('tokens=0 must be a whole number from 1 on'):
    patch.setitem(report.ANALYSES, 'clusters', lambda *_: pytest.fail('before the samples'))
    write_report(f'--workdir={trained_copy}', '--tokens=0')
  with pytest.raises(ValueError, match='there 1 times, but --workdir 2 times'):
    write_report(f'--workdir={trained_copy}', f'--workdir={trained_copy}', '--label=a')
  (trained_copy / 'evaluation').mkdir()
  (trained_copy / 'evaluation' / 'test.json').write_text('{"step": 4, "per')
  with bad_input(
    f'{trained_copy}/evaluation/test.json is damaged: Unterminated string starting at: line 1 '
    f'column 13 (char 12); evaluate it again'
  ):
    write_report(f'--workdir={trained_copy}')
  shutil.rmtree(trained_copy / 'evaluation')
  (trained_copy / 'metrics.jsonl').write_text('')
  with bad_input(f'--workdir={trained_copy} has logged no step yet'):
    write_report(f'--workdir={trained_copy}')
  assert sorted(trained_copy.rglob('*')) == before


def test_points_are_where_their_values_are():
  line = charts.Line('a', [(10.0, 1.0), (20.0, 100.0), (30.0, 10.0)], color=9)
  chart = charts.line_chart([line], charts.Axis('x'), charts.Axis('y', is_log=True))
  (path,) = re.findall('class="line" d="M(.*?)"', chart)
  places = np.array([place.split() for place in path.split('L')], float)
  x_tick = {t: float(p) for p, t in re.findall('class="x" style="left:(.*?)%">(.*?)<', chart)}
  y_tick = {t: float(p) for p, t in re.findall('class="y" style="top:(.*?)%">(.*?)<', chart)}
  np.testing.assert_allclose(places[:, 0], [x_tick[t] for t in ('10', '20', '30')], atol=0.02)
  np.testing.assert_allclose(places[:, 1], [y_tick[t] for t in ('1', '100', '10')], atol=0.02)
  assert (places > 0).all() and (places < 100).all() and 'class="c1"' in chart

  narrow = charts.Line('c', [(0.0, 11.0), (1.0, 19.0)], color=0)  # no 1, 2 or 5 times 10^n
  chart = charts.line_chart([narrow], charts.Axis('x'), charts.Axis('y', is_log=True))
  assert re.findall('class="y".*?>(.*?)<', chart) == ['12', '14', '16', '18']

  long = charts.Line('b', [(i, 5.0) for i in range(1001)], charts.INK, has_dots=False)
  names = [str(i) for i in range(1001)]
  chart = charts.line_chart([line, long], charts.Axis('x', names=names), charts.Axis('y'))
  shown = re.findall(r'<title>b: (\d+), 5<', chart)
  assert len(shown) <= charts.MAX_POINTS and shown[-1] == '1000'
  assert len(re.findall('class="x"', chart)) <= charts.MAX_TICKS


HARNESS = """<iframe id=a style="width:{width}px;height:900px;border:0" src="{page}"></iframe>
<pre id=out></pre><script>
window.onload = () => {{
  const d = document.getElementById('a').contentDocument, w = d.defaultView, main = d.body;
  d.querySelectorAll('details').forEach(x => x.open = true);
  const box = x => x.getBoundingClientRect();
  const outside = [...d.querySelectorAll('.plot span, .card, h2, .legend')].filter(
    x => box(x).left < 0 || box(x).right > {width} + 0.5 || !box(x).width);
  const dots = [...d.querySelectorAll('.dots path')].filter(
    x => box(x).top < box(x.closest('svg')).top - 9 || box(x).right > {width});
  document.getElementById('out').textContent = JSON.stringify({{
    overflow: d.documentElement.scrollWidth - {width}, outside: outside.length + dots.length,
    charts: d.querySelectorAll('svg').length, background: w.getComputedStyle(main).backgroundColor,
    columns: new Set([...d.querySelectorAll('header .card')].map(x => box(x).left)).size}});
}}</script>"""


def browse(page, folder, width, *flags):
  """What a browser measures of a page, shown at a width."""
  harness = folder / 'harness.html'
  harness.write_text(HARNESS.format(width=width, page=page.as_uri()))
  shown = browser.dump_dom(harness.as_uri(), folder / 'browser', width, *flags)
  return json.loads(re.search('<pre id="out">(.*?)</pre>', shown)[1])


def test_a_browser_shows_it_on_a_phone_and_a_desk(pair, tmp_path):
  phone = browse(pair[0], tmp_path, 390)
  desk = browse(pair[0], tmp_path, 1400, '--blink-settings=preferredColorScheme=0')
  for shown in (phone, desk):
    assert shown['overflow'] <= 0 and not shown['outside'] and shown['charts'] == 8
  assert phone['columns'] == 1 and desk['columns'] == 2
  assert phone['background'] != desk['background']  # light and dark
