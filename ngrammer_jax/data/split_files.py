"""The splits of a corpus, and the files of a folder that belong to each."""

from collections.abc import Iterable
import pathlib
import re

SPLITS = ('train', 'validation', 'test')
# In the name of a file; the first match counts.
SPLIT_WORDS = {'valid(ation)?': 'validation', 'test(ing)?': 'test', 'train(ing)?': 'train'}
STARTS_WORD = '(?<![A-Za-z])({word})'
ENDS_WORD = '({word})(?![A-Za-z])'


def group_by_split(paths: Iterable[pathlib.Path]) -> dict[str, list[pathlib.Path]]:
  """Returns the files of each split, by their names, such as `wiki.valid.tokens`.

  A word of the name has to start with `valid`, `test` or `train`. A split without such a file has
  those with a word that ends so, as in `mytrain.txt`. It is less certain: `contest` does too.
  """
  files = {split: [] for split in (*SPLITS, None)}
  for path in paths:
    files[_find_split(path.name, STARTS_WORD)].append(path)
  others = files.pop(None)
  for split in SPLITS:
    if not files[split]:
      files[split] = [path for path in others if _find_split(path.name, ENDS_WORD) == split]
  return files


def _find_split(name: str, pattern: str) -> str | None:
  matches = (
    split for word, split in SPLIT_WORDS.items() if re.search(pattern.format(word=word), name)
  )
  return next(matches, None)


def visible_files(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files of a folder and its subfolders, sorted, without hidden ones."""
  is_hidden = lambda path: any(part.startswith('.') for part in path.relative_to(folder).parts)
  return sorted(path for path in folder.rglob('*') if path.is_file() and not is_hidden(path))
