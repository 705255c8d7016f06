"""Which of ten words a language model finds most likely in a gap: the Children's Book Test.

A model reads twenty sentences, each ended by a newline, and the query up to the gap, as the
beginning of a document. By the protocol `query` (Hill et al. 2016), a candidate scores
log p(candidate and the rest of the query | what is before); by `prefix`, log p(candidate | what is
before), where a vocabulary of characters or bytes favours `man` over `manner`. Memory and state are
computed once for a question, and taken by each candidate in turn.

Candidates of equal scores share the point: where the answer is among the k best, it counts 1/k. Of
equal tokens, as all words out of the vocabulary are, the scores are equal. The strict accuracy
counts a shared point as wrong.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import itertools
import json
import logging
import math
import pathlib
from typing import Any

import jax
import numpy as np

from ngrammer_jax import errors, files, hosts
from ngrammer_jax.data import cloze, synthetic_cloze
from ngrammer_jax.data import vocabulary as vocabularies
from ngrammer_jax.evaluation import language_modeling, ranking
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import language_model, recurrent_config

PROTOCOLS = ('query', 'prefix')
TOGETHER = 4096  # questions that are sorted by length
Z = 1.959963984540054  # of a normal distribution, 95 % lies within


@dataclasses.dataclass(frozen=True)
class Source:
  """Where questions come from.

  Attributes:
    name: the split of a folder, or the name of a file without its ending.
    official: they are of files named as those of the Children's Book Test.
    made: they were made of raw books.
    files: that were read.
    counts: questions of each kind.
    read: yields them.
  """

  name: str
  official: bool
  made: bool
  files: tuple[str, ...]
  counts: dict[str, int]
  read: Callable[[], Iterator[cloze.Question]]


def source(path: pathlib.Path, split: str, made: int | None = None) -> Source:
  """The questions of a folder or a file, all of which are looked at.

  Args:
    path: see `data.cloze.find_files`; with `made`, see `data.synthetic_cloze.find_file`.
    split: of a folder: train, validation or test.
    made: questions of each class to be made of raw books, at most. None: official ones are read.

  Raises:
    BadInput: no such questions, or something is wrong with one of them.
  """
  name = path.stem if path.is_file() else split
  if made is not None:
    file = synthetic_cloze.find_file(path, split)
    by_kind = synthetic_cloze.generate_questions(file, made)
    everything = list(itertools.chain.from_iterable(by_kind.values()))
    counts = {f'made-{kind}': len(some) for kind, some in by_kind.items() if some}
    said = ', '.join(f'{kind} {count:,}' for kind, count in counts.items())
    logging.info('%s: %s, at most %d of each, of %s', synthetic_cloze.LABEL, said, made, file)
    return Source(name, False, True, (str(file),), counts, lambda: iter(everything))
  found = cloze.find_files(path, split)
  counts = {kind: sum(1 for _ in cloze.read_questions(file, kind)) for kind, file in found.items()}

  def read():
    by_kind = (cloze.read_questions(file, kind) for kind, file in found.items())
    return itertools.chain.from_iterable(by_kind)

  official = all(map(cloze.is_official, found.values()))
  return Source(name, official, False, tuple(map(str, found.values())), counts, read)


@dataclasses.dataclass(frozen=True)
class Answer:
  """What a model makes of a question.

  Attributes:
    question: without its context.
    scores: nats of each candidate, negative, float64 [10].
    unknown: for each candidate, whether the vocabulary does not have it.
    cut: the context did not fit, and its oldest tokens were left out.
  """

  question: cloze.Question
  scores: np.ndarray
  unknown: tuple[bool, ...]
  cut: bool

  @property
  def best(self) -> list[str]:
    """The candidates of the highest score."""
    pairs = zip(self.question.candidates, self.scores == self.scores.max(), strict=True)
    return [candidate for candidate, best in pairs if best]

  @property
  def point(self) -> float:
    """1 for the right answer, 1/k where it shares the highest score with others, else 0."""
    return self.best.count(self.question.answer) / len(self.best)

  @property
  def answer_unknown(self) -> bool:
    """Whether the vocabulary does not have the answer."""
    return self.unknown[self.question.candidates.index(self.question.answer)]

  def line(self) -> str:
    """As JSON, without an end of line."""
    q = self.question
    fields = {'kind': q.kind, 'file': q.file, 'line': q.line, 'answer': q.answer}
    fields |= {'chosen': self.best[0], 'point': self.point, 'candidates': q.candidates}
    return json.dumps(fields | {'scores': self.scores.tolist()}, ensure_ascii=False)


class Evaluator:
  """Answers questions.

  Args:
    model: with the memory and windows of evaluation.
    mesh: where it lies.
    vocabulary: of its tokens.
    rows: questions at a time.
    context: tokens that a token is predicted from, at most.
    protocol: one of PROTOCOLS.

  Raises:
    BadInput: there is no such protocol.
  """

  def __init__(
    self,
    model: language_model.LanguageModel,
    mesh: jax.sharding.Mesh,
    vocabulary: vocabularies.Vocabulary,
    rows: int,
    context: int,
    protocol: str = 'query',
  ):
    check_protocol(protocol)
    self._vocabulary, self._context, self._protocol = vocabulary, context, protocol
    self._rank = ranking.Ranker(model, mesh, rows)

  def __call__(
    self,
    params: Any,
    codebook: Any,
    questions: Iterable[cloze.Question],
    report: Callable[[int], None] = lambda questions: None,
  ) -> Iterator[Answer]:
    """Yields the answers in the order of the questions.

    Args:
      params, codebook: of the model.
      questions: of any kind.
      report: called with the number of questions answered since the last call.

    Raises:
      BadInput: a query does not fit the context, or the vocabulary does not have a character.
    """
    questions = iter(questions)
    while some := list(itertools.islice(questions, TOGETHER)):
      texts = [self._tokens(question) for question in some]
      prefixes, choices, cut = zip(*texts, strict=True)
      scores: list[Any] = [None] * len(some)
      for i, found in self._rank(params, codebook, prefixes, choices):
        scores[i] = found
        report(1)
      for i, question in enumerate(some):
        unknown = tuple(map(self._unknown, question.candidates))
        of_tokens = _equal(choices[i], scores[i])
        yield Answer(dataclasses.replace(question, context=()), of_tokens, unknown, cut[i])

  def _tokens(self, question):
    """The ids of what is before the gap, of each choice, and whether some were left out."""
    start, end = question.query.split(cloze.PLACEHOLDER)
    start = start.removesuffix(' ')  # a token may begin with it
    end = end if self._protocol == 'query' else ''
    space = question.query[len(start) :].partition(cloze.PLACEHOLDER)[0]
    context = self._ids(question, ''.join(f'{sentence}\n' for sentence in question.context))
    before = self._ids(question, start)
    wholes = [self._ids(question, f'{start}{space}{c}{end}') for c in question.candidates]
    # Some vocabularies have other tokens for a text that goes on: all choices begin where they do.
    shared = min(min(map(len, wholes)) - 1, *(_alike(before, whole) for whole in wholes))
    choices = [whole[shared:] for whole in wholes]
    prefix = np.concatenate([[self._vocabulary.document_start], context, wholes[0][:shared]])
    room = self._context - max(map(len, choices)) + 1  # what comes last is not read
    if room < max(shared, 1):
      raise errors.BadInput(
        f'{question.file}, line {question.line}: the query has {max(map(len, wholes)):,} tokens, '
        f'but the context of evaluation {self._context:,}: raise it with '
        f'--config.evaluation.segment_length=N'
      )
    return prefix[-room:].astype(np.int32), choices, len(prefix) > room

  def _ids(self, question, text):
    try:
      return self._vocabulary.encode(text.encode()).astype(np.int32)
    except errors.BadInput as error:
      first = question.line - len(question.context)
      raise errors.BadInput(
        f'{question.file}, lines {first} to {question.line}: {error}'
      ) from error

  def _unknown(self, word):
    unknown = self._vocabulary.unknown
    return unknown is not None and unknown in self._vocabulary.encode(word.encode())


def check_protocol(protocol: str) -> None:
  """Raises BadInput where there is no such protocol."""
  if protocol not in PROTOCOLS:
    raise errors.BadInput(f'--cloze_protocol={protocol} is not one of: {", ".join(PROTOCOLS)}')


def check_model(config: model_config.ModelConfig) -> None:
  """Raises BadInput for a model that cannot go on after a prefix."""
  if config.position in model_config.SEGMENT_POSITIONS:
    raise errors.BadInput(
      f'model.position={config.position!r} counts from the end of a segment: such a model can be '
      f'evaluated on a split, but cannot go on after a context'
    )


def _alike(one, other):
  """How many tokens two texts begin with alike."""
  size = min(len(one), len(other))
  (different,) = np.nonzero(one[:size] != other[:size])
  return int(different[0]) if different.size else size


def _equal(choices, scores):
  """The scores, made equal to the last bit where the tokens are equal."""
  first: dict[bytes, float] = {}
  pairs = zip(choices, scores, strict=True)
  return np.array([first.setdefault(ids.tobytes(), score) for ids, score in pairs], np.float64)


def wilson(points: float, count: int) -> tuple[float, float]:
  """The interval of Wilson (1927) that covers a proportion with 95 %."""
  share, z2 = points / count, Z * Z / count
  middle = (share + z2 / 2) / (1 + z2)
  half = math.sqrt(max(share * (1 - share), 0) * z2 + z2 * z2 / 4) / (1 + z2)
  return max(middle - half, 0.0), min(middle + half, 1.0)


def summary(answers: Sequence[Answer]) -> dict[str, dict[str, Any]]:
  """For every kind: accuracy with its interval, and what there is to know of ties."""
  by_kind: dict[str, list[Answer]] = {}
  for answer in answers:
    by_kind.setdefault(answer.question.kind, []).append(answer)
  kinds = {}
  for kind, some in by_kind.items():
    points = math.fsum(answer.point for answer in some)
    low, high = wilson(points, len(some))
    kinds[kind] = {
      'questions': len(some),
      'accuracy': points / len(some),
      'low': low,
      'high': high,
      'strict_accuracy': sum(answer.point == 1 for answer in some) / len(some),
      'ties': sum(len(answer.best) > 1 for answer in some),
      'unknown_candidates': sum(sum(answer.unknown) for answer in some),
      'unknown_answers': sum(answer.answer_unknown for answer in some),
      'context_cut': sum(answer.cut for answer in some),
    }
  return kinds


def result(
  answers: Sequence[Answer], found: Source, step: int, protocol: str, context: int
) -> dict[str, Any]:
  """What `cloze_<name>.json` holds."""
  official = "questions of the Children's Book Test"
  label = synthetic_cloze.LABEL if found.made else official if found.official else 'cloze questions'
  of = 'the candidate and the rest of the query' if protocol == 'query' else 'the candidate alone'
  limit = None if context >= recurrent_config.UNBOUNDED else context
  return {
    'label': label,
    'official': found.official,
    'made': found.made,
    'name': found.name,
    'step': step,
    'kinds': summary(answers),
    'protocol': {'score': protocol, 'of': of, 'context': limit, 'ties': 'share the point'},
    'files': list(found.files),
  }


def table(result: dict[str, Any]) -> str:
  """The result of `Run.cloze`, to read."""
  lines = [
    f'{"kind":<20}{"questions":>10}{"accuracy":>10}{"95 %":>16}{"strict":>8}{"ties":>7}'
    f'{"unknown":>9}{"cut":>7}'
  ]
  for kind, r in result['kinds'].items():
    lines.append(
      f'{kind:<20}{r["questions"]:>10,}{r["accuracy"]:>10.4f}{r["low"]:>9.4f}-{r["high"]:.4f}'
      f'{r["strict_accuracy"]:>8.4f}{r["ties"]:>7,}{r["unknown_answers"]:>9,}{r["context_cut"]:>7,}'
    )
  protocol = result['protocol']
  context = f'{protocol["context"]:,} tokens at most' if protocol['context'] else 'all of it'
  lines.append(
    f'{result["label"]}; {result["name"]}, step {result["step"]:,}, protocol '
    f'{protocol["score"]}: {protocol["of"]}, context: {context}; ties share the point'
  )
  return '\n'.join(lines)


def save(result: dict[str, Any], answers: Sequence[Answer], folder: pathlib.Path) -> pathlib.Path:
  """Writes the result as JSON, the answers as JSON lines beside it, and returns the former.

  Questions that were made, and another protocol, have names of their own:
  cloze[_made][_prefix]_<name>. Of several processes, the first writes.
  """
  made = '_made' if result['made'] else ''
  score = result['protocol']['score']
  other = '' if score == PROTOCOLS[0] else f'_{score}'
  path = folder / f'cloze{made}{other}_{result["name"]}.json'
  language_modeling.save(result, path)
  if hosts.first():
    lines = ''.join(f'{answer.line()}\n' for answer in answers)
    files.write(path.with_suffix('.jsonl'), lines)
  return path
