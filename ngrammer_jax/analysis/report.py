"""The contents of a report: records, numbers, samples and other analyses of each run.

All numbers come from metrics.jsonl, the files of `evaluate` and the other analyses. `report_page`
makes the web page.
"""

from collections.abc import Sequence
import contextlib
from typing import Any, NamedTuple

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, runs
from ngrammer_jax.analysis import (
  attention,
  clusters,
  gates,
  ngrams,
  product_keys,
  report_metrics,
  spans,
)
from ngrammer_jax.config import model as model_config

# The analyses on the page: modules with `analyze`, `elements`, `plot` and FIGURE_SIZE.
ANALYSES = {
  'clusters': clusters,
  'ngrams': ngrams,
  'gates': gates,
  'product_keys': product_keys,
  'spans': spans,
  'attention': attention,
}


class Samples(NamedTuple):
  """Samples of each run: `count` continuations of a prompt, of at most `tokens` tokens."""

  prompt: str = ''
  count: int = 3
  tokens: int = 100


class RunReport(NamedTuple):
  """The contents of the page for a run.

  Attributes:
    name: name of the run.
    color: number of its color.
    config: its config.
    records: lines of metrics.jsonl.
    metrics: numbers by name.
    results: results of the applicable ANALYSES.
    samples: prompts and continuations.
  """

  name: str
  color: int
  config: experiment.Config
  records: report_metrics.Records
  metrics: dict[str, report_metrics.Metric]
  results: dict[str, dict[str, Any]]
  samples: list[tuple[str, str]]


def collect(
  all_runs: Sequence[runs.Run], names: Sequence[str], split: str, samples: Samples
) -> list[RunReport]:
  """Runs the applicable analyses of each run. Raises their BadInput."""
  for run in all_runs:
    if run.config.finetune is None:
      run.split(split)  # reports a wrong name before any checkpoint is loaded
  all_records = [_read_records(run) for run in all_runs]
  # Before the analyses, which take longer: a prompt may not fit the vocabulary or the context.
  all_texts = [_generate(run, samples) for run in all_runs]
  reports = []
  for run, name, records, texts in zip(all_runs, names, all_records, all_texts, strict=True):
    metrics = report_metrics.run_metrics(run, records)
    results = _analyze(run, split)
    reports.append(RunReport(name, len(reports), run.config, records, metrics, results, texts))
  return reports


def _read_records(run: runs.Run) -> report_metrics.Records:
  """Returns the lines of metrics.jsonl; exported and published models have none."""
  if run.is_exported or run.published is not None:
    return []
  return report_metrics.read_metrics(run.workdir)


def _generate(run: runs.Run, samples: Samples) -> list[tuple[str, str]]:
  """Returns prompts and continuations; empty if the model cannot generate."""
  can_generate = run.config.model.position not in model_config.SEGMENT_POSITIONS
  if run.config.finetune is not None or not can_generate or samples.count < 1:
    return []
  completions = run.generate([samples.prompt] * samples.count, samples.tokens)
  return [(completion.prompt, completion.text) for completion in completions]


def _analyze(run: runs.Run, split: str) -> dict[str, dict[str, Any]]:
  """Returns the results of the applicable analyses of a run."""
  results = {}
  if run.config.finetune is not None:
    return results
  for name, analysis in ANALYSES.items():
    with contextlib.suppress(errors.NotApplicable):
      results[name] = analysis.analyze(run, split)
  return results
