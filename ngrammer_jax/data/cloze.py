"""Cloze questions of the Children's Book Test (Hill et al. 2016).

A question is 21 numbered lines: 20 sentences of context, and a query in which XXXXX
replaces one word. The query is followed by that word and ten candidates:
`21 query <TAB> answer <TAB><TAB> c1|c2|...|c10`. The files are named
cbtest_{NE,CN,V,P}_{train,valid_2000ex,test_2500ex}.txt, by the class of the replaced word.
"""

from collections.abc import Iterator
import dataclasses
import pathlib
import re

from ngrammer_jax import errors
from ngrammer_jax.data.files import text_files

KINDS = ('NE', 'CN', 'V', 'P')  # named entities, common nouns, verbs, prepositions
SPLIT_SUFFIXES = {'train': 'train', 'validation': 'valid_2000ex', 'test': 'test_2500ex'}
PLACEHOLDER = 'XXXXX'
NUM_CONTEXT_SENTENCES = 20
NUM_CANDIDATES = 10
FILE_NAME = re.compile(rf'cbtest_({"|".join(KINDS)})_({"|".join(SPLIT_SUFFIXES.values())})\.txt')
QUERY_LINE = re.compile(r'([^\t]+)\t([^\t]+)\t\t([^\t]+)')
REMEDY = 'use a file cbtest_*.txt as published'


@dataclasses.dataclass(frozen=True)
class Question:
  """A cloze question.

  Attributes:
    kind: class of the replaced word: one of KINDS, or the file name of an unpublished file.
    context: the sentences before the query.
    query: a sentence that contains PLACEHOLDER once.
    candidates: ten words, in the order of the file.
    answer: the candidate replaced by PLACEHOLDER.
    file: name of the file, without its folder.
    line: line number of the query in the file, from 1.
  """

  kind: str
  context: tuple[str, ...]
  query: str
  candidates: tuple[str, ...]
  answer: str
  file: str
  line: int


def find_files(path: pathlib.Path, split: str) -> dict[str, pathlib.Path]:
  """Returns the question files of a split by kind, from a folder and its subfolders.

  A single file is returned for any split.

  Raises:
    BadInput: no file, or several files of one kind.
  """
  if path.is_file():
    match = FILE_NAME.fullmatch(path.name)
    if match is None:
      return {path.stem: path}
    return {match[1]: path}
  file_by_kind: dict[str, pathlib.Path] = {}
  for kind in KINDS:
    for file in sorted(path.rglob(f'cbtest_{kind}_{SPLIT_SUFFIXES[split]}.txt')):
      if kind in file_by_kind:
        raise errors.BadInput(
          f'--cloze={path} contains {file.name} several times, {file_by_kind[kind]} and {file}: '
          f'use the folder of one of them'
        )
      file_by_kind[kind] = file
  if not file_by_kind:
    raise errors.BadInput(
      f'--cloze={path} is not a file of questions, and not a folder with '
      f'cbtest_{{{",".join(KINDS)}}}_{SPLIT_SUFFIXES[split]}.txt for --split={split}'
    )
  return file_by_kind


def read_questions(path: pathlib.Path, kind: str) -> Iterator[Question]:
  """Yields the questions of a file.

  Raises:
    BadInput: an invalid line. The message names the file and line.
  """
  lines: list[str] = []
  question = None
  for number, data in enumerate(text_files.read_lines(path), 1):
    location = f'{path}, line {number}'
    line = text_files.decode(data, location, f'convert it, or {REMEDY}').rstrip('\r\n')
    if not lines and not line.strip():
      continue
    index, _, text = line.partition(' ')
    if index != str(len(lines) + 1):
      raise errors.BadInput(
        f'{location}: expected line {len(lines) + 1} of a question, "{len(lines) + 1} ...", found '
        f'{text_files.quote_line(data)}; {REMEDY}'
      )
    lines.append(text)
    if len(lines) > NUM_CONTEXT_SENTENCES:
      question = _parse_question(location, lines, kind, path.name, number)
      yield question
      lines = []
  if lines or question is None:
    raise errors.BadInput(
      f'{path} ends after {len(lines)} lines of a question, expected {NUM_CONTEXT_SENTENCES + 1}; '
      f'{REMEDY}'
    )


def _parse_question(location: str, lines: list[str], kind: str, file: str, line: int) -> Question:
  """Returns the question of some lines. Raises BadInput if the last line is no query."""
  match = QUERY_LINE.fullmatch(lines[-1])
  query = answer = candidate_list = ''
  if match:
    query, answer, candidate_list = match.groups()
  candidates = tuple(candidate_list.split('|'))
  is_valid = query.count(PLACEHOLDER) == 1 and answer in candidates
  if not is_valid or len(candidates) != NUM_CANDIDATES:
    raise errors.BadInput(
      f'{location}: expected a query with one {PLACEHOLDER}, a tab, its answer, two tabs, and '
      f'{NUM_CANDIDATES} candidates with | between them, one of which is the answer; {REMEDY}'
    )
  return Question(kind, tuple(lines[:-1]), query, candidates, answer, file, line)
