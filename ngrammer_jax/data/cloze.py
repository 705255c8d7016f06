"""Cloze questions of the Children's Book Test (Hill et al. 2016).

A question is a block of 21 numbered lines: 20 sentences of context, and a query in which XXXXX
replaces one word. The query is followed by that word and ten candidates:
`21 query <TAB> answer <TAB><TAB> c1|c2|...|c10`. The files are named
cbtest_{NE,CN,V,P}_{train,valid_2000ex,test_2500ex}.txt, by the class of the replaced word.
"""

from collections.abc import Iterator
import dataclasses
import pathlib
import re

from ngrammer_jax import errors
from ngrammer_jax.data import text_files

KINDS = ('NE', 'CN', 'V', 'P')  # named entities, common nouns, verbs, prepositions
SPLIT_SUFFIXES = {'train': 'train', 'validation': 'valid_2000ex', 'test': 'test_2500ex'}
PLACEHOLDER = 'XXXXX'
NUM_CONTEXT_SENTENCES, NUM_CANDIDATES = 20, 10
FILE_NAME = re.compile(rf'cbtest_({"|".join(KINDS)})_({"|".join(SPLIT_SUFFIXES.values())})\.txt')
REMEDY = 'use the file as published'


@dataclasses.dataclass(frozen=True)
class Question:
  """A cloze question.

  Attributes:
    kind: class of the replaced word: one of KINDS, or the file name if it is not a published one.
    context: the sentences before the query.
    query: a sentence that contains PLACEHOLDER once.
    candidates: ten words, in the order of the file.
    answer: the candidate that PLACEHOLDER replaces.
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

  A file is returned as it is, for any split.

  Raises:
    BadInput: there is no file, or there are several of one kind.
  """
  if not path.exists():
    pattern = _name_pattern(split)
    raise errors.BadInput(f'--cloze={path}: no such file or folder; expected {pattern}')
  if path.is_file():
    match = FILE_NAME.fullmatch(path.name)
    return {match[1] if match else path.stem: path}
  file_by_kind: dict[str, pathlib.Path] = {}
  for kind in KINDS:
    name = f'cbtest_{kind}_{SPLIT_SUFFIXES[split]}.txt'
    files = sorted(file for file in path.rglob(name) if file.is_file())
    if len(files) > 1:
      raise errors.BadInput(
        f'--cloze={path} contains {name} {len(files)} times, {files[0]} and {files[1]}: use the '
        f'folder of one of them'
      )
    if files:
      file_by_kind[kind] = files[0]
  if not file_by_kind:
    raise errors.BadInput(
      f'--cloze={path} has no questions for --split={split}: expected {_name_pattern(split)} in it '
      f'or a subfolder'
    )
  return file_by_kind


def is_official(path: pathlib.Path) -> bool:
  """Returns whether a file has the name of a published one."""
  return FILE_NAME.fullmatch(path.name) is not None


def _name_pattern(split):
  return f'cbtest_{{{",".join(KINDS)}}}_{SPLIT_SUFFIXES[split]}.txt'


def read_questions(path: pathlib.Path, kind: str) -> Iterator[Question]:
  """Yields the questions of a file.

  Raises:
    BadInput: a block is invalid, or there is none. The message names the file and line.
  """
  block: list[str] = []
  number = questions = 0
  for number, data in enumerate(text_files.read_lines(path), 1):
    location = f'{path}, line {number}'
    line = text_files.decode(data, location, f'convert it, or {REMEDY}').rstrip('\r\n')
    if not line.strip():
      if block:
        raise _truncation_error(location, block, 'an empty line')
      continue
    _check_line_number(location, line, len(block) + 1, is_first=number == 1)
    block.append(line.partition(' ')[2])
    if len(block) > NUM_CONTEXT_SENTENCES:
      yield _parse_question(location, block, kind, path.name, number)
      block, questions = [], questions + 1
  if block:
    raise _truncation_error(f'{path}, line {number}', block, 'the end of the file')
  if not questions:
    raise errors.BadInput(f'{path} is empty: expected blocks of 21 numbered lines; {REMEDY}')


def _error(location, problem):
  return errors.BadInput(f'{location}: {problem}; {REMEDY}')


def _truncation_error(location, block, end):
  expected = NUM_CONTEXT_SENTENCES + 1
  count = f'{len(block)} lines of a question, expected {expected}'
  return _error(location, f'{end} after {count}: the block is truncated')


def _check_line_number(location, line, expected, is_first):
  """Raises BadInput unless a line of a question begins with its number, 1 to 21."""
  if line.partition(' ')[0] == str(expected):
    return
  quote = text_files.quote_line(line)
  problem = f'expected line {expected} of a question, "{expected} ...", found {quote}'
  if is_first and not line[0].isdecimal():
    raise errors.BadInput(f'{location}: {problem}: this is not a question file; use cbtest_*.txt')
  raise _error(location, f'{problem}: the numbering is wrong')


def _parse_question(location, block, kind, file, line):
  fields = block[-1].split('\t')
  if len(fields) != 4 or fields[2]:
    form = 'the query, a tab, the answer, two tabs and the candidates'
    raise _error(location, f'expected {form}, found {len(fields)} fields')
  query, answer, _, candidate_list = fields
  candidates = tuple(candidate_list.split('|'))
  count = query.count(PLACEHOLDER)
  if count != 1:
    raise _error(location, f'expected {PLACEHOLDER} once in the query, found it {count} times')
  blank = [number for number, word in enumerate(candidates, 1) if not word.strip()]
  if len(candidates) != NUM_CANDIDATES or blank:
    problem = f'expected {NUM_CANDIDATES} candidates separated by |, found {len(candidates)}'
    problem += f', and candidate {blank[0]} is blank' if blank else ''
    raise _error(location, problem)
  if answer not in candidates:
    problem = f'the answer "{answer}" is not among the candidates {", ".join(candidates)}'
    raise _error(location, problem)
  return Question(kind, tuple(block[:-1]), query, candidates, answer, file, line)
