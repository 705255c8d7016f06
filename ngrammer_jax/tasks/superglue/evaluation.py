"""Evaluation of a model on SuperGLUE tasks: predicted answers and metrics.

Examples are arrays (see `features.Example`), so this needs neither TensorFlow nor seqio.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data import vocabulary as vocabularies
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference import sampling
from ngrammer_jax.tasks.superglue import formats, metrics


def resolve_choosing(name: str, choosing: str | None) -> str:
  """Returns how a task is answered, `rank` or `greedy`; None selects the default of the task.

  Raises:
    BadInput: the task cannot be answered like that.
  """
  labels = formats.find_task(name).labels
  choosing = choosing or ('rank' if labels else 'greedy')
  if choosing == 'rank' and name == 'wsc_simple':
    raise errors.BadInput(
      'finetune.choosing="rank": wsc_simple has no choices to rank, its referents are generated; '
      'use finetune.choosing="greedy", or the task wsc'
    )
  return choosing


class Evaluator:
  """Predicts the answers of the examples of a task, and computes metrics.

  Args:
    engine: engine of the model.
    vocabulary: vocabulary of the tokens.
    batch_size: number of examples per batch.
    length: maximum number of tokens of an example.
    targets_length: maximum number of these tokens for the answer.
    bidirectional: whether attention among the inputs is bidirectional.
  """

  def __init__(
    self,
    engine: inference.Engine,
    vocabulary: vocabularies.Vocabulary,
    batch_size: int,
    length: int,
    targets_length: int,
    bidirectional: bool = False,
  ):
    self._engine, self._vocabulary = engine, vocabulary
    self._batch_size, self._length, self._targets_length = batch_size, length, targets_length
    self._bidirectional = bidirectional

  def __call__(
    self,
    params: Any,
    codebook: Any,
    name: str,
    examples: Sequence[Any],
    choosing: str | None = None,
    report: Callable[[int], None] = lambda examples: None,
  ) -> tuple[dict[str, Any], list[Any]]:
    """Returns the metrics in percent, and the predicted answers: classes or texts.

    Args:
      params, codebook: parameters and codebook of the model.
      name: task name, a key of `formats.TASKS`.
      examples: examples of one split.
      choosing: `rank` selects the most likely label (for `record`, entity), `greedy` generates
        the answer. None: `rank` if the task has labels, else `greedy`.
      report: called with the number of examples answered since the last call.

    Raises:
      BadInput: the task has no choices to rank, or they are equal after truncation.
    """
    choosing = resolve_choosing(name, choosing)
    variables = self._engine.prepare({'params': params, 'codebook': codebook})
    answer = self._rank_choices if choosing == 'rank' else self._generate_answers
    answers = answer(variables, name, examples, report)
    result: dict[str, Any] = {'task': name, 'n': len(examples)}
    labelled = [e for e in examples if e.label >= 0 or (name == 'record' and e.answers)]
    if labelled and len(labelled) == len(examples):
      fields = 'label', 'key', 'answers'
      columns = {field: [getattr(e, field) for e in examples] for field in fields}
      scores = metrics.compute_metrics(name, *columns.values(), answers)
      result |= scores | {'error_percent': 100 - float(np.mean(list(scores.values())))}
      if formats.find_task(name).labels:
        result['majority_percent'] = metrics.majority_accuracy(columns['label'])
    prefix = 'bidirectional' if self._bidirectional else 'causal'
    lengths = {'length': self._length, 'targets_length': self._targets_length}
    result['protocol'] = {'choosing': choosing, 'prefix': prefix, **lengths}
    return result, answers

  def _prompt(self, example):
    return np.insert(example.inputs, 0, self._vocabulary.document_start).astype(np.int32)

  def _rank_choices(self, variables, name, examples, report):
    labels, end = formats.find_task(name).labels, self._vocabulary.document_end
    max_tokens = self._targets_length - 1  # answers are truncated as in training
    ids = lambda text: np.append(self._vocabulary.encode(text.encode())[:max_tokens], end)
    if len({tuple(ids(text)) for text in labels}) < len(labels):
      raise errors.BadInput(
        f'finetune.targets_length={self._targets_length} truncates different answers of {name} '
        f'to equal ones: {", ".join(labels)}; raise it'
      )
    choices = [[ids(text) for text in labels or example.choices] for example in examples]
    answers: list[Any] = [None] * len(examples)
    prompts = [self._prompt(example) for example in examples]
    ranked = self._engine.rank(variables, prompts, choices, self._batch_size, self._bidirectional)
    for i, scores in ranked:
      best = int(scores.argmax())
      answers[i] = best if labels else examples[i].choices[best]
      report(1)
    return answers

  def _generate_answers(self, variables, name, examples, report):
    labels, texts = formats.find_task(name).labels, []
    greedy = inference.GenerationConfig(
      sampling.SamplingConfig(temperature=0.0), self._length, self._bidirectional
    )
    batch_size = self._engine.round_rows(self._batch_size)
    for first in range(0, len(examples), batch_size):
      batch = examples[first : first + batch_size]
      prompts = [self._prompt(example) for example in batch]
      seeds = [0] * len(batch)
      steps = self._engine.generate(variables, prompts, seeds, greedy, batch_size)
      columns = []
      while len(columns) < self._targets_length and not self._all_ended(columns):
        columns.append(next(steps))
      texts += [self._decode_answer(row) for row in np.stack(columns, axis=1)]
      report(len(batch))
    if not labels:
      return texts
    return [labels.index(text) if text in labels else -1 for text in texts]

  def _all_ended(self, columns):
    """Returns whether every row has generated the document end."""
    end = self._vocabulary.document_end
    return bool(columns) and bool((np.stack(columns) == end).any(axis=0).all())

  def _decode_answer(self, ids):
    """Decodes the tokens before the document end."""
    (ends,) = np.nonzero(ids == self._vocabulary.document_end)
    ids = ids[: ends[0]] if len(ends) else ids
    return self._vocabulary.decode(ids).decode(errors='replace').strip()


def format_metrics(result: dict[str, Any]) -> str:
  """Formats the metrics of a task as one line."""
  scores = ', '.join(
    f'{name} {value:.2f}' for name, value in metrics.select_metrics(result).items()
  )
  return f'{result["task"]} {scores or "without labels"}, {result["n"]:,} examples'
