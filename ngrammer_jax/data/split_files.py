"""The splits of a corpus, and the files of a folder that belong to each."""

import pathlib
import re

SPLITS = ('train', 'validation', 'test')
FILE_WORDS = {'train': 'train', 'valid': 'validation', 'test': 'test'}  # in names of files


def split_of(name: str) -> str | None:
  """Returns the split in the name of a file, such as `wiki.valid.tokens` or `training_1.txt`.

  Words of the name that begin with `valid`, `test` or `train` count, in this order.
  """
  words = re.findall(rf'(?<![A-Za-z])({"|".join(FILE_WORDS)})', name)
  return next((FILE_WORDS[word] for word in ('valid', 'test', 'train') if word in words), None)


def visible_files(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files of a folder and its subfolders, sorted, without hidden ones."""
  is_hidden = lambda path: any(part.startswith('.') for part in path.relative_to(folder).parts)
  return sorted(path for path in folder.rglob('*') if path.is_file() and not is_hidden(path))
