"""Synthetic cloze questions, generated from raw books. They are not the official ones.

As in the Children's Book Test, a question consists of 21 consecutive sentences. One word of the
last sentence is replaced. The candidates are this word and nine others of its class, all of which
occur elsewhere in the 21 sentences. The official word classes come from a tagger (parts of speech,
named entities); these depend on the spelling alone:

  names           capitalised inside a sentence, and never in lower case in the book
  content-words   in lower case, and not in a list of function words
  prepositions    in a list
"""

from collections.abc import Callable, Iterator
import itertools
import pathlib
import random
import re
import typing

from ngrammer_jax import errors
from ngrammer_jax.data import cloze, sections, text_files

KINDS = ('names', 'content-words', 'prepositions')
LABEL = 'CBT-style questions generated from raw books, not the official ones'
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
SENTENCE_OPENERS = frozenset("` `` ' '' \" -- - : ; . ! ? -LRB- -LCB- -LSB-".split())


class _Book(typing.NamedTuple):
  """The sentences of a book as lists of words, and the line number of the first sentence."""

  sentences: list[list[str]]
  first_line: int


def find_file(path: pathlib.Path, split: str) -> pathlib.Path:
  """Returns the file of raw books: `path`, or cbt_<split>.txt in the folder or its `data` folder.

  Raises:
    BadInput: there is no such file.
  """
  file = path if path.is_file() else sections.find_book_file(path, split)
  if file is None:
    name = sections.book_file_name(split)
    raise errors.BadInput(f'--cloze={path}: expected a file of raw books, or a folder with {name}')
  return file


def generate_questions(
  path: pathlib.Path, count: int, seed: int = 0
) -> dict[str, list[cloze.Question]]:
  """Generates questions of every class from raw books, reproducibly.

  Args:
    path: file of books, each of which begins with its title line.
    count: maximum number of questions per class, sampled at random and returned in text order.
    seed: random seed.

  Raises:
    BadInput: the file does not hold raw books, is not UTF-8, or yields no question.
  """
  books = list(_read_books(path))
  class_predicates = [_class_predicates(book) for book in books]
  positions = [
    (book, query)
    for book in range(len(books))
    for query in range(cloze.NUM_CONTEXT_SENTENCES, len(books[book].sentences))
  ]
  questions_by_kind: dict[str, list[cloze.Question]] = {}
  for kind in KINDS:
    rng = random.Random(f'{seed} {kind}')
    questions: list[cloze.Question] = []
    for book, query in rng.sample(positions, len(positions)):
      if len(questions) == count:
        break
      is_in_class = class_predicates[book][kind]
      question = _make_question(rng, kind, is_in_class, books[book], query, path.name)
      if question is not None:
        questions.append(question)
    questions_by_kind[kind] = sorted(questions, key=lambda question: question.line)
  if not any(questions_by_kind.values()):
    raise errors.BadInput(
      f'{path}: no question can be generated from it: expected books of at least '
      f'{cloze.NUM_CONTEXT_SENTENCES + 1} sentences, one per line, with words and punctuation '
      f'separated by spaces'
    )
  return questions_by_kind


def _read_books(path: pathlib.Path) -> Iterator[_Book]:
  for _, lines in itertools.groupby(sections.read_book_lines(path), lambda line: line.book):
    decoded = [
      (line.number, text_files.decode(line.text, f'{path}, line {line.number}')) for line in lines
    ]
    yield _Book([text.split() for _, text in decoded], first_line=decoded[0][0])


def _class_predicates(book: _Book) -> dict[str, Callable[[str], bool]]:
  """Returns, for each class, a function that tests whether a word of the book belongs to it."""
  lower_case, inside_sentence = set(), set()
  for sentence in book.sentences:
    for previous, word in zip(['.', *sentence], sentence, strict=False):
      if word.islower():
        lower_case.add(word)
      elif previous not in SENTENCE_OPENERS:
        inside_sentence.add(word)
  names = {
    word
    for word in inside_sentence
    if WORD.fullmatch(word) and word[0].isupper() and not word.isupper()
    if word.lower() not in lower_case
  }
  content_words = {
    word for word in lower_case - FUNCTION_WORDS if len(word) > 1 and WORD.fullmatch(word)
  }
  return {
    'names': names.__contains__,
    'content-words': content_words.__contains__,
    'prepositions': lambda word: word.lower() in PREPOSITIONS,
  }


def _make_question(
  rng: random.Random,
  kind: str,
  is_in_class: Callable[[str], bool],
  book: _Book,
  query_index: int,
  file: str,
) -> cloze.Question | None:
  """Returns a question with a sentence as its query, or None if the class has too few words."""
  context = book.sentences[query_index - cloze.NUM_CONTEXT_SENTENCES : query_index]
  query = book.sentences[query_index]
  positions = [i for i, word in enumerate(query) if is_in_class(word)]
  if not positions or cloze.PLACEHOLDER in query:
    return None
  position = rng.choice(positions)
  answer = query[position]
  rest = [*query[:position], *query[position + 1 :]]
  class_words = [word for sentence in (*context, rest) for word in sentence if is_in_class(word)]
  # The first spelling of every word.
  others = {word.lower(): word for word in reversed(class_words)}
  if others.pop(answer.lower(), None) is None or len(others) < cloze.NUM_CANDIDATES - 1:
    return None
  candidates = [answer, *rng.sample(sorted(others.values()), cloze.NUM_CANDIDATES - 1)]
  return cloze.Question(
    kind=f'made-{kind}',
    context=tuple(' '.join(sentence) for sentence in context),
    query=' '.join([*query[:position], cloze.PLACEHOLDER, *query[position + 1 :]]),
    candidates=tuple(sorted(candidates)),
    answer=answer,
    file=file,
    line=book.first_line + query_index,
  )
