"""Questions with a gap: read from files, refused with file and line, made of raw books."""

import dataclasses

from ngrammer_jax.data import cloze, cloze_made
from tests.checks import bad_input
from tests.loops import each

SENTENCES = tuple(f"The dog number {i} saw a cat , and ran ! ''" for i in range(20))
CANDIDATES = ('Bird', 'bone', 'cat', 'cats', 'dog', 'fish', 'hare', 'mouse', 'n-a', 'p9.jpg')
NAME = 'cbtest_CN_test_2500ex.txt'
QUESTION = cloze.Question(
  'CN', SENTENCES, f"`` A {cloze.GAP} 's day , '' it said .", CANDIDATES, 'dog', NAME, 21
)
AGAIN = dataclasses.replace(QUESTION, query='XXXXX was late .', answer='Bird', line=43)
TITLE = '_BOOK_TITLE_ : Some_Body___A_Book.txt.out\n'
END = 'take the file as it was published'


def read(path):
  return list(cloze.read(path, 'CN'))


def write(folder, text, name=NAME):
  path = folder / name
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  return path


@each('change', [lambda t: t, lambda t: t.replace('\n', '\r\n'), str.rstrip])
def test_questions_are_read_as_they_are_written(tmp_path, change):
  text = change(cloze.written([QUESTION, AGAIN]))
  assert read(write(tmp_path, text)) == [QUESTION, AGAIN]


def test_characters_that_other_programs_take_for_ends_of_lines(tmp_path):
  context = ('One\u2028two\x0cthree\x85four .', *SENTENCES[1:])
  question = dataclasses.replace(QUESTION, context=context)
  assert read(write(tmp_path, cloze.written([question]))) == [question]


@each('split', cloze.FILES)
def test_the_genuine_questions(corpora, split):
  """One of each class and split; all that is in their files is in the questions."""
  found = cloze.find(corpora / 'cbt', split)
  assert list(found) == list(cloze.KINDS)
  for kind, path in found.items():
    questions = list(cloze.read(path, kind))
    (question,) = questions
    assert question.kind == kind and question.line == 21 and len(question.context) == 20
    assert question.answer in question.candidates
    assert list(question.candidates) == sorted(question.candidates)
    assert cloze.written(questions).split() == path.read_text(encoding='utf-8').split()
    assert cloze.official(path)


def test_genuine_questions_are_from_the_raw_books(corpora):
  text = (corpora / 'cbt' / 'cbt_test.txt').read_text(encoding='utf-8')
  for kind, path in cloze.find(corpora / 'cbt', 'test').items():
    (question,) = cloze.read(path, kind)
    query = question.query.replace(cloze.GAP, question.answer)
    assert '\n'.join((*question.context, query)) in text


LINES = cloze.written([QUESTION]).split('\n')[:21]


def changed(number, line):
  """The question with another line, from 1 on."""
  return '\n'.join([*LINES[: number - 1], *line, *LINES[number:]]) + '\n\n'


LAST = LINES[-1]
BAD = {
  'empty': ('', ' is empty: expected blocks of 21 numbered lines; ' + END),
  'raw book': (
    TITLE + 'One day .\n',
    ', line 1: expected line 1 of a question, "1 ...", found "_BOOK_TITLE_ : Some_Body___A_Book.'
    'txt.out": a raw book is no file of questions; give cbtest_*.txt, or make questions of the '
    'book with --cloze_made=N',
  ),
  'wrong number': (
    changed(3, ['4 The dog .']),
    ', line 3: expected line 3 of a question, "3 ...", found "4 The dog .": the numbering is '
    'wrong; ' + END,
  ),
  'two questions in one': (
    '\n'.join(LINES) + '\n22 One more .\n',
    ', line 22: expected line 1 of a question, "1 ...", found "22 One more .": the numbering is '
    'wrong; ' + END,
  ),
  'an empty line inside': (
    changed(5, ['']),
    ', line 5: an empty line after 4 lines of a question, expected 21: the block is truncated; '
    + END,
  ),
  'the end inside': (
    '\n'.join(LINES) + '\n\n' + '\n'.join(LINES[:9]),
    ', line 31: the end of the file after 9 lines of a question, expected 21: the block is '
    'truncated; ' + END,
  ),
  'nine candidates': (
    changed(21, [LAST.replace('|cats', '')]),
    ', line 21: expected 10 candidates separated by |, found 9; ' + END,
  ),
  'an empty candidate': (
    changed(21, [LAST.replace('|cats|', '||')]),
    ', line 21: expected 10 candidates separated by |, found 10, of which number 4 is blank; '
    + END,
  ),
  'eleven candidates': (
    changed(21, [LAST + '|zoo']),
    ', line 21: expected 10 candidates separated by |, found 11; ' + END,
  ),
  'no gap': (
    changed(21, [LAST.replace('XXXXX', 'dog')]),
    ', line 21: expected XXXXX once in the query, found it 0 times; ' + END,
  ),
  'two gaps': (
    changed(21, [LAST.replace('it said', 'XXXXX said')]),
    ', line 21: expected XXXXX once in the query, found it 2 times; ' + END,
  ),
  'another answer': (
    changed(21, [LAST.replace('\tdog\t', '\twolf\t')]),
    f', line 21: the answer "wolf" is not among the candidates {", ".join(CANDIDATES)}; ' + END,
  ),
  'no candidates': (
    changed(21, [LAST.split('\t')[0]]),
    ', line 21: expected the query, a tab, the answer, two tabs and the candidates, found 1 '
    'fields; ' + END,
  ),
  'not UTF-8': (
    '\n'.join(LINES).replace('number 6', 'number é').encode('latin-1'),
    ', line 7: not valid UTF-8 at byte 18 of the line (0xe9): convert it, or ' + END,
  ),
}


@each('name', BAD)
def test_a_damaged_file_is_refused_by_its_line(tmp_path, name):
  text, message = BAD[name]
  path = write(tmp_path, text)
  with bad_input(f'{path}{message}'):
    read(path)


def test_files_are_found_anywhere_in_a_folder(tmp_path):
  text = cloze.written([QUESTION])
  paths = {
    kind: write(tmp_path, text, f'CBTest/data/cbtest_{kind}_valid_2000ex.txt')
    for kind in ('V', 'NE')
  }
  found = cloze.find(tmp_path, 'validation')
  assert found == paths and list(found) == ['NE', 'V']
  assert cloze.find(paths['V'], 'test') == {'V': paths['V']}  # of which split, its name tells
  own = write(tmp_path, text, 'mine.txt')
  assert cloze.find(own, 'test') == {'mine': own} and not cloze.official(own)
  wanted = 'cbtest_{NE,CN,V,P}_test_2500ex.txt'
  with bad_input(
    f'--cloze={tmp_path} has no questions of --split=test: expected {wanted}, anywhere below; of '
    'raw books, questions like those are made by --cloze_made=N'
  ):
    cloze.find(tmp_path, 'test')
  with bad_input(f'--cloze={tmp_path}/none: no such file or folder; expected {wanted}'):
    cloze.find(tmp_path / 'none', 'test')
  copy = write(tmp_path, text, 'CBTest/a/cbtest_V_valid_2000ex.txt')
  with bad_input(
    f'--cloze={tmp_path} has {copy.name} 2 times, {copy} and {paths["V"]}: give the folder of one '
    'of them'
  ):
    cloze.find(tmp_path, 'validation')


NAMES = ('Anna', 'Bertha', 'Carl', 'Dora', 'Emil', 'Frieda', 'Gustav', 'Hanna', 'Ida', 'Jakob')
NAMES += ('Karla', 'Ludwig')
NOUNS = ('apple', 'boat', 'cart', 'door', 'egg', 'fire', 'goat', 'hat', 'ink', 'jug', 'key', 'lamp')
PLACES = (
  'in',
  'on',
  'at',
  'by',
  'under',
  'over',
  'near',
  'behind',
  'beside',
  'above',
  'from',
  'to',
)


def books(folder, lengths=(40, 20, 30)):
  """Books in which sentence i of each is of name, noun and preposition i."""
  text = ''
  for book, length in enumerate(lengths):
    text += TITLE.replace('A_Book', f'Book_{book}')
    for i in range(length):
      name, noun, place = (words[(i * 5 + book) % 12] for words in (NAMES, NOUNS, PLACES))
      text += f'` Well , {name} is {place} the {noun} , ` Says THE XII .\n'
  return write(folder, text, 'cbt_test.txt')


def test_questions_made_of_books(tmp_path):
  path = books(tmp_path)
  made = cloze_made.made_of(path, 10)
  assert {kind: len(some) for kind, some in made.items()} == dict.fromkeys(cloze_made.KINDS, 10)
  assert made == cloze_made.made_of(path, 10) != cloze_made.made_of(path, 10, seed=1)
  lines = path.read_text().split('\n')
  words = dict(zip(cloze_made.KINDS, (NAMES, NOUNS, PLACES), strict=True))
  for kind, questions in made.items():
    assert [q.line for q in questions] == sorted(q.line for q in questions)
    for q in questions:
      assert q.kind == f'made-{kind}' and q.file == 'cbt_test.txt'
      query = q.query.replace(cloze.GAP, q.answer)
      assert [*q.context, query] == lines[q.line - 21 : q.line]  # of one book
      assert not any('_BOOK_TITLE_' in sentence for sentence in q.context)
      assert list(q.candidates) == sorted(set(q.candidates)) and len(q.candidates) == 10
      assert q.answer in q.candidates and set(q.candidates) <= set(words[kind])
  everything = [q for questions in made.values() for q in questions]
  again = write(tmp_path, cloze.written(everything))
  assert [q.candidates for q in read(again)] == [q.candidates for q in everything]


def test_classes_go_by_spelling():
  sentences = ['` Well , Tom saw IT .', 'Now the Rose is in A well .', 'A rose , and Tom-Tom']
  book = cloze_made._Book([sentence.split() for sentence in sentences], 2)
  belongs = cloze_made._classes(book)
  words = {*' '.join(sentences).split(), 'After'}
  found = {kind: {word for word in words if belongs[kind](word)} for kind in cloze_made.KINDS}
  assert found == {
    'names': {'Tom', 'Tom-Tom'},  # Rose is a flower too, and Well begins a sentence
    'content-words': {'saw', 'rose'},
    'prepositions': {'in', 'After'},
  }


def test_as_many_as_there_are(tmp_path):
  path = books(tmp_path)
  made = cloze_made.made_of(path, 1000)
  assert {kind: len(some) for kind, some in made.items()} == dict.fromkeys(cloze_made.KINDS, 30)
  assert cloze_made.find(tmp_path, 'test') == cloze_made.find(path, 'test') == path


def test_books_that_give_no_question(tmp_path):
  path = books(tmp_path, lengths=(20, 3))
  with bad_input(
    f'{path}: no question can be made of it: expected books with 21 sentences or more, one a '
    'line, their words and signs separated by spaces'
  ):
    cloze_made.made_of(path, 5)
  with bad_input(
    f'{write(tmp_path, cloze.written([QUESTION]))}, line 1: expected a title, as in "_BOOK_TITLE_ '
    f': Author___Title.txt.out", found "{LINES[0]}": --cloze_made=N makes questions of '
    'raw books'
  ):
    cloze_made.made_of(tmp_path / NAME, 5)
  latin = write(tmp_path, TITLE.encode() + b'caf\xe9 .\n', 'latin.txt')
  with bad_input(f'{latin}, line 2: not valid UTF-8 at byte 4 of the line (0xe9): convert it'):
    cloze_made.made_of(latin, 5)
  with bad_input(f'--cloze={tmp_path}: expected the raw books, a file or cbt_train.txt in it'):
    cloze_made.find(tmp_path, 'train')


def test_questions_made_of_real_books(corpora):
  made = cloze_made.made_of(corpora / 'cbt' / 'cbt_valid.txt', 20)
  assert [len(some) for some in made.values()] == [20, 20, 20]
  for q in (q for questions in made.values() for q in questions):
    there = set(' '.join((*q.context, q.query)).lower().split())
    assert {candidate.lower() for candidate in q.candidates} <= there
