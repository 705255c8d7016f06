"""Evaluation of a model on SuperGLUE tasks: predicted answers and metrics.

Examples are arrays (see `features.Example`), so this needs neither TensorFlow nor seqio.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import pathlib
from typing import Any

import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors
from ngrammer_jax.data import vocabularies
from ngrammer_jax.inference import encoding, language_modeling, sampling
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference import text as texts
from ngrammer_jax.system import progress
from ngrammer_jax.tasks.superglue import formats, metrics


def resolve_choosing(name: str, choosing: str | None) -> str:
  """Returns the selection of answers, `rank` or `greedy`; None: the default of the task.

  Raises:
    BadInput: the task does not support it.
  """
  labels = formats.find_task(name).labels
  if not choosing:
    choosing = 'rank' if labels else 'greedy'
  if choosing == 'rank' and name == 'wsc_simple':
    raise errors.BadInput(
      'finetune.choosing="rank": wsc_simple has no choices to rank, its referents are generated; '
      'use finetune.choosing="greedy", or the task wsc'
    )
  return choosing


@dataclasses.dataclass(frozen=True)
class TaskAnswer:
  """The answer to an example.

  Attributes:
    value: predicted class, -1 for other texts; the text, if the task has no labels.
    text: predicted text.
    score: log p(text | input) in nats, with its end; None if the text was generated.
  """

  value: int | str
  text: str
  score: float | None = None


@dataclasses.dataclass(frozen=True)
class TaskEvaluator:
  """Predicts the answers of the examples of a task, and computes metrics.

  Attributes:
    engine: engine of the model.
    vocabulary: vocabulary of the tokens.
    config: options of the fine-tuning; the batch size and the segment length of the training.
  """

  engine: inference.Engine
  vocabulary: vocabularies.Vocabulary
  config: experiment.Config

  def __call__(
    self,
    params: Any,
    codebook: Any,
    name: str,
    examples: Sequence[Any],
    report: Callable[[int], None] = progress.ignore,
  ) -> tuple[dict[str, Any], list[TaskAnswer]]:
    """Returns the metrics in percent, and the predicted answers.

    Args:
      params, codebook: parameters and codebook of the model.
      name: task name, a key of `formats.TASKS`.
      examples: examples of one split.
      report: called with the number of examples answered since the last call.

    Raises:
      BadInput: the task has no choices to rank, or they are equal after truncation.
    """
    f = self.config.finetune
    choosing = resolve_choosing(name, f.choosing)
    variables = self.engine.prepare({'params': params, 'codebook': codebook})
    if choosing == 'rank':
      answers = self._rank_choices(variables, name, examples, report)
    else:
      answers = self._generate_answers(variables, name, examples, report)
    result: dict[str, Any] = {'task': name, 'n': len(examples)}
    is_labelled = [e.label >= 0 or (name == 'record' and e.answers) for e in examples]
    if examples and all(is_labelled):
      result |= _score_answers(name, examples, answers)
    result['protocol'] = {
      'choosing': choosing,
      'format': f.format,
      'prefix': f.prefix,
      'length': self.config.training.segment_length,
      'targets_length': f.targets_length,
    }
    return result, answers

  def _prompt(self, example: Any) -> np.ndarray:
    """Returns the input ids of an example, with the document start if the model reads one."""
    return self.vocabulary.add_start(example.inputs).astype(np.int32)

  def _choice_ids(self, text: str) -> np.ndarray:
    """Returns the ids of an answer, truncated as in training."""
    f = self.config.finetune
    ids = self.vocabulary.encode(text.encode(), special=False)[: f.targets_length - 1]
    # Answers to a question are ranked without their end, as evaluation harnesses do.
    if f.format == 't5':
      ids = np.append(ids, self.vocabulary.document_end)
    return ids.astype(np.int32)

  def _rank_choices(
    self,
    variables: inference.Variables,
    name: str,
    examples: Sequence[Any],
    report: Callable[[int], None],
  ) -> list[TaskAnswer]:
    """Returns the choice with the highest log-likelihood for each example."""
    f = self.config.finetune
    labels = formats.find_task(name).labels
    choice_texts = [example.choices or labels for example in examples]
    choices = [[self._choice_ids(text) for text in group] for group in choice_texts]
    if labels:
      for texts_of_choices, group in zip(choice_texts, choices, strict=True):
        if len({tuple(ids) for ids in group}) < len(group):
          raise errors.BadInput(
            f'finetune.targets_length={f.targets_length} truncates different answers of {name} '
            f'to equal ones: {", ".join(texts_of_choices)}; raise it'
          )
    answers: list[TaskAnswer | None] = [None] * len(examples)
    prompts = [self._prompt(example) for example in examples]
    rows = self.config.training.batch_size
    ranked = self.engine.rank(variables, prompts, choices, rows, f.prefix == 'bidirectional')
    for i, scores, _ in ranked:
      best = int(scores.argmax())
      text = choice_texts[i][best].strip()
      answer = text
      if labels:
        answer = best
      answers[i] = TaskAnswer(answer, text, float(scores[best]))
      report(1)
    return answers

  def _generate_answers(
    self,
    variables: inference.Variables,
    name: str,
    examples: Sequence[Any],
    report: Callable[[int], None],
  ) -> list[TaskAnswer]:
    """Returns the greedily decoded answer of each example."""
    labels = formats.find_task(name).labels
    t = self.config.training
    f = self.config.finetune
    greedy = sampling.SamplingConfig(temperature=0.0)
    prompts = [encoding.EncodedText(example.text, self._prompt(example)) for example in examples]
    completions = texts.complete(
      self.engine,
      variables,
      self.vocabulary,
      prompts,
      texts.CompletionConfig(greedy, f.targets_length, seed=0, context=t.segment_length),
      rows=t.batch_size,
      is_prefix_bidirectional=f.prefix == 'bidirectional',
    )
    answers = []
    for example, completion in zip(examples, completions, strict=True):
      text = completion.text.strip()
      value = text
      if labels:
        value = formats.find_class(text, example.choices or labels)
      answers.append(TaskAnswer(value, text))
      report(1)
    return answers


def _score_answers(
  name: str, examples: Sequence[Any], answers: Sequence[TaskAnswer]
) -> dict[str, float]:
  """Returns the metrics of the answers, their error, and the accuracy of the majority class."""
  labels = [example.label for example in examples]
  keys = [example.key for example in examples]
  references = [example.answers for example in examples]
  values = [answer.value for answer in answers]
  scores = metrics.compute_metrics(name, labels, keys, references, values)
  result = dict(scores)
  result['error_percent'] = 100 - float(np.mean(list(scores.values())))
  if formats.find_task(name).labels:
    result['majority_percent'] = metrics.majority_accuracy(labels)
  return result


def describe_answer(name: str, example: Any, answer: TaskAnswer) -> dict[str, Any]:
  """Returns an answer beside its example, for `<split>_answers.jsonl`.

  The label is a text, or the list of all correct texts; None if it is hidden.
  """
  labels = formats.find_task(name).labels
  if not labels:
    label = list(example.answers) or None
  elif example.label < 0:
    label = None
  else:
    choices = example.choices or labels
    label = choices[example.label].strip()
  idx = list(example.key)
  if len(idx) == 1:
    (idx,) = idx
  return {
    'task': name,
    'idx': idx,
    'input': example.text,
    'label': label,
    'answer': answer.text,
    'score': answer.score,
  }


def save(
  result: dict[str, Any],
  answers: Sequence[Mapping[str, Any]],
  submissions: Mapping[str, str],
  path: pathlib.Path,
) -> None:
  """Writes a result as JSON; next to it all answers, as JSON lines, and submission files by name.

  Only the first process writes.
  """
  others = {path.with_name(name): text for name, text in submissions.items()}
  language_modeling.save(result, path, answers, answers_path(path), others)


def answers_path(path: pathlib.Path) -> pathlib.Path:
  """Returns the path of the answers of a result."""
  return path.with_name(f'{path.stem}_answers.jsonl')


def combine_results(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
  """Returns the result of a single task, or a joint one.

  With labels it has the mean error, and if it has all eight tasks, their average score.
  """
  if len(results) == 1:
    return next(iter(results.values()))
  combined = {'task': 'mixture', 'tasks': results}
  error_by_task = [result.get('error_percent') for result in results.values()]
  if None not in error_by_task:
    combined['error_percent'] = math.fsum(error_by_task) / len(results)
    average = metrics.average(results)
    if average is not None:
      combined['average'] = average
  return combined


def results_by_task(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
  """Returns the single results of a combined one."""
  return result.get('tasks', {result['task']: result})


def format_metrics(result: dict[str, Any]) -> str:
  """Formats a result as one line."""
  parts = []
  for task, values in results_by_task(result).items():
    scores = [f'{name} {value:.2f}' for name, value in metrics.select_metrics(values).items()]
    parts.append(f'{task} {", ".join(scores)}, {values["n"]:,} examples')
  if 'average' in result:
    parts.append(f'average {result["average"]:.2f}')
  return '; '.join(parts)


def format_table(result: dict[str, Any]) -> str:
  """Formats a result as a table."""
  return metrics.format_table(results_by_task(result))
