"""The studies: models of equal size, the order of runs, and the tables that are made of results."""

import itertools
import json
import pathlib

import numpy as np
import pytest

from ngrammer_jax import command_line, config, errors
from ngrammer_jax.data.tokens import token_split
from studies import (
  cells,
  context,
  frequency,
  markdown,
  ngram_memories,
  plots,
  pretrained,
  pretrained_tables,
  report,
  state_of_the_union,
  study_tables,
)
from studies import results as study_results
from tests import test_configs
from tests.loops import each

STUDIES = pathlib.Path(__file__).resolve().parents[1] / 'studies'


def result(table, model, seed, bits, rate=0.004, table_rate=None):
  """Returns a line of results.jsonl."""
  rates = cells.Rates(rate, table_rate)
  scores = {
    split: {'bits_per_byte': bits, 'nll_nats_per_token': bits} for split in ('validation', 'test')
  }
  cell = cells.Cell(table, model, seed, rates, 500 if table == 'tuning' else None)
  sizes = {
    'parameters': 10,
    'table_bytes': 4_000_000,
    'flops_per_token': 2_000_000,
    'training_seconds': 1800,
    'steps': 500,
  }
  names = {'cell': cell.name, 'table': table, 'model': model, 'seed': seed}
  return names | {'learning_rate': rate, 'table_learning_rate': table_rate} | sizes | scores


def tuned_results(best=0.004, best_of_tables=0.03):
  dense = [
    result('tuning', method, 0, 2.0 + abs(rate - best), rate)
    for tuning in cells.TUNING.values()
    for method, rate in itertools.product(tuning.methods, tuning.learning_rates)
  ]
  rates = itertools.product(ngram_memories.ROWS, cells.TABLE_LEARNING_RATES)
  return dense + [
    result('tuning', method, 0, 2.0 + abs(rate - best_of_tables), best, rate)
    for method, rate in rates
  ]


def count(spec, words=None):
  params, _ = test_configs.counts(STUDIES / spec, words)
  return params


def memory_of(variant):
  (memory,) = ngram_memories.get_config(variant).model.ngram_memories
  return memory


@pytest.mark.slow
def test_all_memories_have_equal_parameters():
  expected = count('ngram_memories.py:ngrammer')
  methods = 'wide', *ngram_memories.ROWS
  # A method for each control.
  pairs = zip(itertools.cycle(methods), ngram_memories.MEMORY_LENGTHS, strict=False)
  combined = [f'{method}_{control}' for method, control in pairs]
  wider = [f'{method}_{ngram_memories.WIDER_ROWS}' for method in ngram_memories.LATENT]
  others = *ngram_memories.PRESENT_DAY, 'engram_with_unigrams', *ngram_memories.UNTRAINED
  for method in (*ngram_memories.METHODS[1:], *combined, *wider, *others):
    assert count(f'ngram_memories.py:{method}') == pytest.approx(expected, rel=1e-3), method
  assert count('ngram_memories.py:plain') < 0.7 * expected


def test_spans_limit_the_tokens_before():
  memory, learned, fixed = (
    config.resolve(ngram_memories.get_config(f'engram_{control}')).model
    for control in ('segment_memory', 'learned_spans', 'span_64')
  )
  assert learned.span.limit == memory.memory.length == learned.memory.length == 256
  assert fixed.memory.window() == fixed.memory.length + 1 == 65
  assert memory.memory.window() is memory.span is fixed.span is None
  assert not learned.memory.sees_itself() and not fixed.memory.sees_itself()


@each('method', list(ngram_memories.ROWS))
def test_tables_of_unigrams_have_as_many_rows(method):
  whole, unigrams = (memory_of(variant) for variant in (method, f'{method}_unigrams'))
  assert unigrams.orders == (1,) and (unigrams.rows, unigrams.width) == (whole.rows, whole.width)
  assert len(whole.orders) * whole.heads == unigrams.heads


def test_controls_change_what_they_say():
  engram = memory_of('engram')
  for control, changes in ngram_memories.controls('engram').items():
    if changes.get('orders') == (1,):
      changes = changes | {'heads': 4}
    elif control == 'with_unigrams':  # equal parameters, see above
      changes = changes | {'rows': (10_646,)}
    expected = dict(engram) | changes
    assert dict(memory_of(f'engram_{control}')) == expected and expected != dict(engram), control
  for scale, rows in {'quarter': 4024, 'four_times': 64_388}.items():
    assert dict(memory_of(f'engram_{scale}')) == dict(engram) | {'rows': (rows,)}
  assert memory_of('ngrammer_few_rows').rows == (24,)


@pytest.mark.full
def test_persistent_vectors_replace_the_feed_forward_at_equal_parameters():
  all_attention, feed_forward = (
    count(f'context.py:{model}', 27) for model in ('all_attention', 'span_256')
  )
  assert all_attention == pytest.approx(feed_forward, rel=1e-3)


def test_configs_have_the_tuned_rates():
  results = study_results.read(study_results.RUNS)
  for method in (*ngram_memories.METHODS, ngram_memories.LLAMA):
    c = ngram_memories.get_config(method)
    tables = c.optimizer.table.learning_rate if method in ngram_memories.ROWS else None
    assert cells.tuned_rates(results, method) == (c.optimizer.learning_rate, tables), method
  for model in cells.TUNING['context'].methods:
    rate = context.get_config(model).optimizer.learning_rate
    assert cells.tuned_rates(results, model) == (rate, None), model
  runs = [r for r in results if (r['table'], r['model']) == ('state_of_the_union', 'engram')]
  best = min(runs, key=lambda run: study_results.bits_per_byte(run, 'validation'))
  table = state_of_the_union.get_config('engram').optimizer.table
  assert table.learning_rate == best['table_learning_rate']


@pytest.mark.parametrize(
  'variant', ['wide_frozen', 'plain_segment_memory', 'engramfrozen', 'ngrammer_plain_join', 'lstm']
)
def test_unknown_variants_are_refused(variant):
  with pytest.raises(errors.BadInput, match=f"^no variant '{variant}'"):
    ngram_memories.get_config(variant)


@pytest.mark.full
def test_every_cell_has_a_config():
  todo = list(cells.missing_cells(tuned_results()))
  assert len({cell.name for cell in todo}) == len(todo)
  models = {cell.model for cell in todo}
  assert models > {'engram_frozen', 'ngrammer_few_rows', 'over_encoding_four_times', 'adaptive'}
  folder = pathlib.Path('/data')
  for cell in {cell.model: cell for cell in todo}.values():
    (_, spec, *flags), *_ = cell.commands(folder, folder / cell.name)
    overrides, _ = command_line.split(flags)
    command_line.resolve(spec.removeprefix('--config='), overrides)


def test_learning_rates_are_tuned_before_the_other_runs():
  results = tuned_results(0.008)
  untuned = {'recurrent', 'state_of_the_union'}
  assert {cell.table for cell in cells.missing_cells([])} == {'tuning', *untuned}
  ready = list(cells.missing_cells(results[1:]))  # a rate of `plain` has not been tried
  assert [c.name for c in ready if c.table == 'tuning'] == ['tuning.plain.lr0.004.seed0']
  assert {cell.model for cell in ready if cell.table == 'main'} == {'wide', 'untied'}
  first = next(cell for cell in cells.missing_cells(results) if cell.table == 'main')
  assert (first.model, first.seed, first.rates) == ('plain', 0, (0.008, None))
  assert '--config.optimizer.learning_rate=0.008' in first.flags
  done = [*results, result('main', 'plain', 0, 1.0, 0.008)]
  assert next(c for c in cells.missing_cells(done) if c.table == 'main').model == 'wide'


def test_memories_have_the_learning_rate_of_the_transformer_and_one_for_tables():
  results = tuned_results(0.008, 0.1)
  dense = [line for line in results if line['table_learning_rate'] is None]
  tuning = [cell for cell in cells.missing_cells(dense) if cell.table == 'tuning']
  assert len(tuning) == 20 and tuning[2].name == 'tuning.ngrammer.lr0.008.tables0.1.seed0'
  assert tuning[2].flags[-2] == '--config.optimizer.table.learning_rate=0.1'
  rates = {c.rates for c in cells.missing_cells(results) if c.table in ('sizes', 'controls')}
  assert rates == {cells.Rates(0.008, 0.1), cells.Rates(0.008)}
  untuned = {c.model for c in cells.missing_cells(results) if c.rates == cells.Rates(0.008)}
  controls = 'frozen', 'frozen_unit', 'adam', 'adam_times_5'
  assert {m for m in untuned if m.startswith('engram')} == {f'engram_{c}' for c in controls}
  others = [c.rates for c in cells.missing_cells(results) if c.table == 'rates']
  assert others[3:] == [(0.004, 0.1), (0.008, 0.3), (0.008, 1.0)]


def test_of_equal_learning_rates_the_lowest_is_used():
  losses = {0.004: 4.9, 0.008: 4.801, 0.016: 4.8}
  results = [result('tuning', 'plain', 0, loss, rate) for rate, loss in losses.items()]
  assert cells.best_rate(results, 'plain', (0.004, 0.008, 0.016)) == 0.008
  assert cells.best_rate(results, 'plain', (0.004, 0.008, 0.032)) is None


def test_tables_are_tuned_with_the_present_rate_of_the_transformer():
  old, dense = tuned_results(0.016, 0.01), tuned_results(0.004)
  tables = [line for line in old if line['table_learning_rate'] is not None]
  results = [line for line in dense if line['table_learning_rate'] is None] + tables
  assert cells.tuned_rates(results, 'plain') == (0.004, None)
  assert cells.tuned_rates(results, 'engram') is None  # its tables were tuned with 0.016
  assert cells.tuned_rates(dense, 'engram') == (0.004, 0.03)
  with pytest.raises(ValueError, match='tuned twice with the same table_learning_rate'):
    study_tables.tuning_table(
      [*tables, *tuned_results(0.004)[-20:]], ['engram'], 'table_learning_rate'
    )


def test_runs_with_other_learning_rates_are_shown():
  results = [*tuned_results(), result('main', 'engram', 0, 2.0, 0.008, 0.03)]
  results += [result('rates', 'engram', seed, 1.5 + seed, 0.016, 0.03) for seed in range(2)]
  rows = study_tables.format_tables(results)['rates'].splitlines()
  assert rows[2:] == [
    '| `engram` | 0.008, tables 0.03 | 1 | 2.0000 |',
    '| `engram` | 0.016, tables 0.03 | 2 | 2.0000 ± 6.3531 |',  # 12.706 x 0.5
  ]


def test_runs_with_other_learning_rates_are_not_joined():
  results = [result('main', 'engram', 0, 2.0 + rate, 0.008, rate) for rate in (0.03, 0.1)]
  results.append(result('main', 'plain', 0, 2.0, 0.008))
  rows = study_tables.model_table(results, ['plain', 'engram'], 'plain').splitlines()
  assert rows[3:] == [
    '| `engram` | 10 | 4.0 | 2.00 | 0.008, tables 0.03 | 1 | 2.0300 | 2.0300 | 0.0300 |',
    '| `engram` | 10 | 4.0 | 2.00 | 0.008, tables 0.1 | 1 | 2.1000 | 2.1000 | 0.1000 |',
  ]


def test_accumulators_are_compared_at_equal_learning_rates():
  results = [result('main', 'engram', seed, 1.8 + seed, 0.008, 0.03) for seed in range(2)]
  results += [result('accumulator', 'engram', 0, 1.9, rate) for rate in (0.008, 0.016)]
  row = study_tables.format_tables(results)['accumulator'].splitlines()[-1]
  assert row == '| `engram` | 1.9000 | 2.3000 ± 6.3531 | -0.1000 |'  # 12.706 x 0.5


def test_the_best_memory_is_combined_with_a_segment_memory():
  bits = {'ngrammer': 2.0, 'over_encoding': 1.8, 'engram': 1.7}
  results = [result('main', method, 0, value) for method, value in bits.items()]
  results.append(result('main', 'latent_engram', 1, 1.0))
  assert cells.best_method(results) is None
  results.append(result('main', 'latent_engram', 0, 1.9))
  assert cells.best_method(results) == 'engram'
  todo = [c for c in cells.missing_cells([*tuned_results(), *results]) if c.table == 'combined']
  methods = 'engram', 'wide'
  models = {f'{method}_{name}' for method in methods for name in ngram_memories.MEMORY_LENGTHS}
  assert sorted((c.model, c.seed) for c in todo) == sorted(itertools.product(models, cells.SEEDS))
  assert {c.steps for c in todo} == {500}


def test_baselines_of_short_runs_have_the_tuned_rates():
  runs = [*tuned_results(0.008, 0.1), result('controls', 'engram_frozen', 0, 2.5)]
  later = result('baselines', 'engram', 1, 2.0, 0.008, 0.1)
  assert cells.baselines([*runs, later])[-1] == later
  baselines = cells.baselines(runs)
  assert {r['model'] for r in baselines} >= {'plain', 'wide', 'engram', 'memory'}
  assert len(baselines) == len({r['model'] for r in baselines})
  assert {r['table_learning_rate'] for r in baselines if r['model'] == 'engram'} == {0.1}
  *_, control, plain = study_tables.format_tables(runs)['controls of engram'].splitlines()
  assert control.startswith('| `engram_frozen` |') and control.endswith('| 2.5000 | 0.5000 |')
  assert plain.startswith('| `plain` |') and plain.endswith('| 2.0000 | 0.0000 |')


def test_differences_are_paired_by_seed():
  plain, other = (2.0, 3.0, 7.0), (1.5, 2.0)
  results = [result('main', 'plain', seed, bits) for seed, bits in enumerate(plain)]
  results += [result('main', 'engram', seed, bits) for seed, bits in enumerate(other)]
  assert markdown.format_difference(results[3:], results[:3]) == '-0.7500 ± 3.1766'  # t is 12.706
  assert markdown.format_difference(results[3:], results[2:3]) == ''
  *_, row = study_tables.model_table(results, ['plain', 'wide', 'engram'], 'plain').splitlines()
  assert row == (
    '| `engram` | 10 | 4.0 | 2.00 | 0.004 | 2 | 1.7500 ± 3.1766 | 1.7500 ± 3.1766 '
    '| -0.7500 ± 3.1766 |'
  )


def split_of(tokens):
  return token_split.TokenSplit(np.asarray(tokens), np.zeros(1, np.int64), None, 0)


@pytest.mark.full
def test_bigrams_are_classified_by_their_count_in_training():
  rng = np.random.default_rng(0)
  train, test = rng.integers(0, 5, 400), rng.integers(0, 7, 60)
  expected = [0, 0]  # those after the start of the text
  for before, last in zip(test[:-2], test[1:-1], strict=True):
    count = sum((before, last) == pair for pair in itertools.pairwise(train[:-1]))
    expected.append(sum(count >= bound for bound in frequency.BOUNDS))
  assert {0, 1, 2} <= set(expected)
  classes = frequency.classify(split_of(train), split_of(test), 60)
  np.testing.assert_array_equal(classes[2:], expected[2:])


def test_losses_are_averaged_by_class():
  losses = frequency.mean_losses(np.array([0, 2, 2, 0, 5]), np.array([1.0, 2, 4, 5, 6]))
  assert losses == {'targets': [2, 0, 2, 0, 0, 1], 'nats': [3, 0, 3, 0, 0, 6]}


def test_losses_by_frequency_are_compared_by_seed():
  def line(model, seed, *nats):
    names = {'cell': f'{model}.{seed}', 'model': model, 'seed': seed}
    return names | {'targets': [0, 1, 2, 3, 4, 0], 'nats': [*nats, 0, 0]}

  losses = [
    line('wide', 0, 0, 4, 3, 2),
    line('engram', 0, 0, 3, 3, 3),
    line('engram', 1, 0, 9, 9, 9),
  ]
  rows = study_tables.frequency_table(losses).splitlines()
  assert rows[0] == '| bigram in training | share | `wide` | `engram` |'
  assert rows[3] == '| 1 to 9 | 10.0% | 4.0000 | -1.0000 |'


def test_a_segment_memory_is_compared_with_none_by_seed():
  bits = lambda value: {'bits_per_character': value}
  none = [result('memory', 'none', seed, 2.0) | {'test': bits(3 - seed)} for seed in range(2)]
  memory = result('memory', 'memory', 1, 2.0) | {'test': bits(1.5), 'test, memory 8': bits(1.25)}
  header, _, *rows = study_tables.memory_table([*none, memory]).splitlines()
  assert header.endswith(
    '| as trained | minus none | memory of 0 | memory of 1 | memory of 2 | '
    'memory of 4 | memory of 8 |'
  )
  assert rows[0].endswith('| 2 | 2.5000 ± 6.3531 |  |  |  |  |  |  |')
  assert rows[1].endswith('| 1 | 1.5000 | -0.5000 |  |  |  |  | 1.2500 |')


@pytest.mark.full
def test_figures_show_the_means_of_the_results(tmp_path):
  results = [result('main', m, s, 2 + s) for m in ngram_memories.METHODS for s in range(2)]
  results += [result('sizes', 'engram_quarter', 0, 2.7) | {'table_bytes': 1_000_000}]
  by_memory = {
    f'test, memory {n}': {'bits_per_character': 3 - n / 8} for n in cells.MEMORY_SEGMENTS
  }
  for model in ('none', *context.MEMORIES):
    line = result('memory', model, 0, 2.0) | {'test': {'bits_per_character': 3.5}}
    results.append(line | (by_memory if model != 'none' else {}))
  longer = [
    {
      'text': text,
      'documents': False,
      'segments': n,
      'sinks': sinks,
      'bits_per_byte': 1 + n + sinks,
    }
    for text, n, sinks in itertools.product(('enwik8', 'wikitext2'), (0, 1, 8), (0, 4))
    if n or not sinks
  ]
  plots.save_all(results, longer, [], tmp_path)
  names = {'results_main.png', 'results_sizes.png', 'results_longer.png'}
  assert {path.name for path in tmp_path.iterdir()} == names
  from matplotlib import pyplot

  figure = pyplot.figure()
  axes = figure.subplots(4)
  plots.draw_methods([r for r in results if r['table'] == 'main'], axes[0])
  assert [text.get_text() for text in axes[0].texts] == ['2.500'] * len(ngram_memories.METHODS)
  plots.draw_memories([r for r in results if r['table'] == 'memory'], axes[1])
  line = axes[1].get_lines()[0]
  assert line.get_ydata().tolist() == [3 - n / 8 for n in cells.MEMORY_SEGMENTS]
  plots.draw_sizes([r for r in results if r['table'] in ('main', 'sizes')], axes[2])
  (points,) = (line.get_xydata() for line in axes[2].get_lines() if line.get_label() == 'Engram')
  assert points.tolist() == [[1.0, 2.7], [4.0, 2.0]]
  plots.draw_longer(longer, axes[3])
  lines = {line.get_label(): line.get_xydata().tolist() for line in axes[3].get_lines()}
  assert lines['enwik8'] == [[0, 1], [1, 2], [8, 9]]
  assert lines['wikitext2, 4 sinks'] == [[0, 1], [1, 6], [8, 13]]
  pyplot.close(figure)


def test_progress_counts_finished_and_missing_runs():
  results = [*tuned_results(), *(result('main', 'plain', seed, 2.0) for seed in range(2))]
  rows = study_tables.progress_table(results).splitlines()
  assert rows[2] == '| tuning | 44 | 44 | 22.0 |' and '| main | 2 | 21 | 1.0 |' in rows
  assert '| spans | 0 | 9 | 0.0 |' in rows and rows[-1].startswith('| all | 46 |')


def test_commands_of_results_train_with_the_rates_of_their_lines():
  for line in study_results.read(study_results.RUNS):
    spec, *flags = line['command'].removeprefix('python -m ngrammer_jax.train ').split()
    overrides, _ = command_line.split([*flags, '--config.data.path=/data'])
    config = command_line.resolve(spec.removeprefix('--config='), overrides)
    rates = config.optimizer.learning_rate, config.seed, config.training.steps
    assert rates == (line['learning_rate'], line['seed'], line['steps']), line['cell']
    model = line['model']
    if model in ngram_memories.VARIANTS and ngram_memories.has_table_learning_rate(model):
      is_old = line['table'].startswith('accumulator')
      expected = (0.1, 0.01) if is_old else (0.0, line['table_learning_rate'])
      table = config.optimizer.table
      assert (table.accumulator, table.learning_rate) == expected, line['cell']


def test_noise_is_pooled_over_models():
  bits = {'plain': (1.0, 1.2), 'engram': (2.0, 2.0, 2.3), 'wide': (5.0,)}
  runs = [result('main', m, seed, b) for m, values in bits.items() for seed, b in enumerate(values)]
  runs.append(result('main', 'plain', 0, 9.0, 0.1))
  others = [result('accumulator', 'plain', 0, 9.0)]
  pooled = ((0.1**2 * 2) + (0.1**2 * 2 + 0.2**2)) / 3  # squares of 1 + 2 degrees of freedom
  assert study_tables.noise(runs, others) == (
    f'Runs that differ only in the seed differ by {pooled**0.5:.4f} bits per byte of test '
    f'(standard deviation, pooled over 2 groups of runs, 3 degrees of freedom), so a difference '
    f'of two single runs has noise of {(2 * pooled) ** 0.5:.4f}.'
  )
  assert study_tables.noise(runs[-1:], others) == 'No run has been repeated yet.'


def test_two_runs_of_a_seed_are_not_joined():
  runs = [result('main', 'plain', 0, 2.0, rate) for rate in (0.008, 0.016)]
  with pytest.raises(ValueError, match='plain has another run of seed 0'):
    markdown.format_difference([result('main', 'engram', 0, 2.0)], runs)


def test_the_page_has_the_tables_of_the_results():
  page = report.PAGE.read_text(encoding='utf-8')
  lines = study_results.read_all()
  assert markdown.replace_tables(page, report.format_tables(lines)) == page
  readme = report.README.read_text(encoding='utf-8')
  assert markdown.replace_tables(readme, report.format_readme_tables(lines)) == readme


def test_accuracies_without_fine_tuning_have_errors():
  line = {'task': 'cb', 'n': 100, 'accuracy': 50.0, 'majority_percent': 40.0, 'seconds': 9}
  line['hardware'] = 'a GPU'
  *_, first, second = pretrained_tables.zero_shot_table([line | {'f1': 30.0}, line]).splitlines()
  assert first == '| cb | 100 | 50.0 ± 5.0 | 40.0 | 30.0 | 9 | a GPU |'
  assert second == '| cb | 100 | 50.0 ± 5.0 | 40.0 |  | 9 | a GPU |'


def test_the_runs_of_a_pretrained_model_are_tuned_first():
  lines, names = [], []
  while todo := list(pretrained.missing_cells(lines)):
    keys = 'table', 'model', 'seed', 'learning_rate'
    line = {key: getattr(todo[0], key) for key in keys} | {'cell': todo[0].name}
    accuracy = 50.0 + 9 * (line['model'] == 'engram' and line['learning_rate'] == 1e-4)
    lines.append(line | {'accuracy': accuracy})
    names.append(todo[0].name)
  assert len(set(names)) == len(names) == 20 + 8 + 1 + 12
  assert names[:2] == ['cb.bare.lr2e-05.seed0', 'cb.bare.lr0.0001.seed0']
  assert {'rte.bare.lr2e-05.seed2', 'rte.engram.lr0.0001.seed2'} < set(names)
  assert 'rte_long.bare.lr2e-05.seed2' in names  # the lower of equals, whatever CB says
  assert names[-1] == 'continued.unigrams.lr3e-05.seed1'


def test_lines_of_a_pretrained_model(tmp_path):
  cell = pretrained.Cell('continued', 'frozen_table', 1, 3e-5)
  lines = {'step': 49, 'loss': 3.0}, {'step': 49, 'validation/nll_nats_per_token': 2.5}
  (tmp_path / 'metrics.jsonl').write_text(''.join(f'{json.dumps(line)}\n' for line in lines))
  line = pretrained.describe(cell, tmp_path)
  assert (line['steps'], line['nll_nats_per_token'], line['seed']) == (49, 2.5, 1)
  assert '--config.model.ngram_memories.0.optimizer=frozen' in line['command']


def test_tables_of_a_pretrained_model():
  run = {'table': 'cb', 'model': 'bare', 'learning_rate': 2e-5, 'n': 100}
  run |= {'majority_percent': 40.0, 'training_seconds': 9.0}
  runs = [run | {'seed': seed, 'accuracy': 60.0 + 20 * seed} for seed in range(2)]
  row = pretrained_tables.finetuning_table(runs, [{'task': 'cb', 'accuracy': 50.0}]).splitlines()[
    -1
  ]
  assert row == '| cb | `bare` | 2e-05 | 2 | 70.0 | 10.0 | 4.6 | 50.0 | 40.0 | 9 |'
  long = [r | {'table': 'rte_long'} for r in runs[:1]]
  row = pretrained_tables.finetuning_table(long, [{'task': 'rte', 'accuracy': 47.0}]).splitlines()[
    -1
  ]
  assert row == '| rte_long | `bare` | 2e-05 | 1 | 60.0 |  | 4.9 | 47.0 | 40.0 | 9 |'

  run |= {'table': 'continued', 'bits_per_byte': 1.5}
  runs = [run | {'seed': seed, 'nll_nats_per_token': 3.0 + seed} for seed in range(2)]
  other = {'model': 'engram', 'nll_nats_per_token': 2.5}
  row = pretrained_tables.continued_table([*runs, runs[0] | other]).splitlines()[-1]
  assert row == '| `engram` | 1 | 2.5000 | -0.5000 | 1.5000 | 9 |'

  line = {'text': 'enwik8', 'documents': False}
  lines = [line | {'segments': n, 'sinks': 0, 'bits_per_byte': 1 + n / 8} for n in (0, 8)]
  row = pretrained_tables.longer_table(lines).splitlines()[-1]
  assert row == '| enwik8 | one | 0 | 1.0000 |  |  |  | 2.0000 |'


def test_a_table_without_a_place_is_refused():
  filled = markdown.replace_tables('a\n<!-- main -->\nold\n<!-- end -->\nb', {'main': 'new'})
  assert filled == 'a\n<!-- main -->\nnew\n<!-- end -->\nb'
  with pytest.raises(ValueError, match='0 places for sizes, expected one'):
    markdown.replace_tables(filled, {'sizes': ''})


def test_a_line_that_a_killed_process_left_is_skipped(tmp_path):
  path = tmp_path / 'results.jsonl'
  assert study_results.read(path) == []
  study_results.append(path, {'seed': 0})
  with path.open('a') as file:
    file.write('{"seed": 1, "mod')
  study_results.append(path, {'seed': 2})
  assert [line['seed'] for line in study_results.read(path)] == [0, 2]
