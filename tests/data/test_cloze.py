"""Cloze questions: reading, error messages with file and line."""

import dataclasses

from ngrammer_jax.data import cloze
from tests.checks import bad_input
from tests.loops import each

SENTENCES = tuple(f"The dog number {i} saw a cat , and ran ! ''" for i in range(20))
CANDIDATES = ('Bird', 'bone', 'cat', 'cats', 'dog', 'fish', 'hare', 'mouse', 'n-a', 'p9.jpg')
NAME = 'cbtest_CN_test_2500ex.txt'
QUESTION = cloze.Question(
  'CN', SENTENCES, f"`` A {cloze.PLACEHOLDER} 's day , '' it said .", CANDIDATES, 'dog', NAME, 21
)
SECOND_QUESTION = dataclasses.replace(QUESTION, query='XXXXX was late .', answer='Bird', line=43)
TITLE = '_BOOK_TITLE_ : Some_Body___A_Book.txt.out\n'
REMEDY = 'use a file cbtest_*.txt as published'


def read(path):
  return list(cloze.read_questions(path, 'CN'))


def write(folder, text, name=NAME):
  path = folder / name
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  return path


def format_questions(questions: list[cloze.Question]) -> str:
  """Returns questions in the format of the published files."""
  blocks = []
  for q in questions:
    lines = (*q.context, f'{q.query}\t{q.answer}\t\t{"|".join(q.candidates)}')
    blocks.append(''.join(f'{i} {line}\n' for i, line in enumerate(lines, 1)))
  return ''.join(f'{block}\n' for block in blocks)


@each('convert', [lambda t: t, lambda t: t.replace('\n', '\r\n'), str.rstrip])
def test_formatted_questions_are_read_unchanged(tmp_path, convert):
  text = convert(format_questions([QUESTION, SECOND_QUESTION]))
  assert read(write(tmp_path, text)) == [QUESTION, SECOND_QUESTION]


def test_only_newlines_end_a_line(tmp_path):
  context = ('One\u2028two\x0cthree\x85four .', *SENTENCES[1:])
  question = dataclasses.replace(QUESTION, context=context)
  assert read(write(tmp_path, format_questions([question]))) == [question]


@each('split', cloze.SPLIT_SUFFIXES)
def test_official_questions(corpora, split):
  """One of each class and split; the questions hold all the text of their files."""
  files = cloze.find_files(corpora / 'cbt', split)
  assert list(files) == list(cloze.KINDS)
  for kind, path in files.items():
    questions = list(cloze.read_questions(path, kind))
    (question,) = questions
    assert question.kind == kind and question.line == 21 and len(question.context) == 20
    assert question.answer in question.candidates
    assert list(question.candidates) == sorted(question.candidates)
    assert format_questions(questions).split() == path.read_text(encoding='utf-8').split()
    assert cloze.FILE_NAME.fullmatch(path.name)


def test_official_questions_occur_in_the_raw_books(corpora):
  text = (corpora / 'cbt' / 'cbt_test.txt').read_text(encoding='utf-8')
  for kind, path in cloze.find_files(corpora / 'cbt', 'test').items():
    (question,) = cloze.read_questions(path, kind)
    query = question.query.replace(cloze.PLACEHOLDER, question.answer)
    assert '\n'.join((*question.context, query)) in text


LINES = format_questions([QUESTION]).split('\n')[:21]


def replace_line(number, lines):
  """Returns the question with one line, numbered from 1, replaced by other lines."""
  return '\n'.join([*LINES[: number - 1], *lines, *LINES[number:]]) + '\n\n'


LAST = LINES[-1]
QUERY_ERROR = (
  ', line 21: expected a query with one XXXXX, a tab, its answer, two tabs, and 10 candidates with '
  '| between them, one of which is the answer; '
)
DAMAGED_FILES = {
  'empty': ('', ' ends after 0 lines of a question, expected 21; '),
  'blank lines': ('\n \n\n', ' ends after 0 lines of a question, expected 21; '),
  'raw book': (
    TITLE + 'One day .\n',
    ', line 1: expected line 1 of a question, "1 ...", found "_BOOK_TITLE_ : Some_Body___A_Book.'
    'txt.out"; ',
  ),
  'wrong number': (
    replace_line(3, ['4 The dog .']),
    ', line 3: expected line 3 of a question, "3 ...", found "4 The dog ."; ',
  ),
  'two questions in one': (
    '\n'.join(LINES) + '\n22 One more .\n',
    ', line 22: expected line 1 of a question, "1 ...", found "22 One more ."; ',
  ),
  'an empty line inside': (
    replace_line(5, ['']),
    ', line 5: expected line 5 of a question, "5 ...", found ""; ',
  ),
  'the end inside': (
    '\n'.join(LINES) + '\n\n' + '\n'.join(LINES[:9]),
    ' ends after 9 lines of a question, expected 21; ',
  ),
  'nine candidates': (replace_line(21, [LAST.replace('|cats', '')]), QUERY_ERROR),
  'eleven candidates': (replace_line(21, [LAST + '|zoo']), QUERY_ERROR),
  'no placeholder': (replace_line(21, [LAST.replace('XXXXX', 'dog')]), QUERY_ERROR),
  'two placeholders': (replace_line(21, [LAST.replace('it said', 'XXXXX said')]), QUERY_ERROR),
  'another answer': (replace_line(21, [LAST.replace('\tdog\t', '\twolf\t')]), QUERY_ERROR),
  'no candidates': (replace_line(21, [LAST.split('\t')[0]]), QUERY_ERROR),
  'one tab less': (replace_line(21, [LAST.replace('\t\t', '\t')]), QUERY_ERROR),
  'not UTF-8': (
    '\n'.join(LINES).replace('number 6', 'number é').encode('latin-1'),
    ', line 7 is not valid UTF-8 at byte 17 (0xe9): convert it, or ',
  ),
}


@each('name', DAMAGED_FILES)
def test_a_damaged_file_is_reported_by_line(tmp_path, name):
  text, message = DAMAGED_FILES[name]
  path = write(tmp_path, text)
  with bad_input(f'{path}{message}{REMEDY}'):
    read(path)


def test_files_are_found_in_subfolders(tmp_path):
  text = format_questions([QUESTION])
  paths = {
    kind: write(tmp_path, text, f'CBTest/data/cbtest_{kind}_valid_2000ex.txt')
    for kind in ('V', 'NE')
  }
  files = cloze.find_files(tmp_path, 'validation')
  assert files == paths and list(files) == ['NE', 'V']
  assert cloze.find_files(paths['V'], 'test') == {'V': paths['V']}  # the split is ignored
  other = write(tmp_path, text, 'other.txt')
  assert cloze.find_files(other, 'test') == {'other': other}
  assert not cloze.FILE_NAME.fullmatch(other.name)
  for folder in (tmp_path, tmp_path / 'none'):
    with bad_input(
      f'--cloze={folder} is not a file of questions, and not a folder with '
      'cbtest_{NE,CN,V,P}_test_2500ex.txt for --split=test'
    ):
      cloze.find_files(folder, 'test')
  copy = write(tmp_path, text, 'CBTest/a/cbtest_V_valid_2000ex.txt')
  with bad_input(
    f'--cloze={tmp_path} contains {copy.name} several times, {copy} and {paths["V"]}: use the '
    'folder of one of them'
  ):
    cloze.find_files(tmp_path, 'validation')
