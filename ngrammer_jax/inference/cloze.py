"""Cloze questions: the Children's Book Test ranks ten candidates for a gap in a query.

A document starts with twenty sentences, each followed by a newline, and the query up to the gap.
With the protocol `query` (Hill et al. 2016), the score of a candidate is log p(candidate and rest
of the query | text before the gap). With `prefix` it is log p(candidate | text before the gap);
with a vocabulary of characters or bytes this favors `man` over `manner`. The text before the gap is
computed once; its memory is reused for each candidate.

Candidates with equal scores share the point: an answer among the k best candidates counts 1/k.
Candidates with equal tokens, such as words out of the vocabulary, have equal scores. The strict
accuracy counts a shared point as wrong.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import itertools
import math
import pathlib
from typing import Any, NamedTuple

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.config import recurrent as recurrent_config
from ngrammer_jax.data import cloze, vocabularies
from ngrammer_jax.data.files import file_formats, file_log
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference import language_modeling, pairs
from ngrammer_jax.system import progress, text_tables

# What the protocols score; the first is the default.
SCORED = {'query': 'the candidate and the rest of the query', 'prefix': 'the candidate alone'}
PROTOCOLS = tuple(SCORED)
SORT_BUFFER = 4096  # questions sorted by length at a time
Z_95 = 1.959963984540054  # 95 % of a normal distribution is within this many standard deviations


@dataclasses.dataclass(frozen=True)
class QuestionSet:
  """A set of questions.

  Attributes:
    name: split of a folder, or name of a file without its suffix.
    file_by_kind: the file of each kind of question.
  """

  name: str
  file_by_kind: dict[str, pathlib.Path]

  @property
  def is_official(self) -> bool:
    """Whether the files have the names of the Children's Book Test."""
    return all(cloze.FILE_NAME.fullmatch(file.name) for file in self.file_by_kind.values())

  def read(self) -> Iterator[cloze.Question]:
    """Yields the questions. Raises BadInput for a malformed one."""
    for kind, file in self.file_by_kind.items():
      yield from cloze.read_questions(file, kind)


def open_questions(path: pathlib.Path, split: str) -> tuple[QuestionSet, int]:
  """Finds the questions of a folder or a file, checks all of them, and returns their number.

  Args:
    path: see `data.cloze.find_files`.
    split: split of a folder: train, validation or test.

  Raises:
    BadInput: there are no such questions, or one of them is malformed.
  """
  name = path.stem if path.is_file() else split
  question_set = QuestionSet(name, cloze.find_files(path, split))
  formats = {file: file_formats.identify(file) for file in question_set.file_by_kind.values()}
  count = sum(1 for _ in question_set.read())
  counts = f'{count:,} questions'
  file_log.log_files(f'--cloze={path}', {name: [*formats]}, counts=counts, formats=formats)
  return question_set, count


@dataclasses.dataclass(frozen=True)
class ClozeAnswer:
  """The scores of a model for the candidates of a question.

  Attributes:
    question: the question without its context.
    scores: log-probability of each candidate, float64 [10].
    unknown: whether each candidate is out of the vocabulary.
    cut: whether the oldest tokens of the context were dropped to fit.
  """

  question: cloze.Question
  scores: np.ndarray
  unknown: tuple[bool, ...]
  cut: bool

  @property
  def best(self) -> list[str]:
    """The candidates with the highest score."""
    is_best = (self.scores == self.scores.max()).tolist()
    return list(itertools.compress(self.question.candidates, is_best))

  @property
  def point(self) -> float:
    """1 for the right answer, 1/k if k candidates share the highest score with it, else 0."""
    return self.best.count(self.question.answer) / len(self.best)

  @property
  def answer_unknown(self) -> bool:
    """Whether the right answer is out of the vocabulary."""
    return self.unknown[self.question.candidates.index(self.question.answer)]

  def fields(self) -> dict[str, Any]:
    """Returns the answer in the format of the answers file."""
    question = self.question
    return {
      'kind': question.kind,
      'file': question.file,
      'line': question.line,
      'answer': question.answer,
      'chosen': self.best[0],
      'point': self.point,
      'candidates': question.candidates,
      'scores': self.scores.tolist(),
    }


class _TokenizedQuestion(NamedTuple):
  """The tokens of a question.

  Attributes:
    prefix: ids before the choices, int32, with the document start.
    choices: ids of each choice.
    is_cut: whether the oldest tokens of the context were dropped to fit.
  """

  prefix: np.ndarray
  choices: list[np.ndarray]
  is_cut: bool


@dataclasses.dataclass(frozen=True)
class ClozeEvaluator:
  """Scores the candidates of questions.

  Attributes:
    engine: the engine of the model.
    vocabulary: vocabulary of the model.
    rows: batch size in questions.
    context: context length in tokens.
    protocol: one of PROTOCOLS.
  """

  engine: inference.Engine
  vocabulary: vocabularies.Vocabulary
  rows: int
  context: int
  protocol: str = 'query'

  def __call__(
    self,
    variables: inference.Variables,
    questions: Iterable[cloze.Question],
    report: Callable[[int], None] = progress.ignore,
  ) -> Iterator[ClozeAnswer]:
    """Yields the answers in the order of the questions.

    Args:
      variables: parameters and codebook.
      questions: questions of any kind.
      report: called with the number of questions answered since the previous call.

    Raises:
      BadInput: a query does not fit the context, or a character is not in the vocabulary.
    """
    questions = iter(questions)
    while group := list(itertools.islice(questions, SORT_BUFFER)):
      tokenized = [self._tokenize(question) for question in group]
      prefixes = [question.prefix for question in tokenized]
      choices = [question.choices for question in tokenized]
      scores: list[Any] = [None] * len(group)
      for i, choice_scores, _ in self.engine.rank(variables, prefixes, choices, self.rows):
        scores[i] = choice_scores
        report(1)
      for i, question in enumerate(group):
        yield ClozeAnswer(
          dataclasses.replace(question, context=()),
          _equalize_scores(choices[i], scores[i]),
          tuple(self._is_unknown(candidate) for candidate in question.candidates),
          tokenized[i].is_cut,
        )

  def _tokenize(self, question: cloze.Question) -> _TokenizedQuestion:
    """Returns the tokens of a question. Raises BadInput if its query does not fit the context."""
    before_gap, after_gap = question.query.split(cloze.PLACEHOLDER)
    before_gap = before_gap.removesuffix(' ')  # a token may start with the space
    space = question.query[len(before_gap) :].partition(cloze.PLACEHOLDER)[0]
    if self.protocol == 'prefix':
      after_gap = ''
    context = self._encode(question, ''.join(f'{sentence}\n' for sentence in question.context))
    prefix = self._encode(question, before_gap)
    queries = [
      self._encode(question, f'{before_gap}{space}{candidate}{after_gap}')
      for candidate in question.candidates
    ]
    # In some vocabularies the last tokens before the gap depend on the candidate. All choices start
    # at the first token that differs in any query.
    num_shared = min(pairs.count_shared(prefix, *queries), min(map(len, queries)) - 1)
    choices = [query[num_shared:] for query in queries]
    prefix = self.vocabulary.add_start(np.concatenate([context, queries[0][:num_shared]]))
    # The last token of a choice is predicted, but not read.
    max_prefix = self.context - max(map(len, choices)) + 1
    if max_prefix < max(num_shared, 1):
      raise errors.BadInput(
        f'{question.file}, line {question.line}: the query has {max(map(len, queries)):,} tokens, '
        f'but the evaluation context has only {self.context:,}: raise it with '
        f'--config.evaluation.segment_length=N'
      )
    is_cut = len(prefix) > max_prefix
    return _TokenizedQuestion(prefix[-max_prefix:].astype(np.int32), choices, is_cut)

  def _encode(self, question: cloze.Question, text: str) -> np.ndarray:
    first = question.line - len(question.context)
    with errors.named(f'{question.file}, lines {first} to {question.line}'):
      return self.vocabulary.encode(text.encode(), special=False).astype(np.int32)

  def _is_unknown(self, word: str) -> bool:
    unknown = self.vocabulary.unknown
    return unknown is not None and unknown in self.vocabulary.encode(word.encode(), special=False)


def check_protocol(protocol: str) -> None:
  """Raises BadInput for an unknown protocol."""
  if protocol not in PROTOCOLS:
    raise errors.BadInput(f'--cloze_protocol={protocol} is not one of: {", ".join(PROTOCOLS)}')


def _equalize_scores(choices: Sequence[np.ndarray], scores: np.ndarray) -> np.ndarray:
  """Gives choices with equal tokens exactly equal scores, without rounding differences."""
  first_scores: dict[bytes, float] = {}
  equalized = []
  for ids, score in zip(choices, scores, strict=True):
    equalized.append(first_scores.setdefault(ids.tobytes(), score))
  return np.array(equalized, np.float64)


def wilson_interval(points: float, count: int) -> tuple[float, float]:
  """Returns the 95 % confidence interval of a proportion by Wilson (1927)."""
  proportion = points / count
  z2 = Z_95 * Z_95 / count
  middle = (proportion + z2 / 2) / (1 + z2)
  variance = max(proportion * (1 - proportion), 0)
  half = math.sqrt(variance * z2 + z2 * z2 / 4) / (1 + z2)
  return max(middle - half, 0.0), min(middle + half, 1.0)


def summarize(answers: Sequence[ClozeAnswer]) -> dict[str, dict[str, Any]]:
  """Computes for each kind the accuracy, its confidence interval, and counts of special cases."""
  kinds = {}
  for kind in dict.fromkeys(answer.question.kind for answer in answers):
    group = [answer for answer in answers if answer.question.kind == kind]
    points = math.fsum(answer.point for answer in group)
    low, high = wilson_interval(points, len(group))
    kinds[kind] = {
      'questions': len(group),
      'accuracy': points / len(group),
      'low': low,
      'high': high,
      'strict_accuracy': sum(answer.point == 1 for answer in group) / len(group),
      'ties': sum(len(answer.best) > 1 for answer in group),
      'unknown': sum(sum(answer.unknown) for answer in group),
      'unknown_answers': sum(answer.answer_unknown for answer in group),
      'context_cut': sum(answer.cut for answer in group),
    }
  return kinds


def build_result(
  answers: Sequence[ClozeAnswer], question_set: QuestionSet, step: int, protocol: str, context: int
) -> dict[str, Any]:
  """Builds the result stored in `cloze_<name>.json`."""
  label = 'cloze questions'
  if question_set.is_official:
    label = "questions of the Children's Book Test"
  limit = None if context >= recurrent_config.UNBOUNDED else context
  return {
    'label': label,
    'official': question_set.is_official,
    'name': question_set.name,
    'step': step,
    'kinds': summarize(answers),
    'protocol': {
      'score': protocol,
      'of': SCORED[protocol],
      'context': limit,
      'ties': 'share the point',
    },
    'files': [str(file) for file in question_set.file_by_kind.values()],
  }


def format_table(result: dict[str, Any]) -> str:
  """Formats the result of `Run.cloze` as a table."""
  rows = [('kind', 'questions', 'accuracy', '95 %', 'strict', 'ties', 'unknown', 'cut')]
  for kind, r in result['kinds'].items():
    row = (
      kind,
      f'{r["questions"]:,}',
      f'{r["accuracy"]:.4f}',
      f'{r["low"]:.4f}-{r["high"]:.4f}',
      f'{r["strict_accuracy"]:.4f}',
      f'{r["ties"]:,}',
      f'{r["unknown_answers"]:,}',
      f'{r["context_cut"]:,}',
    )
    rows.append(row)
  protocol = result['protocol']
  context = 'unlimited'
  if protocol['context']:
    context = f'at most {protocol["context"]:,} tokens'
  note = (
    f'{result["label"]}; {result["name"]}, step {result["step"]:,}, protocol '
    f'{protocol["score"]}: {protocol["of"]}, context: {context}; ties share the point'
  )
  return '\n'.join([*text_tables.align_columns(rows, '<>'), note])


def save(
  result: dict[str, Any], answers: Sequence[ClozeAnswer], folder: pathlib.Path
) -> pathlib.Path:
  """Writes the result as JSON and the answers as JSON lines next to it; returns the JSON path.

  The file name is cloze[_prefix]_<name>, one file per protocol. Only the first process writes.
  """
  name = f'cloze_{result["name"]}.json'
  protocol = result['protocol']['score']
  if protocol != PROTOCOLS[0]:
    name = f'cloze_{protocol}_{result["name"]}.json'
  path = folder / name
  fields = (answer.fields() for answer in answers)
  language_modeling.save(result, path, fields, path.with_suffix('.jsonl'))
  return path
