"""The splits of a corpus, and the files of a folder that belong to each."""

import pathlib
import re

SPLITS = ('train', 'validation', 'test')
FILE_WORDS = {'valid': 'validation', 'test': 'test', 'train': 'train'}  # the first match counts


def split_of(name: str) -> str | None:
  """Returns the split in the name of a file, such as `wiki.valid.tokens` or `training_1.txt`.

  A word of the name has to begin with `valid`, `test` or `train`.
  """
  matches = (
    split for word, split in FILE_WORDS.items() if re.search(rf'(?<![A-Za-z]){word}', name)
  )
  return next(matches, None)


def visible_files(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files of a folder and its subfolders, sorted, without hidden ones."""
  is_hidden = lambda path: any(part.startswith('.') for part in path.relative_to(folder).parts)
  return sorted(path for path in folder.rglob('*') if path.is_file() and not is_hidden(path))
