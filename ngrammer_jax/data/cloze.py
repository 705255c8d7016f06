"""Questions of the Children's Book Test (Hill et al. 2016): twenty sentences and one with a gap.

A question is a block of 21 numbered lines. The last one has a word replaced by XXXXX and, after
tabs, that word and ten candidates: `21 query <TAB> answer <TAB><TAB> c1|c2|...|c10`. The files are
named cbtest_{NE,CN,V,P}_{train,valid_2000ex,test_2500ex}.txt, by the class of the missing word.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import pathlib
import re

from ngrammer_jax import errors
from ngrammer_jax.data import sections, text_files

KINDS = {'NE': 'named entities', 'CN': 'common nouns', 'V': 'verbs', 'P': 'prepositions'}
FILES = {'train': 'train', 'validation': 'valid_2000ex', 'test': 'test_2500ex'}
GAP = 'XXXXX'
CONTEXT, CANDIDATES = 20, 10
NAMED = re.compile(rf'cbtest_({"|".join(KINDS)})_({"|".join(FILES.values())})\.txt')
PUBLISHED = 'take the file as it was published'


@dataclasses.dataclass(frozen=True)
class Question:
  """Which of ten words stands in the gap.

  Attributes:
    kind: the class of the word: one of KINDS; of another file than the published ones, its name.
    context: the sentences before the query.
    query: a sentence with GAP in it, once.
    candidates: what may stand there, in the order of the file.
    answer: what does.
    file: where the question is from, the name alone.
    line: of the query in that file, from 1 on.
  """

  kind: str
  context: tuple[str, ...]
  query: str
  candidates: tuple[str, ...]
  answer: str
  file: str
  line: int


def find(path: pathlib.Path, split: str) -> dict[str, pathlib.Path]:
  """The files of questions of a split, by kind, anywhere in a folder; or a file, of any split.

  Raises:
    BadInput: there are none, or several of one kind.
  """
  if not path.exists():
    raise errors.BadInput(f'--cloze={path}: no such file or folder; expected {_wanted(split)}')
  if path.is_file():
    named = NAMED.fullmatch(path.name)
    return {named[1] if named else path.stem: path}
  found: dict[str, pathlib.Path] = {}
  for kind in KINDS:
    name = f'cbtest_{kind}_{FILES[split]}.txt'
    files = sorted(file for file in path.rglob(name) if file.is_file())
    if len(files) > 1:
      raise errors.BadInput(
        f'--cloze={path} has {name} {len(files)} times, {files[0]} and {files[1]}: give the folder '
        f'of one of them'
      )
    if files:
      found[kind] = files[0]
  if not found:
    raise errors.BadInput(
      f'--cloze={path} has no questions of --split={split}: expected {_wanted(split)}, anywhere '
      f'below; of raw books, questions like those are made by --cloze_made=N'
    )
  return found


def official(path: pathlib.Path) -> bool:
  """Whether a file is named as one of the published ones."""
  return NAMED.fullmatch(path.name) is not None


def _wanted(split):
  return f'cbtest_{{{",".join(KINDS)}}}_{FILES[split]}.txt'


def read(path: pathlib.Path, kind: str) -> Iterator[Question]:
  """Yields the questions of a file.

  Raises:
    BadInput: a block is not as it should be, with its file and line; or there is none.
  """
  block: list[str] = []
  number = 0
  for number, line in enumerate(_decoded(path), 1):
    where = f'{path}, line {number}'
    if not line.strip():
      if block:
        raise errors.BadInput(_truncated(where, block, 'an empty line'))
      continue
    _check_number(where, line, len(block) + 1, first=number == 1)
    block.append(line.partition(' ')[2])
    if len(block) > CONTEXT:
      yield _question(where, block, kind, path.name, number)
      block = []
  if block:
    raise errors.BadInput(_truncated(f'{path}, line {number}', block, 'the end of the file'))
  if not number:
    raise errors.BadInput(f'{path} is empty: expected blocks of 21 numbered lines; {PUBLISHED}')


def _decoded(path):
  for number, line in enumerate(text_files.read_lines(path), 1):
    try:
      yield line.decode().rstrip('\r\n')
    except UnicodeDecodeError as error:
      raise errors.BadInput(
        f'{path}, line {number}: not valid UTF-8 at byte {error.start + 1} of the line '
        f'(0x{line[error.start]:02x}): convert it, or {PUBLISHED}'
      ) from error


def _truncated(where, block, by):
  return (
    f'{where}: {by} after {len(block)} lines of a question, expected {CONTEXT + 1}: the block is '
    f'truncated; {PUBLISHED}'
  )


def _check_number(where, line, expected, first):
  """The lines of a question count from 1 to 21."""
  if line.partition(' ')[0] == str(expected):
    return
  said = f'{where}: expected line {expected} of a question, "{expected} ...", found '
  said += sections.quote_line(line)
  if first and not line[0].isdecimal():
    raise errors.BadInput(
      f'{said}: a raw book is no file of questions; give cbtest_*.txt, or make questions of the '
      f'book with --cloze_made=N'
    )
  raise errors.BadInput(f'{said}: the numbering is wrong; {PUBLISHED}')


def _question(where, block, kind, file, line):
  fields = block[-1].split('\t')
  if len(fields) != 4 or fields[2]:
    raise errors.BadInput(
      f'{where}: expected the query, a tab, the answer, two tabs and the candidates, found '
      f'{len(fields)} fields; {PUBLISHED}'
    )
  query, answer, _, listed = fields
  candidates = tuple(listed.split('|'))
  if query.count(GAP) != 1:
    raise errors.BadInput(
      f'{where}: expected {GAP} once in the query, found it {query.count(GAP)} times; {PUBLISHED}'
    )
  blank = [number for number, word in enumerate(candidates, 1) if not word.strip()]
  if len(candidates) != CANDIDATES or blank:
    raise errors.BadInput(
      f'{where}: expected {CANDIDATES} candidates separated by |, found {len(candidates)}'
      f'{f", of which number {blank[0]} is blank" if blank else ""}; {PUBLISHED}'
    )
  if answer not in candidates:
    raise errors.BadInput(
      f'{where}: the answer "{answer}" is not among the candidates {", ".join(candidates)}; '
      f'{PUBLISHED}'
    )
  return Question(kind, tuple(block[:-1]), query, candidates, answer, file, line)


def written(questions: Sequence[Question]) -> str:
  """Questions as their files have them."""
  blocks = []
  for q in questions:
    lines = (*q.context, f'{q.query}\t{q.answer}\t\t{"|".join(q.candidates)}')
    blocks.append(''.join(f'{i} {line}\n' for i, line in enumerate(lines, 1)))
  return ''.join(f'{block}\n' for block in blocks)
