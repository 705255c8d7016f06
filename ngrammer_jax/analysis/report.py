"""What a report shows of each run: its records, metrics, analyses and samples.

All numbers are those of metrics.jsonl, of the files of `evaluate`, and of the other analyses.
"""

from collections.abc import Callable, Sequence
import statistics
from typing import Any, NamedTuple

from flax import traverse_util

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, runs
from ngrammer_jax.analysis import attention, clusters, curve, gates, lookups, ngrams, spans
from ngrammer_jax.checkpoints import workdirs
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data import corpora
from ngrammer_jax.system import files
from ngrammer_jax.training import state as train_state

ANALYSES = {
  'clusters': clusters.analyze,
  'spans': spans.analyze,
  'attention': attention.analyze,
  'ngrams': ngrams.analyze,
  'gates': gates.analyze,
}
# The metrics of a split: name on the page, format, and which value is the best.
SPLIT_METRICS = {
  'bits_per_byte': ('bits per byte', '.4f', min),
  'bits_per_character': ('bits per character', '.4f', min),
  'nll_nats_per_token': ('nats per token', '.4f', min),
  'perplexity': ('perplexity', ',.3f', min),
  'top1_accuracy': ('top-1 accuracy', '.2%', max),
}


class Samples(NamedTuple):
  """Samples of each run: `count` continuations of a prompt, of at most `tokens` tokens."""

  prompt: str = ''
  count: int = 3
  tokens: int = 100


class Metric(NamedTuple):
  """A number of a run.

  Attributes:
    text: what the page shows.
    value: its value.
    best: `min` or `max`, if one of several runs is the best.
    tokens: number of tokens that it was measured on.
  """

  text: str
  value: float
  best: Callable[..., float] | None = None
  tokens: int | None = None


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


def collect(
  all_runs: Sequence[runs.Run], names: Sequence[str], split: str, samples: Samples
) -> list[RunReport]:
  """Analyzes the runs, each with the analyses that apply to it. Raises BadInput as they do."""
  for run in all_runs:
    if run.config.finetune is None:
      run.split(split)  # reports a wrong name before any checkpoint is loaded
  # Before the analyses, which take longer: a prompt may not fit the vocabulary or the context.
  all_texts = [_generate(run, samples) for run in all_runs]
  return [
    _collect_run(run, name, color, split, texts)
    for color, (run, name, texts) in enumerate(zip(all_runs, names, all_texts, strict=True))
  ]


def _generate(run, samples):
  """Returns prompts and continuations; none if the model cannot generate."""
  config = run.config
  can_generate = config.model.position not in model_config.SEGMENT_POSITIONS
  if config.finetune is not None or not can_generate or samples.count < 1:
    return []
  completions = run.generate([samples.prompt] * samples.count, samples.tokens)
  return [(completion.prompt, completion.text) for completion in completions]


def _collect_run(run, name, color, split, texts):
  tokens_per_step, step = run.config.training.tokens_per_step, int(run.state.step)
  is_exported = workdirs.is_exported(run.workdir)
  records = [] if is_exported else curve.read_metrics(run.workdir)
  metrics = _metrics(run, step, tokens_per_step, [r for r in records if r['step'] <= step])
  results = {}
  if run.config.finetune is None:
    for analysis, analyze in ANALYSES.items():
      try:
        results[analysis] = analyze(run, split)
      except errors.NotApplicable:
        continue
  return RunReport(
    name=name,
    color=color,
    step=step,
    config=run.config,
    tokens_per_step=tokens_per_step,
    records=records,
    metrics=metrics,
    results=results,
    samples=texts,
  )


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
      with files.translate_damage(path, 'evaluate it again'):
        result = files.read_json(path)
        if result['step'] <= step:
          metrics |= _split_metrics(f'{split}, evaluated', result)
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
  counts = {key: result[key] for key in ('step', 'tokens') if result.get(key) is not None}
  metrics = {f'{key} ({name})': Metric(f'{count:,}', count) for key, count in counts.items()}
  for key, (label, pattern, best) in SPLIT_METRICS.items():
    if result.get(key) is not None:
      value = result[key]
      # Bits per byte are those of a whole text, whatever its number of tokens.
      tokens = None if key == 'bits_per_byte' else result.get('tokens')
      metrics[f'{label} ({name})'] = Metric(format(value, pattern), value, best, tokens)
  return metrics
