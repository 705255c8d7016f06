"""Compares `analyze ngrams`, `gates` and `retention` with slow loops."""

import collections
import copy
import dataclasses
import html.parser
import json
import re
import types

import flax.traverse_util
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import analyze, runs
from ngrammer_jax import config as experiment
from ngrammer_jax.analysis import gates, lookups, ngrams, retention
from ngrammer_jax.config import evaluation as evaluation_config
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.config.ngram.value_gate import ValueGateConfig
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.data.vocabularies import ByteVocabulary
from tests.checks import bad_input
from tests.ngram_rows import numpy_rows

WIDTH, START = 16, 256
TOKENS = 96  # a multiple of the segment length 16, so that one program is compiled
GATED = NGramMemoryConfig(
  key='tokens', layers=(0,), orders=(2, 3), heads=2, rows=(31,), width=4, norm_epsilon=1e-6
)

ONE_LAYER = {'layers': 1, 'ngram': None, 'ngram_memories': (GATED,)}


@pytest.fixture
def texts(monkeypatch):
  """All splits of all runs: random tokens out of five, in several documents."""
  rng = np.random.default_rng(0)

  def make(tokens, *starts):
    ids = rng.choice(list(b'ab\n<&'), tokens, p=[0.4, 0.2, 0.1, 0.1, 0.2]).astype(np.uint16)
    ids[np.array(starts) - 1] = START  # separates documents
    return token_split.TokenSplit(ids, np.array([0, *starts]), None, START)

  splits = {'validation': make(TOKENS, 20, 50, 77), 'train': make(500, 123)}
  monkeypatch.setattr(runs.Run, 'split', lambda run, name: splits[name])
  return splits


def windows(text, longest, fill):
  """For each input of a text, its id and those before it in its document, or `fill`."""
  inputs = [START, *text.tokens[:-1].tolist()]
  for t in range(len(inputs)):
    first = max(start for start in text.starts if start <= t)
    yield [inputs[t - place] if t - place >= first else fill for place in range(longest)]


def signed(number):
  number %= 2**64
  return number - 2**64 if number >= 2**63 else number


def check_head(head, row_of_ngram, ngrams_T, table_rows):
  """Compares the statistics of a head with loops over n-grams and rows."""
  rows_T = [row_of_ngram(ngram) for ngram in ngrams_T]
  ngrams_in = collections.defaultdict(set)
  for ngram, row in zip(ngrams_T, rows_T, strict=True):
    ngrams_in[row].add(ngram)
  visits = collections.Counter(collections.Counter(rows_T).values())
  bins = [0] * (max(visits).bit_length())
  for count, rows in visits.items():
    bins[count.bit_length() - 1] += rows
  distinct, other = len(set(ngrams_T)), 1 - 1 / table_rows
  assert (head['table_rows'], head['rows']) == (table_rows, len(ngrams_in))
  assert (head['distinct'], head['visits']) == (distinct, bins)
  assert head['never'] == sum(row not in ngrams_in for row in range(table_rows))
  sharing = {n for n in ngrams_T if len(ngrams_in[row_of_ngram(n)]) > 1}
  assert head['shared_ngrams'] == pytest.approx(len(sharing) / distinct)
  assert head['shared'] == pytest.approx(np.mean([n in sharing for n in ngrams_T]))
  assert head['random_rows'] == pytest.approx(table_rows * (1 - other**distinct))
  assert head['random_shared_ngrams'] == pytest.approx(1 - other ** (distinct - 1))


def test_ngrams_of_three_memories(one_device, tiny, untrained, texts, capsys):
  compressed = {'key': 'compressed', 'layers': (0,), 'fill_id': 7}
  memories = (
    NGramMemoryConfig(**compressed, orders=(2, 3), heads=2, rows=(31,), width=4),
    NGramMemoryConfig(
      key='clusters', join='sum', orders=(1, 2), heads=2, rows=(13,), clusters=4, width=WIDTH
    ),
  )
  workdir = untrained(tiny({'layers': 1, 'ngram_memories': memories}))
  analyze.main(['ngrams', f'--workdir={workdir}'])
  result, printed = json.loads((workdir / 'ngrams.json').read_text()), capsys.readouterr().out
  assert (workdir / 'ngrams.png').stat().st_size > 1000 and 'never visited' in printed
  assert (result['step'], result['split'], result['tokens']) == (4, 'validation', TOKENS)
  found = {table['name']: table for table in result['tables']}
  assert {name: table['hash'] for name, table in found.items()} == {
    'ngrammer': 'praxis',
    'ngram_memory_1': 'engram',
    'layer_0/ngram_memory_0': 'engram',
  }
  run, text = runs.load_run(workdir), texts['validation']

  heads = iter(found['ngrammer']['heads'])
  for n, prime in enumerate((67, 71)):  # those above the 64 rows
    clusters = run.token_clusters[:, n].tolist()
    grams = [
      tuple(0 if x is None else clusters[x] for x in window) for window in windows(text, 2, None)
    ]
    row_of = lambda gram, n=n, prime=prime: ((gram[0] + 8 * gram[1] + 1) * (n + 1)) % prime % 64
    check_head(next(heads), row_of, grams, 64)

  codebook = run.restored.codebook['layer_0']['ngram_memory_0']
  classes = np.asarray(codebook['token_classes']).tolist()
  factors = [int(high) << 32 | int(low) for high, low in np.asarray(codebook['multipliers'])]
  heads = found['layer_0/ngram_memory_0']['heads']
  places = [(head['order'], head['head']) for head in heads]
  assert places == [(2, 0), (2, 1), (3, 0), (3, 1)]
  for head, prime in zip(heads, (31, 37, 41, 43), strict=True):
    grams = [tuple(classes[x] for x in window) for window in windows(text, head['order'], 7)]

    def row_of(gram, prime=prime):
      mix = 0
      for x, factor in zip(gram, factors, strict=False):
        mix ^= x * factor
      return signed(mix) % prime

    check_head(head, row_of, grams, prime)

  # The clusters are those of hidden states: their ids are read from the model.
  table = next(table for table in lookups.ngram_tables(run) if table.name == 'ngram_memory_1')
  ids, rows_TxI = lookups.read(run, text, TOKENS)['ngram_memory_1']
  np.testing.assert_array_equal(rows_TxI, numpy_rows(table.hash, ids))
  for (i, head), rows in zip(
    enumerate(found['ngram_memory_1']['heads']), (13, 17, 19, 23), strict=True
  ):
    order, n = head['order'], head['head']
    grams = [tuple(int(ids[s][t, n]) for s in range(order)) for t in range(TOKENS)]
    row_of_gram = dict(zip(grams, rows_TxI[:, i].tolist(), strict=True))
    assert (order, n) == ((1, 0), (1, 1), (2, 0), (2, 1))[i]
    check_head(head, row_of_gram.__getitem__, grams, rows)


def gate_of(params, numpy_hash, window):
  """The gate of a token by the formula; the first block reads the scaled embedding."""
  memory = params['layer_0']['ngram_memory_0']
  ids = [np.array([x]) for x in window]
  first = np.cumsum([0, *np.ravel(numpy_hash.sizes)])[:-1]
  e = np.asarray(memory['table'], float)[numpy_rows(numpy_hash, ids) + first].ravel()
  rms = lambda x: x / np.sqrt((x**2).mean() + 1e-6)
  h = np.asarray(params['embedding'], float)[window[0]] * WIDTH**0.5
  k = e @ np.asarray(memory['gate']['key']['kernel'], float)[:, 0]
  scale = lambda name: np.asarray(memory['gate'][name]['scale'], float)[0]
  s = (rms(k) * scale('key_norm')) @ (rms(h) * scale('query_norm')) / WIDTH**0.5
  return 1 / (1 + np.exp(-np.sign(s) * np.sqrt(max(abs(s), 1e-6))))


class Spans(html.parser.HTMLParser):
  """The texts and titles of the tokens of a page."""

  def __init__(self, page):
    super().__init__()
    self.tokens, self.title = [], None
    self.feed(page)

  def handle_starttag(self, tag, attributes):
    self.title = dict(attributes).get('title')

  def handle_data(self, data):
    if self.title is not None:
      self.tokens.append((data, self.title))

  def handle_endtag(self, tag):
    self.title = None


def test_gates_of_a_text_and_of_ngrams(one_device, tiny, untrained, texts, monkeypatch, capsys):
  monkeypatch.setattr(gates, 'MIN_COUNT', 3)
  workdir = untrained(tiny(ONE_LAYER))
  shown = 'a<b> & "a"\nb&b;'
  analyze.main(['gates', f'--workdir={workdir}', f'--text={shown}'])
  result, printed = json.loads((workdir / 'gates.json').read_text()), capsys.readouterr().out
  assert (workdir / 'gates.png').stat().st_size > 1000 and 'with the highest mean gate' in printed
  (gate,) = result['gates']
  cells = printed.splitlines()[3].split()
  assert cells == [gate['name'], f'{gate["mean"]:.3f}', f'{gate["deviation"]:.3f}']
  assert gate['name'] == 'layer_0/ngram_memory_0' and result['tokens'] == TOKENS
  run = runs.load_run(workdir)
  (table,) = lookups.ngram_tables(run)
  text = token_split.TokenSplit(np.array([*shown.encode(), 0]), np.array([0]), None, START)
  expected = [gate_of(run.restored.params, table.hash, w) for w in windows(text, 3, 0)]
  np.testing.assert_allclose(gate['values'], expected, rtol=1e-4)
  assert result['texts'] == ['', *shown]
  page = (workdir / 'gates.html').read_text()
  visible = ['¶', *shown.replace('\n', '↵')]
  tokens = [(token.replace('↵\n', '↵'), float(title)) for token, title in Spans(page).tokens]
  assert [token for token, _ in tokens] == visible
  np.testing.assert_allclose([value for _, value in tokens], expected, atol=6e-4)
  assert '>&lt;</span>' in page and '>&amp;</span>' in page
  assert '--share:0.000' in page and '--share:1.000' in page

  validation = texts['validation']
  values = [gate_of(run.restored.params, table.hash, w) for w in windows(validation, 3, 0)]
  assert gate['mean'] == pytest.approx(np.mean(values), rel=1e-4)
  assert gate['deviation'] == pytest.approx(np.std(values), rel=1e-3)
  assert sum(gate['histogram']) == TOKENS
  for order in (2, 3):
    by_ngram = collections.defaultdict(list)
    for window, value in zip(windows(validation, order, None), values, strict=True):
      if None not in window:
        by_ngram[bytes(x for x in reversed(window) if x != START).decode(), *window].append(value)
    frequent = {n: v for n, v in by_ngram.items() if len(v) >= 3}
    highest = sorted(frequent, key=lambda n: -np.mean(frequent[n]))
    assert 2 < len(highest) < len(by_ngram)
    listed = gate['ngrams'][str(order)]
    assert [(n['text'], n['count']) for n in listed] == [(n[0], len(frequent[n])) for n in highest]
    means = [np.mean(frequent[n]) for n in highest]
    np.testing.assert_allclose([n['gate'] for n in listed], means, rtol=1e-4)
  written = {file: file.read_bytes() for file in workdir.glob('gates.*')}
  analyze.main(['gates', f'--workdir={workdir}', f'--figure={workdir.parent / "other" / "g.svg"}'])
  assert {file: file.read_bytes() for file in workdir.glob('gates.*')} == written
  files = sorted((workdir.parent / 'other').iterdir())
  assert [file.name for file in files] == ['g.html', 'g.json', 'g.svg']
  shown_tokens = json.loads(files[1].read_text())  # of the split itself
  np.testing.assert_allclose(shown_tokens['gates'][0]['values'], values, rtol=1e-4)


@pytest.mark.full
def test_gates_of_a_pretrained_model(one_device, tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(gates, 'MAX_TOKENS', 256)
  text = 'The state of the Union is strong.'
  figure = tmp_path / 'gates.png'
  command = ['gates', '--pretrained=state_of_the_union', f'--text={text}']
  with bad_input(
    '--pretrained=state_of_the_union has no run directory for the results: name their file with '
    '--figure=gates.png'
  ):
    analyze.main(command)
  analyze.main([*command, f'--figure={figure}'])
  result = json.loads(figure.with_suffix('.json').read_text())
  assert ''.join(result['texts']) == text and figure.exists()
  assert capsys.readouterr().out.startswith('state_of_the_union, step 3,000, validation\n')


@pytest.mark.full
def test_gates_and_retention_of_rows_in_values(one_device, tiny, untrained, texts):
  """Each head has a gate, and is shown without its factor."""
  values = dict(point='values', layers=(0,), join='sum', width=None)
  tokens = NGramMemoryConfig(
    **values,
    **dict(orders=(1,), heads=1, hash='id', row_rule='vocabulary'),
    value_gate=ValueGateConfig(channels=5, initial=9.0),
  )
  hashed = NGramMemoryConfig(
    **values | {'width': 3, 'projection': True},
    **dict(heads=2, rows=(31,), hash='salted', row_rule='shared_prime'),
    value_gate=ValueGateConfig(channels=5, per_head=False),
  )
  workdir = untrained(tiny({'ngram': None, 'ngram_memories': (tokens, hashed)}))
  for name in ('gates', 'retention', 'ngrams'):
    analyze.main([name, f'--workdir={workdir}'])
  found = json.loads((workdir / 'gates.json').read_text())['gates']
  run = runs.load_run(workdir)
  heads = run.config.model.heads
  names = [f'layer_0/ngram_memory_0/head_{head}' for head in range(heads)]
  assert [gate['name'] for gate in found] == [*names, 'layer_0/ngram_memory_1']
  params = run.restored.params
  ids = [window[0] for window in windows(texts['validation'], 1, 0)]
  x = np.asarray(params['embedding'], float)[ids] * WIDTH**0.5
  x = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-6)
  norm = params['layer_0']['attention_norm']
  x = x * np.asarray(norm['scale'], float) + np.asarray(norm['bias'], float)
  weights = np.asarray(params['layer_0']['ngram_memory_0']['values']['gate_weights'], float)
  expected = 1 / (1 + np.exp(-(x[:, :5] @ weights)))
  np.testing.assert_allclose([gate['values'] for gate in found[:heads]], expected.T, rtol=1e-4)
  changes = json.loads((workdir / 'retention.json').read_text())['changes']
  of_hashed = {each['change'] for each in changes if each['memory'] == 'ngram_memory_1'}
  assert of_hashed == {'removed', 'zero', 'exchanged'}  # its orders have the same rows


def losses(run, text, params):
  """The losses of a text in two streams, each read as a document."""
  half, variables, scored = len(text.tokens) // 2, {**run.variables, 'params': params}, []
  for first, start in ((0, START), (half, int(text.tokens[half - 1]))):
    part = text.tokens[first : first + half].astype(np.int32)
    scored += [*run.engine.score_documents(variables, [part], start, 16)]
  return np.concatenate(scored)


def test_retention(one_device, tiny, untrained, texts, monkeypatch, capsys):
  monkeypatch.setattr(retention, 'COUNTS', (0, 1, 4, 16))
  validation, train = (
    token_split.TokenSplit(texts[name].tokens, np.array([0]), None, START)
    for name in ('validation', 'train')
  )
  texts |= {'validation': validation, 'train': train}
  streams = evaluation_config.EvaluationConfig(streams=2)
  workdir = untrained(tiny(ONE_LAYER, evaluation=streams))
  analyze.main(['retention', f'--workdir={workdir}'])
  result, printed = json.loads((workdir / 'retention.json').read_text()), capsys.readouterr().out
  assert (workdir / 'retention.png').stat().st_size > 1000 and '16 or more' in printed
  assert (result['tokens'], result['train_tokens']) == (TOKENS, 500)
  run = runs.load_run(workdir)
  (table,) = lookups.ngram_tables(run)
  loss_T = losses(run, validation, run.restored.params)
  assert result['loss'] == pytest.approx(loss_T.mean(), rel=1e-5)

  exchanged = retention._exchange(run, table, lookups.read(run, validation, TOKENS)[table.name])
  rows = {'exchanged': exchanged}
  before = np.asarray(run.restored.params['layer_0']['ngram_memory_0']['table'])
  for change, zeros in (('zero', (0, 152)), ('order 2 zero', (0, 68)), ('order 3 zero', (68, 152))):
    rows[change] = before.copy()
    rows[change][slice(*zeros)] = 0
  assert len(before) == 31 + 37 + 41 + 43
  assert {each['change'] for each in result['changes']} == {'removed', *rows}
  for each in result['changes']:
    params, changed = copy.deepcopy(run.restored.params), run
    if each['change'] == 'removed':
      del params['layer_0']['ngram_memory_0']
      model = dataclasses.replace(run.config.model, ngram_memories=())
      changed = dataclasses.replace(run, config=dataclasses.replace(run.config, model=model))
    else:
      params['layer_0']['ngram_memory_0']['table'] = rows[each['change']]
    increase_T = losses(changed, validation, params) - loss_T
    assert each['loss'] == pytest.approx((loss_T + increase_T).mean(), rel=1e-5)
    order = 2 if each['change'] == 'order 2 zero' else 3
    assert each['order'] == order and each['memory'] == 'ngram_memory_0'
    counts = collections.Counter(map(tuple, windows(train, order, None)))
    groups = collections.defaultdict(list)
    for t, window in enumerate(windows(validation, order, None)):
      groups[max(c for c in (0, 1, 4, 16) if c <= counts[tuple(window)])].append(t)
    assert len(groups) == 4
    sizes = {count: len(groups[count]) for count in (0, 1, 4, 16)}
    assert {group['count']: group['tokens'] for group in each['groups']} == sizes
    for group in [group for group in each['groups'] if group['tokens']]:
      members = groups[group['count']]
      assert group['loss'] == pytest.approx(loss_T[members].mean(), rel=1e-4)
      assert group['increase'] == pytest.approx(increase_T[members].mean(), rel=1e-3, abs=1e-5)
      share = increase_T[members].sum() / increase_T.sum()
      assert group['share'] == pytest.approx(share, rel=1e-2, abs=1e-2)


@pytest.mark.full
def test_a_memory_is_removed_and_the_others_stay(tiny, untrained):
  """Memories are numbered, so that those after it have other names."""
  others = dataclasses.replace(GATED, layers=(1,)), dataclasses.replace(GATED, heads=1)
  memories = others[0], GATED, others[1]
  run = runs.load_run(untrained(tiny({'ngram_memories': memories})))
  without, variables = retention.remove(run, 'ngram_memory_1')
  assert without.config.model.ngram_memories == others
  before, after = run.restored.params, variables['params']
  first, second = before['layer_1']['ngram_memory_0'], before['layer_0']['ngram_memory_2']
  assert after['layer_1']['ngram_memory_0']['table'] is first['table']
  assert after['layer_0']['ngram_memory_1']['table'] is second['table']
  assert 'ngram_memory_2' not in after['layer_0'] and after['ngrammer'] == before['ngrammer']
  assert after['embedding'] is before['embedding']
  without, variables = retention.remove(run, 'ngrammer')
  assert without.config.model.ngram is None and without.config.model.ngram_memories == memories
  assert variables['params'].keys() == before.keys() - {'ngrammer'} and not variables['codebook']


def _make_neutral(params, codebook):
  """The memories of the next test change nothing: what they add is 0."""
  del codebook
  for path, leaf in flax.traverse_util.flatten_dict(params, sep='/').items():
    if re.search('product_memory/table|bucket_(scale|vector)|/taps|persistent/gate', path):
      *modules, name = path.split('/')
      node = params
      for module in modules:
        node = node[module]
      node[name] = jnp.zeros_like(leaf)


@pytest.mark.full
def test_every_memory_is_removed(one_device, tiny, untrained, texts, capsys):
  """Memories that change nothing leave the same loss; without the segment memory it is another.

  Product keys in place of a feed-forward are not removed.
  """
  model = {
    'ngram': None,
    'copy_memory': experiment.CopyMemoryConfig(window=8),
    'token_shift': experiment.TokenShiftConfig(),
    'persistent': experiment.PersistentConfig(3, 'attention_split', start='neutral'),
    'memory': experiment.MemoryConfig(length=6, same_length='memory_and_self'),
    'span': experiment.SpanConfig('adaptive', limit=6, ramp=2),
  }
  keys = experiment.ProductMemoryConfig(
    layers=(1,), point='beside_feed_forward', sub_keys=4, heads=2, top=3, key_width=4
  )
  workdir = untrained(tiny(model | {'product_memory': keys}), _make_neutral)
  analyze.main(['retention', f'--workdir={workdir}'])
  result = json.loads((workdir / 'retention.json').read_text())
  losses = {each['memory']: each['loss'] for each in result['changes']}
  assert {each['change'] for each in result['changes']} == {'removed'}
  neutral = ('product_memory', 'copy_memory', 'token_shift', 'persistent')
  assert losses.keys() == {*neutral, 'memory', 'span'}
  for name in neutral:
    assert losses[name] == pytest.approx(result['loss'], rel=1e-6), name
  assert losses['memory'] != pytest.approx(result['loss'], rel=1e-4)
  run = runs.load_run(workdir)
  without, _ = retention.remove(run, 'memory')
  assert without.config.model.memory is None and without.config.model.span is None
  in_place = dataclasses.replace(keys, point='in_place_of_feed_forward')
  changed = dataclasses.replace(run.config.model, product_memory=in_place)
  needs_it = dataclasses.replace(run, config=dataclasses.replace(run.config, model=changed))
  params = copy.copy(run.restored.params)
  params['layer_1'] = {k: v for k, v in params['layer_1'].items() if k != 'feed_forward'}
  vars(needs_it)['restored'] = run.restored._replace(params=params)
  assert retention.remove(needs_it, 'product_memory') is None


@pytest.mark.full
def test_a_shared_table_is_analysed_once_and_its_gates_in_each_layer(
  one_device, tiny, untrained, texts
):
  """It is removed with all memories that read it."""
  shared = dataclasses.replace(GATED, table='grams')
  memories = (
    dataclasses.replace(shared, layers=(0, 1)),
    dataclasses.replace(GATED, layers=(1,)),
    dataclasses.replace(shared, layers=(1,)),
  )
  workdir = untrained(tiny({'ngram': None, 'ngram_memories': memories}))
  for name in ('ngrams', 'gates', 'retention'):
    analyze.main([name, f'--workdir={workdir}'])
  results = {
    name: json.loads((workdir / f'{name}.json').read_text())
    for name in ('ngrams', 'gates', 'retention')
  }
  tables = {table['name'] for table in results['ngrams']['tables']}
  assert tables == {'ngram_table_grams', 'layer_1/ngram_memory_1'}
  readers = {'layer_0/ngram_memory_0', 'layer_1/ngram_memory_0', 'layer_1/ngram_memory_2'}
  gates_found = {gate['name'] for gate in results['gates']['gates']}
  assert gates_found == readers | {'layer_1/ngram_memory_1'}
  changed = {change['memory'] for change in results['retention']['changes']}
  assert changed == {'ngram_table_grams', 'ngram_memory_1'}
  run = runs.load_run(workdir)
  without, variables = retention.remove(run, 'ngram_table_grams')
  assert without.config.model.ngram_memories == (memories[1],)
  before, after = run.restored.params, variables['params']
  assert after.keys() == before.keys() - {'ngram_table_grams'}
  kept = before['layer_1']['ngram_memory_1']['table']
  assert after['layer_1']['ngram_memory_0']['table'] is kept
  assert not any(name.startswith('ngram_memory') for name in after['layer_0'])


def test_exchanged_rows_are_those_of_other_tokens():
  heads = [lookups.Head(2, 0, 0, 5), lookups.Head(2, 1, 5, 4)]
  table = types.SimpleNamespace(subtree=lambda params: params['memory'], heads=lambda: heads)
  params = {'memory': {'table': np.arange(9.0)[:, None]}}
  run = types.SimpleNamespace(restored=types.SimpleNamespace(params=params))
  rows_TxI = np.array([[0, 3], [2, 1], [2, 1], [4, 1]])
  changed = retention._exchange(run, table, lookups.Lookups((), rows_TxI))[:, 0]
  for first, visited, rows in ((0, {0, 2, 4}, 5), (5, {3, 1}, 4)):
    for row, value in enumerate(changed[first : first + rows] - first):
      assert value in visited - {row} if row in visited else value == row


def test_groups_without_tokens_are_null():
  groups = retention._group(np.array([0, 5, 5]), np.ones(3), np.array([0.0, 1.0, 2.0]))
  filled = [group for group in groups if group['tokens']]
  assert [(g['count'], g['tokens'], g['increase'], g['share']) for g in filled] == [
    (0, 1, 0.0, 0.0),
    (4, 2, 1.5, 1.0),
  ]
  empty = [group for group in groups if not group['tokens']]
  assert {group[key] for group in empty for key in ('loss', 'increase', 'share')} == {None}
  unchanged = retention._group(np.array([0]), np.ones(1), np.array([4e-5]))
  assert unchanged[0]['share'] is None


def test_runs_without_such_a_memory_raise_bad_input(tiny, tmp_path, monkeypatch, texts):
  monkeypatch.setattr(runs.Run, 'vocabulary', ByteVocabulary())
  make = lambda *memories: runs.Run(
    tmp_path / 'run', tiny({'ngram': None, 'ngram_memories': memories})
  )
  without = f'--workdir={tmp_path / "run"} has no '
  for analysis in (ngrams, gates):
    with bad_input(without + 'n-gram memory: it needs model.ngram_memories or model.ngram'):
      analysis.analyze(make())
  with bad_input(
    without + 'memory: it needs one of model.ngram, model.ngram_memories, model.product_memory, '
    'model.copy_memory, model.token_shift, model.memory, model.span, model.persistent'
  ):
    retention.analyze(make())
  summed = NGramMemoryConfig(join='sum', width=WIDTH)
  missing = 'gate: it needs model.ngram_memories with join="gate", or with value_gate'
  with bad_input(without + missing):
    gates.analyze(make(summed))
  with bad_input("--text='' has no tokens: omit it for the tokens of --split"):
    gates.analyze(make(GATED), text='')
