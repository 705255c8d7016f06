"""CBT-style questions made of raw books. They are not the official ones.

As in the Children's Book Test, 21 sentences in a row make a question: of the last one a word is
taken out, and it and nine others of its class, all of which occur in the rest, are the candidates.
The official classes are by a tagger (parts of speech, named entities). These are by spelling alone:

  names           capitalised where no sentence begins, and never in lower case in the book
  content-words   in lower case, and not in a list of function words
  prepositions    in a list
"""

from collections.abc import Callable, Iterator, Sequence
import pathlib
import random
import re
import typing

from ngrammer_jax import errors
from ngrammer_jax.data import cloze, sections, text_files

KINDS = ('names', 'content-words', 'prepositions')
LABEL = 'CBT-style questions made of raw books, not the official ones'
PREPOSITIONS = frozenset(
  'about above across after against along amid among around at before behind below beneath beside '
  'besides between beyond by down during except for from in inside into like near of off on onto '
  'out outside over past since through throughout till to toward towards under underneath until '
  'unto up upon with within without'.split()
)
FUNCTION_WORDS = PREPOSITIONS | frozenset(
  'a all also always am an and another any anybody anyone anything are as away back be because '
  'been being both but ca can could dare did do does done each either else enough even ever every '
  'everybody everyone everything few had has have having he her here hers herself him himself his '
  'how however i if indeed is it its itself just least less many may me might mine more most much '
  'must my myself need neither never no nobody none nor not nothing now nowhere once one only or '
  'other others ought our ours ourselves own perhaps quite rather same shall she should so some '
  'somebody someone something still such than that the their theirs them themselves then there '
  'these they thing things this those though thou thee thy too us very was we well were what '
  'whatever when where whether which while who whom whose why will wo would yet you your yours '
  'yourself yourselves'.split()
)
WORD = re.compile(r"[A-Za-z]+(?:[-'][A-Za-z]+)*")
OPENING = frozenset("` `` ' '' \" -- - : ; . ! ? -LRB- -LCB- -LSB-".split())


class _Book(typing.NamedTuple):
  """The sentences of a book as tokens, and the line of the first in the file."""

  sentences: list[list[str]]
  line: int


def find(path: pathlib.Path, split: str) -> pathlib.Path:
  """The raw books of a split: cbt_<split>.txt in a folder or the `data` in it, or a file given."""
  word = cloze.FILES[split].partition('_')[0]
  places = [path, path / f'cbt_{word}.txt', path / 'data' / f'cbt_{word}.txt']
  file = next((place for place in places if place.is_file()), None)
  if file is None:
    raise errors.BadInput(f'--cloze={path}: expected the raw books, a file or cbt_{word}.txt in it')
  return file


def made_of(path: pathlib.Path, count: int, seed: int = 0) -> dict[str, list[cloze.Question]]:
  """Questions of every class, made of a file of raw books: the same for the same seed.

  Args:
    path: of the file, whose books begin with their titles.
    count: questions of each class, at most: from places drawn by chance, in their order.
    seed: of what is drawn.

  Raises:
    BadInput: no raw books, not UTF-8, or no question can be made.
  """
  books = list(_books(path))
  of_book = [_classes(book) for book in books]
  places = [
    (number, last)
    for number, book in enumerate(books)
    for last in range(cloze.CONTEXT, len(book.sentences))
  ]
  made: dict[str, list[cloze.Question]] = {}
  for kind in KINDS:
    rng = random.Random(f'{seed} {kind}')
    made[kind] = []
    for number, last in rng.sample(places, len(places)):
      if len(made[kind]) == count:
        break
      question = _question(rng, kind, of_book[number][kind], books[number], last, path.name)
      if question is not None:
        made[kind].append(question)
    made[kind].sort(key=lambda question: question.line)
  if not any(made.values()):
    raise errors.BadInput(
      f'{path}: no question can be made of it: expected books with {cloze.CONTEXT + 1} sentences '
      f'or more, one a line, their words and signs separated by spaces'
    )
  return made


def _books(path: pathlib.Path) -> Iterator[_Book]:
  sentences, first = None, 0
  for number, line in enumerate(text_files.read_lines(path), 1):
    if line.startswith(sections.BOOK_MARKER):
      if sentences:
        yield _Book(sentences, first)
      sentences, first = [], number + 1
      continue
    if sentences is None:
      raise errors.BadInput(
        f'{path}, line 1: expected a title, as in "_BOOK_TITLE_ : Author___Title.txt.out", found '
        f'{sections.quote_line(line)}: --cloze_made=N makes questions of raw books'
      )
    try:
      sentences.append(line.decode().split())
    except UnicodeDecodeError as error:
      raise errors.BadInput(
        f'{path}, line {number}: not valid UTF-8 at byte {error.start + 1} of the line '
        f'(0x{line[error.start]:02x}): convert it'
      ) from error
  if sentences:
    yield _Book(sentences, first)


def _classes(book: _Book) -> dict[str, Callable[[str], bool]]:
  """For each class, whether a word of the book belongs to it."""
  lower, inside = set(), set()
  for sentence in book.sentences:
    for before, word in zip(['.', *sentence], sentence, strict=False):
      if word.islower():
        lower.add(word)
      elif before not in OPENING:
        inside.add(word)
  names = {
    word
    for word in inside
    if WORD.fullmatch(word) and word[0].isupper() and not word.isupper()
    if word.lower() not in lower
  }
  content = {word for word in lower - FUNCTION_WORDS if len(word) > 1 and WORD.fullmatch(word)}
  return {
    'names': names.__contains__,
    'content-words': content.__contains__,
    'prepositions': lambda word: word.lower() in PREPOSITIONS,
  }


def _question(
  rng: random.Random, kind: str, belongs: Callable[[str], bool], book: _Book, last: int, file: str
) -> cloze.Question | None:
  """A question whose query is sentence `last` of a book; None where the class has too few words."""
  context, query = book.sentences[last - cloze.CONTEXT : last], book.sentences[last]
  gaps = [place for place, word in enumerate(query) if belongs(word)]
  if not gaps or cloze.GAP in query:
    return None
  place = rng.choice(gaps)
  answer = query[place]
  rest = [*query[:place], *query[place + 1 :]]
  others = _distinct([word for sentence in (*context, rest) for word in sentence if belongs(word)])
  if others.pop(answer.lower(), None) is None or len(others) < cloze.CANDIDATES - 1:
    return None
  candidates = [answer, *rng.sample(sorted(others.values()), cloze.CANDIDATES - 1)]
  return cloze.Question(
    f'made-{kind}',
    tuple(' '.join(sentence) for sentence in context),
    ' '.join([*query[:place], cloze.GAP, *query[place + 1 :]]),
    tuple(sorted(candidates)),
    answer,
    file,
    book.line + last,
  )


def _distinct(words: Sequence[str]) -> dict[str, str]:
  """One spelling of every word, the first, by its lower case."""
  found: dict[str, str] = {}
  for word in words:
    found.setdefault(word.lower(), word)
  return found
