"""Answers of SuperGLUE tasks in the submission format of the benchmark."""

from collections.abc import Sequence
import json
from typing import Any

from ngrammer_jax.tasks.superglue import formats, metrics, reader


def format_answers(name: str, examples: Sequence[Any], answers: Sequence[Any]) -> str:
  """Formats the answers to a task as its file in the submission format of SuperGLUE."""
  if name == 'multirc':
    lines = _multirc_lines(examples, answers)
  elif name == 'record':
    texts = {example.key[-1]: answer for example, answer in zip(examples, answers, strict=True)}
    lines = [{'idx': idx, 'label': text} for idx, text in texts.items()]
  else:
    lines = []
    for example, answer in zip(examples, answers, strict=True):
      lines.append({'idx': example.key[0], 'label': _label(name, example, answer)})
  return ''.join(json.dumps(line) + '\n' for line in lines)


def file_name(name: str) -> str:
  """Returns the name of the submission file of a task."""
  return f'{reader.CONFIGS[formats.find_task(name).config].folder}.jsonl'


def _label(name: str, example: Any, answer: Any) -> int | str:
  """Returns the label in the format of the benchmark. An invalid answer becomes the first class."""
  if name == 'wsc_simple':
    answer = metrics.match_referent(example.answers[0], answer)
  if name == 'copa':
    return max(answer, 0)
  if reader.CONFIGS[formats.find_task(name).config].labels == ('False', 'True'):
    return 'true' if answer == 1 else 'false'
  return formats.find_task(name).labels[max(answer, 0)]


def _multirc_lines(examples: Sequence[Any], answers: Sequence[Any]) -> list[dict[str, Any]]:
  """Returns one line per paragraph, with its questions and their options."""
  paragraphs: dict[int, dict[int, list[dict[str, int]]]] = {}
  for example, answer in zip(examples, answers, strict=True):
    paragraph, question, option = example.key
    options = paragraphs.setdefault(paragraph, {}).setdefault(question, [])
    options.append({'idx': option, 'label': int(answer == 1)})
  lines = []
  for paragraph, options_by_question in paragraphs.items():
    questions = [{'idx': q, 'answers': options} for q, options in options_by_question.items()]
    lines.append({'idx': paragraph, 'passage': {'questions': questions}})
  return lines
