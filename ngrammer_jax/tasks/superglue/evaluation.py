"""How well a model does the tasks of SuperGLUE: what it answers, and the metrics of that.

Needs neither TensorFlow nor seqio: examples come as arrays (see `features.Example`).
"""

from collections.abc import Callable, Sequence
import functools
import json
import pathlib
from typing import Any

import jax
import numpy as np

from ngrammer_jax import errors, files, sharding
from ngrammer_jax.data import vocabulary as vocabularies
from ngrammer_jax.decoding import generation, sampling
from ngrammer_jax.evaluation import ranking
from ngrammer_jax.models import heads, language_model
from ngrammer_jax.tasks.superglue import formats, metrics, reader


def choosing_of(name: str, choosing: str | None) -> str:
  """How a task is answered: `rank` or `greedy`, where None is given the one that suits it.

  Raises BadInput where that is not possible.
  """
  labels = formats.find_task(name).labels
  choosing = choosing or ('rank' if labels else 'greedy')
  if choosing == 'rank' and name == 'wsc_simple':
    raise errors.BadInput(
      'finetune.choosing="rank": wsc_simple has nothing to choose from, its referents are written; '
      'use finetune.choosing="greedy", or the task wsc'
    )
  return choosing


class Evaluator:
  """Answers the examples of a task, every one exactly once.

  Args:
    model: with the memory and windows of evaluation.
    mesh: where it lies.
    vocabulary: of its tokens.
    rows: examples at a time.
    length: tokens of an example at most.
    targets: of them for the answer.
    bidirectional: inputs see all of themselves.
  """

  def __init__(
    self,
    model: language_model.LanguageModel,
    mesh: jax.sharding.Mesh,
    vocabulary: vocabularies.Vocabulary,
    rows: int,
    length: int,
    targets: int,
    bidirectional: bool = False,
  ):
    self._vocabulary, self._targets, self._length = vocabulary, targets, length
    self._bidirectional = bidirectional
    self._rank = ranking.Ranker(model, mesh, rows, bidirectional)
    self._generate = generation.Generator(model, mesh, length, rows, bidirectional)
    self._mesh = mesh
    self._serve = jax.jit(functools.partial(heads.for_serving, model.config))

  def __call__(
    self,
    params: Any,
    codebook: Any,
    name: str,
    examples: Sequence[Any],
    choosing: str | None = None,
    report: Callable[[int], None] = lambda examples: None,
  ) -> tuple[dict[str, Any], list[Any]]:
    """The metrics of some examples in percent, and what was answered: classes or texts.

    Args:
      params, codebook: of the model.
      name: of the task.
      examples: of one split.
      choosing: `rank`, the most likely of the labels (of `record`, of the entities); `greedy`,
        what the model writes. None: `rank` where there are labels.
      report: called with the number of examples answered since the last call.

    Raises:
      BadInput: the task has nothing to rank.
    """
    choosing = choosing_of(name, choosing)
    with sharding.use(self._mesh):
      codebook = self._serve(params, codebook)  # clustered once, and not at every token
    if choosing == 'rank':
      answers = self._ranked(params, codebook, name, examples, report)
    else:
      answers = self._written(params, codebook, name, examples, report)
    result: dict[str, Any] = {'task': name, 'n': len(examples)}
    known = [e for e in examples if e.label >= 0 or (name == 'record' and e.answers)]
    if known and len(known) == len(examples):
      fields = 'label', 'key', 'answers'
      columns_of = {field: [getattr(e, field) for e in examples] for field in fields}
      scores = metrics.compute_metrics(name, *columns_of.values(), answers)
      result |= scores | {'error_percent': 100 - float(np.mean(list(scores.values())))}
      if formats.find_task(name).labels:  # what takes no skill
        result['majority_percent'] = metrics.majority_accuracy(columns_of['label'])
    prefix = 'bidirectional' if self._bidirectional else 'causal'
    lengths = {'length': self._length, 'targets_length': self._targets}
    result['protocol'] = {'choosing': choosing, 'prefix': prefix, **lengths}
    return result, answers

  def _prefix(self, example):
    return np.insert(example.inputs, 0, self._vocabulary.document_start).astype(np.int32)

  def _ranked(self, params, codebook, name, examples, report):
    labels, end = formats.find_task(name).labels, self._vocabulary.document_end
    most = self._targets - 1  # as answers are cut in training
    ids = lambda text: np.append(self._vocabulary.encode(text.encode())[:most], end)
    if len({tuple(ids(text)) for text in labels}) < len(labels):
      raise errors.BadInput(
        f'finetune.targets_length={self._targets} cuts the answers of {name} so that they are no '
        f'longer different: {", ".join(labels)}; raise it'
      )
    choices = [[ids(text) for text in labels or example.choices] for example in examples]
    answers: list[Any] = [None] * len(examples)
    prefixes = [self._prefix(example) for example in examples]
    for i, scores in self._rank(params, codebook, prefixes, choices):
      best = int(scores.argmax())
      answers[i] = best if labels else examples[i].choices[best]
      report(1)
    return answers

  def _written(self, params, codebook, name, examples, report):
    labels, texts = formats.find_task(name).labels, []
    greedy, rows = sampling.SamplingConfig(temperature=0.0), self._generate.rows
    for first in range(0, len(examples), rows):
      group = examples[first : first + rows]
      prompts = [self._prefix(example) for example in group]
      made = self._generate(params, codebook, prompts, [0] * len(group), greedy)
      columns = []
      while len(columns) < self._targets and not self._ended(columns):
        columns.append(next(made))
      texts += [self._text(row) for row in np.stack(columns, axis=1)]
      report(len(group))
    if not labels:
      return texts
    return [labels.index(text) if text in labels else -1 for text in texts]

  def _ended(self, columns):
    """Whether every row has written its end."""
    end = self._vocabulary.document_end
    return bool(columns) and bool((np.stack(columns) == end).any(axis=0).all())

  def _text(self, ids):
    """What was written before the end."""
    (ends,) = np.nonzero(ids == self._vocabulary.document_end)
    ids = ids[: ends[0]] if len(ends) else ids
    return self._vocabulary.decode(ids).decode(errors='replace').strip()


def said(result: dict[str, Any]) -> str:
  """The metrics of a task, to read."""
  scores = ', '.join(
    f'{name} {value:.2f}' for name, value in metrics.select_metrics(result).items()
  )
  return f'{result["task"]} {scores or "without labels"}, {result["n"]:,} examples'


def submission(
  name: str, examples: Sequence[Any], answers: Sequence[Any], folder: pathlib.Path
) -> pathlib.Path:
  """Writes the answers as SuperGLUE takes them, and returns the file."""
  task = formats.find_task(name)
  if name == 'multirc':
    lines = _multirc_lines(examples, answers)
  elif name == 'record':
    texts = {example.key[-1]: answer for example, answer in zip(examples, answers, strict=True)}
    lines = [{'idx': idx, 'label': text} for idx, text in texts.items()]
  else:
    lines = [
      {'idx': example.key[0], 'label': _written_label(name, example, answer)}
      for example, answer in zip(examples, answers, strict=True)
    ]
  path = folder / f'{reader.CONFIGS[task.config].folder}.jsonl'
  files.make(folder)
  files.write(path, ''.join(json.dumps(line) + '\n' for line in lines))
  return path


def _written_label(name, example, answer):
  """The label as the benchmark writes it; what was no label counts as the first."""
  if name == 'wsc_simple':
    answer = metrics.match_referent(example.answers[0], answer)
  if name == 'copa':
    return max(answer, 0)
  if reader.CONFIGS[formats.find_task(name).config].labels == ('False', 'True'):
    return 'true' if answer == 1 else 'false'
  return formats.find_task(name).labels[max(answer, 0)]


def _multirc_lines(examples, answers):
  """One line a paragraph, with its questions and their options."""
  paragraphs: dict[int, dict[int, list[dict[str, int]]]] = {}
  for example, answer in zip(examples, answers, strict=True):
    paragraph, question, option = example.key
    options = paragraphs.setdefault(paragraph, {}).setdefault(question, [])
    options.append({'idx': option, 'label': int(answer == 1)})
  return [
    {
      'idx': paragraph,
      'passage': {
        'questions': [{'idx': q, 'answers': options} for q, options in questions.items()]
      },
    }
    for paragraph, questions in paragraphs.items()
  ]
