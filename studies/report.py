"""Writes the tables and figures of docs/results.md: python -m studies.report

A table stands between two comments, `<!-- main -->` and `<!-- end -->`; all other text is kept.
"""

from collections.abc import Iterable, Mapping, Sequence
import itertools
import pathlib
import re
from typing import Any

from studies import (
  cells,
  context,
  frequency,
  ngram_memories,
  plots,
  recurrent,
  run,
  seeds,
  state_of_the_union,
)

PAGE = pathlib.Path(__file__).parents[1] / 'docs' / 'results.md'
BASELINE = 'plain'
TABLES = (
  *('tuning', 'main', 'controls', 'sizes', 'memory', 'spans', 'recurrent'),
  'state_of_the_union',
)
Result = Mapping[str, Any]


def markdown(rows: Sequence[Sequence[str]]) -> str:
  """Formats a table of Markdown, the header first."""
  header, *others = (f'| {" | ".join(row)} |' for row in rows)
  return '\n'.join([header, '|---' * len(rows[0]) + '|', *others])


def model_table(results: Sequence[Result], models: Iterable[str], baseline: str) -> str:
  """Formats one row for each model that has a result."""
  rows = [
    (
      *('model', 'parameters', 'tables, MB', 'MFLOPs a token', 'learning rate', 'seeds'),
      *('validation', 'test', f'test minus {baseline}'),
    )
  ]
  for model in models:
    own = [r for r in results if r['model'] == model]
    if not own:
      continue
    bits = {split: [r[split]['bits_per_byte'] for r in own] for split in cells.WHOLE_SPLITS}
    first = own[0]
    rows.append(
      (
        f'`{model}`',
        f'{first["parameters"]:,}',
        f'{first["table_bytes"] / 1e6:.1f}',
        f'{first["flops_per_token"] / 1e6:.2f}',
        f'{first["learning_rate"]:g}',
        str(len(own)),
        seeds.summarise(bits['validation']),
        seeds.summarise(bits['test']),
        seeds.difference(results, model, baseline),
      )
    )
  return markdown(rows)


def memory_table(results: Sequence[Result]) -> str:
  """Formats test bits per character by the memory of the evaluation, in segments."""
  lengths = [f'test, memory {segments}' for segments in cells.MEMORY_SEGMENTS]
  columns = [f'{s} segments' for s in cells.MEMORY_SEGMENTS]
  rows = [('model', 'parameters', 'seeds', 'as trained', *columns)]
  for model in ('none', *context.MEMORIES):
    own = [r for r in results if r['model'] == model]
    if own:
      bits = (
        [r[name]['bits_per_character'] for r in own if name in r] for name in ('test', *lengths)
      )
      scores = (seeds.summarise(values) if values else '' for values in bits)
      rows.append((f'`{model}`', f'{own[0]["parameters"]:,}', str(len(own)), *scores))
  return markdown(rows)


def span_table(results: Sequence[Result]) -> str:
  """Formats test bits per character, FLOPs and time of a step by span."""
  rows = [('model', 'parameters', 'MFLOPs a token', 'seconds a step', 'test')]
  for r in results:
    step = f'{r["training_seconds"] / r["steps"]:.2f}'
    flops = f'{r["flops_per_token"] / 1e6:.2f}'
    bits = f'{r["test"]["bits_per_character"]:.4f}'
    rows.append((f'`{r["model"]}`', f'{r["parameters"]:,}', flops, step, bits))
  return markdown(rows)


def recurrent_table(results: Sequence[Result]) -> str:
  """Formats the perplexity of the attention LSTMs."""
  rows = [('model', 'parameters', 'steps', 'validation', 'test')]
  for r in sorted(results, key=lambda r: recurrent.MODELS.index(r['model'])):
    perplexities = (f'{r[split]["perplexity"]:.1f}' for split in cells.WHOLE_SPLITS)
    rows.append((f'`{r["model"]}`', f'{r["parameters"]:,}', f'{r["steps"]:,}', *perplexities))
  return markdown(rows)


def frequency_table(results: Sequence[Result]) -> str:
  """Formats the losses of the baseline by the count of the bigram, and differences from them."""
  by_run = {(r['model'], r['seed']): r for r in results}
  models = [m for m in ngram_memories.METHODS if (m, 0) in by_run and m != BASELINE]
  rows = [('bigram in training', 'share', f'`{BASELINE}`', *(f'`{model}`' for model in models))]
  if (BASELINE, 0) not in by_run:
    return markdown(rows)
  targets = by_run[BASELINE, 0]['targets']
  for i, low in enumerate((0, *frequency.BOUNDS)):
    high = frequency.BOUNDS[i] - 1 if i < len(frequency.BOUNDS) else None
    name = 'never' if not low else f'{low:,} or more' if high is None else f'{low:,} to {high:,}'
    nats = {key: r['nats'][i] for key, r in by_run.items()}
    plain = [value for (model, _), value in nats.items() if model == BASELINE]
    row = [name, f'{targets[i] / sum(targets):.1%}', seeds.summarise(plain)]
    for model in models:
      shared = [s for m, s in by_run if m == model and (BASELINE, s) in by_run]
      row.append(seeds.summarise([nats[model, s] - nats[BASELINE, s] for s in shared]))
    rows.append(tuple(row))
  return markdown(rows)


def tuning_table(results: Sequence[Result]) -> str:
  """Formats the validation loss in nats a token of every learning rate that was tried."""
  nats = {(r['model'], r['learning_rate']): r['validation']['nll_nats_per_token'] for r in results}
  rows = [('model', *(f'{rate:g}' for rate in cells.LEARNING_RATES))]
  for method in itertools.chain(*cells.TUNED.values()):
    tried = [nats.get((method, rate)) for rate in cells.LEARNING_RATES]
    rows.append((f'`{method}`', *('' if n is None else f'{n:.4f}' for n in tried)))
  return markdown(rows)


def fill(page: str, texts: Mapping[str, str]) -> str:
  """Returns a page with the texts between their comments. Raises ValueError if one is missing."""
  for name, text in texts.items():
    pattern = rf'(<!-- {name} -->\n).*?(<!-- end -->)'
    page, count = re.subn(pattern, lambda m, text=text: f'{m[1]}{text}\n{m[2]}', page, flags=re.S)
    if count != 1:
      raise ValueError(f'{PAGE.name} has {count} places for {name}, expected one')
  return page


def texts(results: Sequence[Result]) -> dict[str, str]:
  """Returns the tables of the page by name."""
  by_table = {name: [r for r in results if r['table'] == name] for name in TABLES}
  main, controls = by_table['main'], by_table['controls']
  found = {
    'tuning': tuning_table(by_table['tuning']),
    'main': model_table(main, ngram_memories.METHODS, BASELINE),
  }
  for method in cells.CONTROLLED:
    own = dict.fromkeys(r['model'] for r in controls if r['model'].startswith(method))
    found[f'controls of {method}'] = model_table(main + controls, [method, *own], method)
  sizes = [f'{method}_{scale}' for method in cells.SCALED for scale in ngram_memories.SCALES]
  found['sizes'] = model_table(main + by_table['sizes'], [*cells.SCALED, *sizes], BASELINE)
  found['memory'] = memory_table(by_table['memory'])
  found['spans'] = span_table(by_table['spans'])
  found['recurrent'] = recurrent_table(by_table['recurrent'])
  addresses = by_table['state_of_the_union']
  found['state of the union'] = model_table(addresses, state_of_the_union.METHODS, 'wide')
  found['frequency'] = frequency_table(frequency.read_results())
  return found


def main() -> None:
  """Writes the page and its figures from results.jsonl."""
  results = run.read_results()
  PAGE.write_text(fill(PAGE.read_text(encoding='utf-8'), texts(results)), encoding='utf-8')
  plots.save_all(results, PAGE.parent)


if __name__ == '__main__':
  main()
