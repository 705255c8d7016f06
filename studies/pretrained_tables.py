"""The tables of docs/results.md about SmolLM2: zero_shot, pretrained and longer."""

from collections.abc import Sequence
import itertools
import math
import statistics

from ngrammer_jax.tasks.superglue import metrics
from studies import longer, pretrained
from studies.markdown import format_difference, format_mean, markdown
from studies.results import Lines, Result


def zero_shot_table(results: Sequence[Result]) -> str:
  """Formats the accuracy of each task with its standard error, beside the majority class."""
  rows = [('task', 'examples', 'accuracy', 'majority class', 'F1', 'seconds', 'hardware')]
  for r in results:
    f1 = f'{r["f1"]:.1f}' if 'f1' in r else ''
    majority = f'{r["majority_percent"]:.1f}'
    accuracy = f'{r["accuracy"]:.1f} ± {metrics.standard_error(r["accuracy"], r["n"]):.1f}'
    rows.append(
      (r['task'], f'{r["n"]:,}', accuracy, majority, f1, str(r['seconds']), r['hardware'])
    )
  return markdown(rows)


def finetuning_table(results: Sequence[Result], zero_shot: Sequence[Result]) -> str:
  """Formats the accuracies of fine-tuned models.

  Accuracies are means over seeds, with two standard errors: over seeds and over examples.
  """
  columns = 'task', 'model', 'learning rate', 'seeds', 'accuracy', 'error: seeds', 'error: examples'
  rows = [(*columns, 'untrained', 'majority class', 'seconds')]
  untrained = {r['task']: f'{r["accuracy"]:.1f}' for r in zero_shot}
  for task, model in itertools.product(pretrained.TASK_TOKENS, pretrained.MODELS):
    own = [r for r in results if (r['table'], r['model']) == (task, model)]
    for rate in sorted({r['learning_rate'] for r in own}):
      runs = [r for r in own if r['learning_rate'] == rate]
      accuracies = [r['accuracy'] for r in runs]
      mean = statistics.fmean(accuracies)
      over_seeds = ''
      if len(accuracies) > 1:
        over_seeds = f'{statistics.stdev(accuracies) / math.sqrt(len(accuracies)):.1f}'
      seconds = statistics.fmean(r['training_seconds'] for r in runs)
      values = f'{rate:g}', str(len(runs)), f'{mean:.1f}', over_seeds
      before = untrained.get(pretrained.TASK_OF[task], '')
      errors = f'{metrics.standard_error(mean, runs[0]["n"]):.1f}', before
      majority = f'{runs[0]["majority_percent"]:.1f}'
      rows.append((task, f'`{model}`', *values, *errors, majority, f'{seconds:.0f}'))
  return markdown(rows)


def continued_table(results: Sequence[Result]) -> str:
  """Formats losses of continued training, and paired differences from `bare`."""

  def nats(result: Result) -> float:
    return result['nll_nats_per_token']

  rows = [('model', 'seeds', 'nats per token', 'minus bare', 'bits per byte', 'seconds')]
  by_model = {m: [r for r in results if r['model'] == m] for m in pretrained.MODELS}
  for model, own in by_model.items():
    if own:
      seconds = statistics.fmean(r['training_seconds'] for r in own)
      is_other = model not in ('bare', 'untrained') and by_model['bare']
      difference = format_difference(own, by_model['bare'], nats) if is_other else ''
      bits = format_mean([r['bits_per_byte'] for r in own])
      row = str(len(own)), format_mean(list(map(nats, own))), difference, bits, f'{seconds:.0f}'
      rows.append((f'`{model}`', *row))
  return markdown(rows)


def longer_table(results: Sequence[Result]) -> str:
  """Formats bits per byte by the length of the memory in segments."""
  rows = [('text', 'documents', 'sinks', *map(str, longer.SEGMENTS))]

  def group(result: Result) -> tuple[str, bool, int]:
    return result['text'], result['documents'], result['sinks']

  for text, documents, sinks in dict.fromkeys(map(group, results)):
    own = {r['segments']: r for r in results if group(r) == (text, documents, sinks)}
    bits = (f'{own[s]["bits_per_byte"]:.4f}' if s in own else '' for s in longer.SEGMENTS)
    rows.append((text, 'each on its own' if documents else 'one', str(sinks), *bits))
  return markdown(rows)


def format_tables(lines: Lines) -> dict[str, str]:
  """Returns the tables about SmolLM2 by name."""
  continued = [line for line in lines.pretrained if line['table'] == pretrained.CONTINUED]
  return {
    'zero shot': zero_shot_table(lines.zero_shot),
    'fine-tuning': finetuning_table(lines.pretrained, lines.zero_shot),
    'continued': continued_table(continued),
    'longer': longer_table(lines.longer),
  }
