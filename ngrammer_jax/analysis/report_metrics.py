"""The numbers of a run on the page of a report: sizes, losses, results of `evaluate`, speed."""

from collections.abc import Callable
import pathlib
import statistics
from typing import Any, NamedTuple

from ngrammer_jax import errors, runs
from ngrammer_jax.checkpoints import workdirs
from ngrammer_jax.data.documents import corpora
from ngrammer_jax.system import file_errors, json_files
from ngrammer_jax.training import model_size
from ngrammer_jax.training.records import writers

Records = list[dict[str, float]]  # lines of metrics.jsonl

# The metrics of a split: name on the page, format, and which value is the best.
SPLIT_METRICS = {
  'bits_per_byte': ('bits per byte', '.4f', min),
  'bits_per_character': ('bits per character', '.4f', min),
  'nll_nats_per_token': ('nats per token', '.4f', min),
  'perplexity': ('perplexity', ',.3f', min),
  'top1_accuracy': ('top-1 accuracy', '.2%', max),
}


class Metric(NamedTuple):
  """A number of a run.

  Attributes:
    text: its text on the page.
    value: its value.
    best: `min` or `max`, to mark the best of several runs.
    tokens: number of measured tokens.
  """

  text: str
  value: float
  best: Callable[..., float] | None = None
  tokens: int | None = None


def read_metrics(workdir: pathlib.Path) -> Records:
  """Reads metrics.jsonl. Raises BadInput if it is missing or damaged, or has no logged step."""
  if not (workdir / 'metrics.jsonl').exists():
    raise errors.BadInput(f'--workdir={workdir} has no metrics.jsonl: training has not started')
  with file_errors.translate_damage(workdir / 'metrics.jsonl', workdirs.REMEDY):
    lines = list(writers.read_lines(workdir))
  records = []
  for number, (line, record) in enumerate(lines, 1):
    if record:
      records.append(record)
    elif line.endswith(b'\n') or not records:  # else the last line is being written
      raise errors.BadInput(
        f'--workdir={workdir} has a damaged metrics.jsonl, line {number}: expected an object of '
        f'numbers with a step; delete this line'
      )
  if not any('loss' in record for record in records):
    raise errors.BadInput(f'--workdir={workdir} has logged no step yet')
  return records


def run_metrics(run: runs.Run, records: Records) -> dict[str, Metric]:
  """Returns the numbers of a run, up to the step of its checkpoint."""
  step = run.restored.step
  records = [record for record in records if record['step'] <= step]
  size = model_size.count(run.config.model, run.vocabulary_size)
  metrics = {
    'step': _count(step),
    'training tokens': _count(step * run.config.training.tokens_per_step),
    'parameters': _count(size.parameters),
    'of these in tables': _count(size.in_tables),
  }
  losses = _values(records, 'loss')
  if losses:
    metrics['training loss'] = Metric(f'{losses[-1]:.4f}', losses[-1], min)
  validations = [record for record in records if 'validation/nll_nats_per_token' in record]
  if validations:
    newest = {key.removeprefix('validation/'): value for key, value in validations[-1].items()}
    metrics |= split_metrics('validation in training', newest)
  metrics |= _evaluated_metrics(run, step)
  if run.config.model.span is None:
    t = run.config.training
    rows = t.batch_size // t.microbatches
    counted = model_size.count_flops(run.config.model, run.vocabulary_size, rows, t.segment_length)
    flops = [counted.forward()]
  else:  # learned spans change it
    flops = _values(records, 'flops_per_token')
  if flops:
    metrics['FLOPs per token'] = _count(statistics.median(flops))
  rates = _values(records, 'tokens_per_second')
  if rates:
    metrics['tokens per second (median)'] = _count(statistics.median(rates))
  return metrics


def _evaluated_metrics(run: runs.Run, step: int) -> dict[str, Metric]:
  """Returns the metrics written by `evaluate`, unless of a later step."""
  metrics = {}
  if run.config.finetune is not None:
    return metrics
  for split in corpora.SPLITS:
    path = run.workdir / 'evaluation' / f'{split}.json'
    if not path.exists():
      continue
    with file_errors.translate_damage(path, 'evaluate it again'):
      result = json_files.read(path)
      if result['step'] <= step:
        metrics |= split_metrics(f'{split}, evaluated', result)
  return metrics


def split_metrics(name: str, result: dict[str, Any]) -> dict[str, Metric]:
  """Returns the metrics of a split by name."""
  metrics = {}
  for key in ('step', 'tokens'):
    count = result.get(key)
    if count is not None:
      metrics[f'{key} ({name})'] = Metric(f'{count:,}', count)
  for key, (label, pattern, best) in SPLIT_METRICS.items():
    value = result.get(key)
    if value is not None:
      # Bits per byte are those of a whole text, whatever its number of tokens.
      tokens = None if key == 'bits_per_byte' else result.get('tokens')
      metrics[f'{label} ({name})'] = Metric(format(value, pattern), value, best, tokens)
  return metrics


def _count(value: float) -> Metric:
  return Metric(f'{value:,.0f}', value)


def _values(records: Records, key: str) -> list[float]:
  """Returns the values of a key in the records."""
  return [record[key] for record in records if key in record]
