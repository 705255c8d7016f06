"""`analyze report`: the HTML, its numbers, and how a browser shows it."""

import html.parser
import json
import re
import shutil

import jax
import numpy as np
import pytest

from ngrammer_jax import analyze, runs
from ngrammer_jax.analysis import (
  attention,
  clusters,
  elements,
  ngrams,
  report,
  report_metrics,
  report_page,
  spans,
)
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.training import programs
from ngrammer_jax.training.records import writers
from tests import browser
from tests.checks import bad_input

VOID = ('meta', 'wbr')
LABELS = ('<b>"first"&amp;', "second's $^$")


class Page(html.parser.HTMLParser):
  """Checks that a page is self-contained and well-formed, and collects what it shows.

  By the id of a section: `tables` has the rows of its tables, `figures` the names of its images,
  `titles` what is shown under the pointer, and `texts` all of its text.
  """

  def __init__(self, text):
    super().__init__()
    self.open, self.ids, self.links, self.used, self.section = [], [], [], [], ''
    self.tables, self.titles, self.texts, self.figures = {}, {}, {}, {}
    self.feed(text)
    assert not self.open, 'elements that are not closed'
    assert len(set(self.ids)) == len(self.ids)
    assert {*self.links, *self.used} <= {f'#{i}' for i in self.ids}
    style = re.search('<style>(.*)</style>', text, re.DOTALL)[1]
    assert not re.search(r'url\(|@import|http|<', style)

  def handle_starttag(self, tag, attributes):
    attributes = dict(attributes)
    assert tag not in ('script', 'link', 'img', 'image', 'iframe', 'object', 'base', 'form')
    assert not {a for a in attributes if a.startswith('on')} | ({'src', 'action'} & set(attributes))
    self.ids += [attributes['id']] if 'id' in attributes else []
    self.links += [attributes['href']] if 'href' in attributes else []
    self.used += [attributes['xlink:href']] if 'xlink:href' in attributes else []
    self.used += re.findall(r'url\((.*?)\)', attributes.get('clip-path', ''))
    if tag == 'section':
      self.section = attributes['id']
    if tag == 'svg':
      assert attributes['role'] == 'img'
      self.figures.setdefault(self.section, []).append(attributes['aria-label'])
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
    write_report(
      f'--workdir={trained_copy}',
      f'--workdir={other}',
      *labels,
      f'--output={page}',
      f'--figure={tmp_path}/pages/curves.svg',
    )
    assert 'Validation loss' in (tmp_path / 'pages' / 'curves.svg').read_text()
    PAIR.append((page, collected, trained_copy))
  return PAIR[0]


def test_two_runs_side_by_side(pair):
  path, (found, other), first = pair
  text = path.read_text()
  page = Page(text)
  sections = ['curves', 'metrics', 'configs', 'samples', 'clusters', 'ngrams', 'attention']
  assert page.links == [f'#{name}' for name in sections] and list(page.texts)[1:] == sections
  assert report_page.format_page([found, other]) == text  # the same bytes
  assert page.figures['curves'] == ['nats per token by training tokens'] * 2
  shares = 'sharing a row (%; dots: heads)'
  assert page.figures['ngrams'] == ['rows (%) by visits of a row', shares] * 2
  assert len(page.figures['clusters']) == 4 and len(page.figures['attention']) == 2
  assert 'stroke: #000000' not in text and 'currentColor' in text and 'var(--c1)' in text
  records = [record for _, record in writers.read_lines(first)]
  from matplotlib import figure

  panels = figure.Figure().subplots(1, 2)
  report_page.plot_curves([found, other], panels)
  for key, axes in zip(('validation/nll_nats_per_token', 'loss'), panels, strict=True):
    for name, line in zip(LABELS, axes.lines, strict=True):
      expected = np.transpose([(r['step'] * 128, r[key]) for r in records if key in r])
      np.testing.assert_allclose(line.get_data(), expected)
      assert page.texts['curves'].count(name) == 3  # the note and two legends

  metrics = {name: cells for name, *cells in page.tables['metrics']}
  params = runs.load_run(first).state.params
  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  assert metrics[''] == list(LABELS) and metrics['parameters'] == [f'{count:,}'] * 2
  assert metrics['of these in tables'] == [f'{2 * 64 * 4:,}'] * 2
  run = runs.load_run(first)
  step = programs.Programs(run.config, run.vocabulary_size, run.mesh)
  assert metrics['FLOPs per token'] == [f'{step.flops.forward():,.0f}'] * 2
  last = records[-1]
  assert metrics['training loss'] == [f'{expected[1][-1]:.4f}'] * 2
  nats = f'{last["validation/nll_nats_per_token"]:.4f}'
  assert metrics['nats per token (validation in training)'] == [nats] * 2
  assert metrics['bits per byte (test, evaluated)'] == ['–', '1.2346']
  assert metrics['nats per token (test, evaluated)'] == ['2.1000', '2.0000']
  assert metrics['step (test, evaluated)'] == ['12', '8']
  assert metrics['tokens (test, evaluated)'] == ['1,234', '1,234']
  before_evaluation = report_metrics.run_metrics(runs.load_run(first, 4), [])
  assert not [name for name in before_evaluation if 'evaluated' in name]
  assert 'perplexity (test, evaluated)' not in metrics
  assert re.findall('<td class=best>(.*?)<', text) == ['2.0000', '60.00%']
  losses = {'a': report_metrics.Metric('1', 1, min, 10), 'b': report_metrics.Metric('2', 2, min, 9)}
  shown = [found._replace(name=name, metrics={'loss': loss}) for name, loss in losses.items()]
  assert not report_page._metrics_table(shown).elements[0].best  # on other tokens
  metrics = report_metrics.split_metrics('test', {'step': 1, 'tokens': 9, 'bits_per_byte': 1.0})
  assert metrics['bits per byte (test)'].tokens is None
  bits = f'{last["validation/bits_per_byte"]:.4f}'
  assert re.findall('class="headline">(.*?) <', text) == [bits] * 2
  assert page.tables['configs'] == [
    ['key', *LABELS],
    ['evaluation.max_tokens', 'None', '64'],
    ['seed', '0', '7'],
  ]
  assert page.texts['configs'].count('model.ngram.clusters=8') == 2

  rows = [[*row] for row in clusters.elements(found.results['clusters'])[1].rows]
  assert [row for row in page.tables['clusters'] if len(row) == len(rows[0])] == rows * 2
  rows = [[*row] for row in ngrams.elements(found.results['ngrams'])[0].rows]
  assert page.tables['ngrams'] == rows * 2
  assert page.tables['attention'] == attention.elements(found.results['attention'])[0].rows * 2
  completions = runs.load_run(first).generate(['', ''], 4)
  assert found.samples == [('', completion.text) for completion in completions]
  for _, text in found.samples:
    assert text in page.texts['samples']


def test_runs_with_one_label_are_their_mean_in_the_curves(pair):
  _, (found, other), _ = pair
  seeds = [
    found._replace(name='$x', records=[{'step': 2, 'loss': 3.0}, {'step': 4, 'loss': 2.0}]),
    other._replace(name='$x', records=[{'step': 2, 'loss': 5.0}, {'step': 6, 'loss': 1.0}]),
    found._replace(name='one', color=2, records=[{'step': 6, 'loss': 1.5}]),
  ]
  from matplotlib import figure

  _, axes = panels = figure.Figure().subplots(1, 2)
  report_page.plot_curves(seeds, panels)
  mean, one = axes.lines
  assert (mean.get_label(), one.get_label()) == (r'\$x', 'one')
  assert mean.get_xydata().tolist() == [[2 * 128, 4.0]]  # step 4 and 6 are of one run each
  assert one.get_xydata().tolist() == [[6 * 128, 1.5]] and one.get_color() == 'C2'


@pytest.fixture
def spans_and_gates(one_device, tiny, untrained):
  """The workdir of a model with learned spans, persistent vectors and gates."""
  gated = NGramMemoryConfig(key='tokens', layers=(0,), orders=(2,), heads=1, rows=(31,), width=4)
  return untrained(
    tiny(
      {
        'ngram': None,
        'ngram_memories': (gated,),
        'feed_forward_width': 0,
        'memory': model_config.MemoryConfig(16, same_length='memory_and_self'),
        'span': model_config.SpanConfig(limit=16, ramp=4, kind='dynamic', initial=0.0),
        'persistent': model_config.PersistentConfig(3),
      }
    )
  )


def test_flops_are_those_of_the_recorded_spans(spans_and_gates):
  run = runs.load_run(spans_and_gates)
  assert not [name for name in report_metrics.run_metrics(run, []) if 'FLOPs' in name]
  recorded = report_metrics.run_metrics(run, [{'step': 4, 'flops_per_token': 5000.0}])
  assert recorded['FLOPs per token'].text == '5,000'


@pytest.mark.slow
def test_a_run_with_spans_and_gates(spans_and_gates, collected):
  workdir = spans_and_gates
  (workdir / 'metrics.jsonl').write_text('{"step": 4, "loss": 2.5}\n')
  write_report(f'--workdir={workdir}', '--prompt=the <i>', '--label=spans')
  page = Page((workdir / 'report.html').read_text())
  names = ['curves', 'metrics', 'configs', 'samples', 'ngrams', 'gates', 'spans', 'attention']
  assert page.links == [f'#{name}' for name in names]
  assert page.texts['samples'].count('the <i>') == 2
  (found,) = collected
  assert not [name for name in found.metrics if 'FLOPs' in name]  # its spans were not recorded
  result = found.results['spans']
  rows = spans.table_rows(result['spans'], ',.0f') + spans.table_rows(result['persistent'], '.1%')
  assert page.tables['spans'] == rows
  assert page.figures['spans'] == [
    'span (tokens) by layer',
    'share of attention on persistent vectors by layer',
  ]
  shown = result['along']['spans'][: elements.MAX_SHOWN_TOKENS]
  assert page.titles['spans'] == [f'{value:.0f}' for value in shown]
  (gate,) = found.results['gates']['gates']
  shown = gate['values'][: elements.MAX_SHOWN_TOKENS]
  assert page.titles['gates'] == [f'{value:.3f}' for value in shown]
  assert page.figures['gates'] == ['tokens of validation (%) by gate']
  best = gate['ngrams'][2][0]
  row = [repr(best['text']), f'{best["gate"]:.3f}', f'{best["count"]:,}']
  assert page.tables['gates'][3] == row


def test_a_report_that_fails_writes_nothing(one_device, trained_copy, tmp_path, monkeypatch):
  before = sorted(trained_copy.rglob('*'))
  (tmp_path / 'file').write_text('')
  with bad_input(f'--output={tmp_path} is a folder: name a file, such as {tmp_path}/report.html'):
    write_report(f'--workdir={trained_copy}', f'--output={tmp_path}')
  output = tmp_path / 'file' / 'x.html'
  with bad_input(f'--output={output}: {output.parent} is a file, expected a folder'):
    write_report(f'--workdir={trained_copy}', f'--output={output}')
  with bad_input('--split=none is not one of: train, validation, test'):
    write_report(f'--workdir={trained_copy}', '--split=none')
  with monkeypatch.context() as patch, bad_input('tokens=0 must be a whole number from 1 on'):
    patch.setattr(clusters, 'analyze', lambda *_: pytest.fail('before the samples'))
    write_report(f'--workdir={trained_copy}', '--tokens=0')
  with pytest.raises(ValueError, match='given 1 times, but --workdir 2 times'):
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


def test_records_that_cannot_be_read_are_named_before_the_checkpoint_is(trained_copy, monkeypatch):
  monkeypatch.setattr(runs.Run, 'state', property(lambda run: pytest.fail('read the checkpoint')))
  metrics = trained_copy / 'metrics.jsonl'
  lines = metrics.read_bytes()
  metrics.write_bytes(b'[]\n' + lines)
  with bad_input(
    f'--workdir={trained_copy} has a damaged metrics.jsonl, line 1: expected an object of numbers '
    f'with a step; delete this line'
  ):
    write_report(f'--workdir={trained_copy}')
  metrics.write_bytes(lines + b'{"step": 1')  # is being written
  assert len(report_metrics.read_metrics(trained_copy)) == len(lines.splitlines())
  metrics.unlink()
  with bad_input(f'--workdir={trained_copy} has no metrics.jsonl: training has not started'):
    write_report(f'--workdir={trained_copy}')


HARNESS = """<iframe id=a style="width:{width}px;height:900px;border:0" src="{page}"></iframe>
<pre id=out></pre><script>
window.onload = () => {{
  const d = document.getElementById('a').contentDocument, w = d.defaultView, main = d.body;
  d.querySelectorAll('details').forEach(x => x.open = true);
  const box = x => x.getBoundingClientRect();
  const outside = [...d.querySelectorAll('svg, .card, h2, h4, summary')].filter(
    x => box(x).left < 0 || box(x).right > {width} + 0.5 || !box(x).width);
  document.getElementById('out').textContent = JSON.stringify({{
    overflow: d.documentElement.scrollWidth - {width}, outside: outside.length,
    ink: w.getComputedStyle(d.querySelector('svg text')).fill,
    background: w.getComputedStyle(main).backgroundColor,
    columns: new Set([...d.querySelectorAll('header .card')].map(x => box(x).left)).size}});
}}</script>"""


def browse(page, folder, width, *flags):
  """What a browser measures of a page, shown at a width."""
  harness = folder / 'harness.html'
  harness.write_text(HARNESS.format(width=width, page=page.as_uri()))
  shown = browser.dump_dom(harness.as_uri(), folder / 'browser', width, *flags)
  return json.loads(re.search('<pre id="out">(.*?)</pre>', shown)[1])


def test_a_browser_shows_it_on_a_phone_and_a_desk(pair, tmp_path):
  phone = browse(pair[0], tmp_path, 360)
  desk = browse(pair[0], tmp_path, 1400, '--blink-settings=preferredColorScheme=0')
  for shown in (phone, desk):
    assert shown['overflow'] <= 0 and not shown['outside']
  assert phone['columns'] == 1 and desk['columns'] == 2
  assert phone['background'] != desk['background'] and phone['ink'] != desk['ink']  # light, dark
