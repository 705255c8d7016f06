"""The tables of docs/results.md about the runs of results.jsonl, and the table of the README."""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
import functools
import itertools
import math
import statistics

from studies import (
  cells,
  context,
  frequency,
  intervals,
  ngram_memories,
  recurrent,
  state_of_the_union,
)
from studies.markdown import format_difference, format_mean, markdown
from studies.results import Loss, Rates, Result, bits_per_byte, validation_nats

README_MODELS = {  # rows of the table of the README
  'plain': 'a smaller Transformer',
  'wide': 'a Transformer with a wider feed-forward',
  'untied': 'a Transformer with an untied output embedding',
  'ngrammer': 'N-Grammer',
  'over_encoding': 'Over-Encoding',
  'engram': 'Engram',
}
BYTES_PER_VALUE = 4  # of a table, in float32
ACCUMULATOR_TABLE_RATE = 0.01  # that of all runs with an accumulator of 0.1
BASELINE = 'wide'  # the Transformer with as many parameters as the memories
# Columns of losses: of whole splits in bits per byte, of short runs in nats per token.
WHOLE_SPLITS = {
  'validation': functools.partial(bits_per_byte, split='validation'),
  'test': bits_per_byte,
}
FIRST_TOKENS = {'validation, nats': validation_nats}


def progress_table(results: Sequence[Result]) -> str:
  """Formats the finished and the missing runs of each table, and the time of their training."""
  missing = collections.Counter(cell.table for cell in cells.missing_cells(results))
  finished = collections.Counter(r['table'] for r in results)
  hours = collections.Counter()
  for r in results:
    hours[r['table']] += r['training_seconds'] / 3600
  rows = [('runs', 'finished', 'planned', 'core hours of training')]
  for table in dict.fromkeys([*finished, *missing]):
    counts = finished[table], finished[table] + missing[table]
    rows.append((table.replace('_', ' '), *map(str, counts), f'{hours[table]:.1f}'))
  counts = finished.total(), finished.total() + missing.total()
  return markdown([*rows, ('all', *map(str, counts), f'{hours.total():.1f}')])


def model_table(
  results: Sequence[Result],
  models: Iterable[str],
  *baselines: str,
  losses: Mapping[str, Loss] = WHOLE_SPLITS,
) -> str:
  """Formats one row for each model and learning rate that has a result.

  Args:
    results: runs.
    models: models of the rows.
    *baselines: models from which the differences of the last loss are shown.
    losses: what is shown of a run, by name of the column.
  """
  columns = 'model', 'parameters', 'tables, MB', 'MFLOPs a token', 'learning rate', 'seeds'
  rows = [(*columns, *losses, *(f'minus {b}' for b in baselines))]
  by_model = {b: [r for r in results if r['model'] == b] for b in baselines}
  *_, last = losses.values()
  for model, own in _group_by_rates(results, models):
    first = own[0]
    rows.append(
      (
        f'`{model}`',
        f'{first["parameters"]:,}',
        f'{first["table_bytes"] / 1e6:.1f}',
        f'{first["flops_per_token"] / 1e6:.2f}',
        str(Rates.of(first)),
        str(len(own)),
        *(format_mean([loss(r) for r in own]) for loss in losses.values()),
        *('' if b == model else format_difference(own, by_model[b], last) for b in baselines),
      )
    )
  return markdown(rows)


def readme_table(results: Sequence[Result], baseline: str = 'untied') -> str:
  """Formats the table of the README, with intervals of 95 %.

  Args:
    results: runs of the main table.
    baseline: model from which the differences are shown.
  """
  rows = [
    (
      'variant',
      'model',
      'parameters (in tables)',
      'MFLOPs a token',
      'test, bits per byte',
      f'minus `{baseline}`',
    )
  ]
  losses = {}
  for model in README_MODELS:
    losses[model] = {r['seed']: bits_per_byte(r) for r in results if r['model'] == model}
  for model, text in README_MODELS.items():
    first = next(r for r in results if r['model'] == model)
    parameters = first['parameters'] / 1e6
    in_tables = first['table_bytes'] / BYTES_PER_VALUE / 1e6
    difference = ''
    if model != baseline:
      difference = str(intervals.paired_difference(losses[model], losses[baseline]))
    rows.append(
      (
        f'`{model}`',
        text,
        f'{parameters:.2f}M ({in_tables:.2f}M)',
        f'{first["flops_per_token"] / 1e6:.2f}',
        str(intervals.mean_interval(list(losses[model].values()))),
        difference,
      )
    )
  return markdown(rows)


def _group_by_rates(
  results: Sequence[Result], models: Iterable[str]
) -> Iterator[tuple[str, list[Result]]]:
  """Yields each model with its runs of equal learning rates."""
  for model in models:
    groups = collections.defaultdict(list)
    for r in results:
      if r['model'] == model:
        groups[Rates.of(r)].append(r)
    yield from ((model, runs) for runs in groups.values())


def noise(
  *tables: Iterable[Result], loss: Loss = bits_per_byte, unit: str = 'bits per byte of test'
) -> str:
  """Formats the standard deviation between seeds, pooled over all runs that differ only in them.

  Args:
    *tables: runs that differ in their model, learning rates or seed. Runs of two tables may also
      differ in other things.
    loss: loss of a run.
    unit: unit of the loss.
  """
  groups = collections.defaultdict(list)
  for number, results in enumerate(tables):
    for r in results:
      groups[number, r['model'], Rates.of(r)].append(loss(r))
  repeated = [losses for losses in groups.values() if len(losses) > 1]
  freedom = sum(len(losses) - 1 for losses in repeated)
  if not freedom:
    return 'No run has been repeated yet.'
  squares = sum((len(losses) - 1) * statistics.variance(losses) for losses in repeated)
  deviation = math.sqrt(squares / freedom)
  return (
    f'Runs that differ only in the seed differ by {deviation:.4f} {unit} (standard deviation, '
    f'pooled over {len(repeated)} groups of runs, {freedom} degrees of freedom), so a difference '
    f'of two single runs has noise of {math.sqrt(2) * deviation:.4f}.'
  )


def memory_table(results: Sequence[Result]) -> str:
  """Formats test bits per character: as trained, minus `none`, and by segments of memory."""

  def bits(result: Result, split: str = 'test') -> float:
    return result[split]['bits_per_character']

  lengths = {f'memory of {s}': f'test, memory {s}' for s in cells.MEMORY_SEGMENTS}
  columns = 'model', 'parameters', 'MFLOPs a token', 'learning rate', 'seeds', 'as trained'
  rows = [(*columns, 'minus none', *lengths)]
  without = [r for r in results if r['model'] == 'none']
  for model, own in _group_by_rates(results, ('none', *context.MEMORIES)):
    first = own[0]
    by_length = ([bits(r, name) for r in own if name in r] for name in lengths.values())
    rows.append(
      (
        f'`{model}`',
        f'{first["parameters"]:,}',
        f'{first["flops_per_token"] / 1e6:.2f}',
        str(Rates.of(first)),
        str(len(own)),
        format_mean([bits(r) for r in own]),
        '' if model == 'none' else format_difference(own, without, bits),
        *(format_mean(values) if values else '' for values in by_length),
      )
    )
  return markdown(rows)


def span_table(results: Sequence[Result]) -> str:
  """Formats validation bits per character, FLOPs and time of a step by span."""
  rows = [
    ('model', 'parameters', 'MFLOPs a token', 'learning rate', 'seconds a step', 'validation')
  ]
  for r in sorted(results, key=lambda r: (context.VARIANTS.index(r['model']), Rates.of(r))):
    step = f'{r["training_seconds"] / r["steps"]:.2f}'
    flops = f'{r["flops_per_token"] / 1e6:.2f}'
    bits = f'{validation_nats(r) / math.log(2):.4f}'  # a character is a token
    parameters = f'{r["parameters"]:,}'
    rate = str(Rates.of(r))
    rows.append((f'`{r["model"]}`', parameters, flops, rate, step, bits))
  return markdown(rows)


def recurrent_table(results: Sequence[Result]) -> str:
  """Formats the perplexity of the attention LSTMs."""
  rows = [('model', 'parameters', 'steps', 'validation', 'test')]
  for r in sorted(results, key=lambda r: list(recurrent.VARIANTS).index(r['model'])):
    perplexities = (f'{r[split]["perplexity"]:.1f}' for split in cells.WHOLE_SPLITS)
    rows.append((f'`{r["model"]}`', f'{r["parameters"]:,}', f'{r["steps"]:,}', *perplexities))
  return markdown(rows)


def frequency_table(results: Sequence[Result]) -> str:
  """Formats the losses of the baseline by the count of the bigram, and differences from them."""
  by_model = collections.defaultdict(list)
  for r in results:
    by_model[r['model']].append(r)
  baseline = by_model.pop(BASELINE, [])
  controls = 'engram_unigrams', 'engram_with_unigrams'
  models = [model for model in (*ngram_memories.METHODS, *controls) if model in by_model]
  rows = [('bigram in training', 'share', f'`{BASELINE}`', *(f'`{model}`' for model in models))]
  names = ['never', *(f'{a:,} to {b - 1:,}' for a, b in itertools.pairwise(frequency.BOUNDS))]
  names.append(f'{frequency.BOUNDS[-1]:,} or more')
  if not baseline:
    return markdown(rows)
  for i, name in enumerate(names):

    def nats(result: Result, i: int = i) -> float:
      return result['nats'][i]

    share = baseline[0]['targets'][i] / sum(baseline[0]['targets'])
    differences = (format_difference(by_model[model], baseline, nats) for model in models)
    rows.append((name, f'{share:.1%}', format_mean([nats(r) for r in baseline]), *differences))
  return markdown(rows)


def tuning_table(results: Sequence[Result], models: Iterable[str], key: str) -> str:
  """Formats the validation loss in nats a token of every learning rate that was tried."""
  nats = {(r['model'], r[key]): validation_nats(r) for r in results}
  if len(nats) < len(results):
    raise ValueError(f'a model was tuned twice with the same {key}')
  rates = sorted({rate for _, rate in nats})
  rows = [('model', *(f'{rate:g}' for rate in rates))]
  for model in models:
    tried = [nats.get((model, rate)) for rate in rates]
    rows.append((f'`{model}`', *('' if n is None else f'{n:.4f}' for n in tried)))
  return markdown(rows)


def rate_table(results: Sequence[Result]) -> str:
  """Formats test bits per byte of runs of all steps by learning rate, the tuned rates first."""
  rows = [('model', 'learning rate', 'seeds', 'test')]
  other_rates = cells.OTHER_RATES | cells.OTHER_TABLE_RATES
  models = [model for model in ngram_memories.METHODS if model in other_rates]
  for model, own in _group_by_rates(results, models):
    bits = format_mean([bits_per_byte(r) for r in own])
    rows.append((f'`{model}`', str(Rates.of(own[0])), str(len(own)), bits))
  return markdown(rows)


def accumulator_table(results: Sequence[Result], others: Sequence[Result]) -> str:
  """Formats test bits per byte of the memories by the first accumulator of their Adagrad."""
  rows = [('model', 'accumulator 0.1', '0, tuned learning rate', 'difference')]
  for model in ngram_memories.ROWS:
    after = [r for r in results if r['model'] == model]
    dense_rates = {r['learning_rate'] for r in after}
    own = [r for r in others if r['model'] == model and r['learning_rate'] in dense_rates]
    if own:
      scores = (format_mean([bits_per_byte(r) for r in part]) for part in (own, after))
      rows.append((f'`{model}`', *scores, format_difference(after, own)))
  return markdown(rows)


def accumulator_alone_table(tuning: Sequence[Result], others: Sequence[Result]) -> str:
  """Formats validation nats after the tuning by the first accumulator, with equal rates."""
  rates = Rates(ngram_memories.LEARNING_RATE, ACCUMULATOR_TABLE_RATE)
  rows = [('model', 'accumulator 0.1', '0', 'difference')]
  for model in ngram_memories.ROWS:
    after = [r for r in tuning if r['model'] == model and Rates.of(r) == rates]
    before = [r for r in others if r['model'] == model and r['learning_rate'] == rates.dense]
    if after and before:
      scores = (format_mean([validation_nats(r) for r in part]) for part in (before, after))
      rows.append((f'`{model}`', *scores, format_difference(after, before, validation_nats)))
  return markdown(rows)


def format_tables(results: Sequence[Result]) -> dict[str, str]:
  """Returns the tables of the runs of results.jsonl by name."""

  def select(table: str) -> list[Result]:
    return [r for r in results if r['table'] == table]

  main = select('main')
  controls = select('controls')
  dense = [method for tuning in cells.TUNING.values() for method in tuning.methods]
  of_dense = [r for r in select('tuning') if r['model'] in dense]
  of_tables = [r for r in select('tuning') if r['model'] not in dense]
  long_controls = dict.fromkeys(r['model'] for r in select('long_controls'))
  sizes = [f'{method}_{scale}' for method in cells.SCALED for scale in ngram_memories.SCALES]
  best = cells.best_method(results)
  baselines = cells.baselines(results)
  combined = dict.fromkeys(r['model'] for r in select('combined'))
  short_table = functools.partial(model_table, losses=FIRST_TOKENS)
  tables = {
    'progress': progress_table(results),
    'tuning': tuning_table(of_dense, dense, 'learning_rate'),
    'tuning of tables': tuning_table(of_tables, ngram_memories.ROWS, 'table_learning_rate'),
    'rates': rate_table(main + select('rates')),
    'accumulator': accumulator_table(main, select('accumulator')),
    'accumulator alone': accumulator_alone_table(select('tuning'), select('accumulator_tuning')),
    'noise': noise(main + select('rates'), select('accumulator')),
    'noise of short runs': noise(baselines + controls, loss=validation_nats, unit='nats per token'),
    'main': model_table(main, ngram_memories.METHODS, *ngram_memories.TRANSFORMERS),
    'present day': model_table(
      select('present_day'),
      ('untied', 'engram', *ngram_memories.PRESENT_DAY),
      'untied',
      ngram_memories.LLAMA,
    ),
    'combined': short_table(
      baselines + select('combined'), dict.fromkeys([BASELINE, best, *combined]), BASELINE
    ),
    'sizes': short_table(baselines + select('sizes'), ['plain', *cells.SCALED, *sizes], 'plain'),
    'long controls': model_table(
      main + select('long_controls'), ['engram', *long_controls], 'engram'
    ),
    'memory': memory_table(select('memory')),
    'spans': span_table([r for r in baselines if r['model'] == 'memory'] + select('spans')),
    'recurrent': recurrent_table(select('recurrent')),
    'state of the union': model_table(
      select('state_of_the_union'), state_of_the_union.METHODS, 'wide'
    ),
  }
  for method in cells.CONTROLLED:
    own = dict.fromkeys(r['model'] for r in controls if r['model'].startswith(f'{method}_'))
    models = [method, *own, 'plain']
    tables[f'controls of {method}'] = short_table(baselines + controls, models, method)
  methods = ((cells.method_of(model), model) for model in cells.OTHER_CONTROLS)
  models = ['plain', *itertools.chain(*methods)]
  tables['other controls'] = short_table(baselines + controls, models, 'plain')
  return tables
