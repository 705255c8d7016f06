"""The splits of a corpus, and their files in a folder."""

from collections.abc import Iterable, Mapping, Sequence
import logging
import pathlib
import re

from ngrammer_jax import errors
from ngrammer_jax.data.files import buckets

SPLITS = ('train', 'validation', 'test')
# In the name of a file, or else of its folder; the first row that matches counts.
SPLIT_WORDS = {
  r'valid(ation)?|val|dev(el|elopment)?': 'validation',
  r'eval(uation)?|(hold|held)[-_ ]?out': 'second',  # test beside validation, else validation
  r'test(ing)?': 'test',
  r'train(ing)?': 'train',
}
WORD = r'(?<![A-Za-z])({word})([-_ ]?(set|split|data))?(?![A-Za-z])'
# Of joined words, as in `mytrain.txt`; less certain: `contest` ends so too.
ENDS_WORD = r'({word})(?![A-Za-z])'
LONG_WORDS = {r'valid(ation)?': 'validation', r'test(ing)?': 'test', r'train(ing)?': 'train'}
# What `datasets` writes beside its files.
METADATA = ('dataset_info.json', 'dataset_infos.json', 'dataset_dict.json', 'state.json')

# The files of each split, in the order of SPLITS, and those whose names are no split.
SplitFiles = tuple[dict[str, list[pathlib.Path]], list[pathlib.Path]]


def group_by_split(paths: Iterable[pathlib.Path], root: pathlib.Path) -> SplitFiles:
  """Returns the files of each split, by the words of their names, such as `wiki.valid.tokens`.

  If no word of a name is a split, its folders within `root` decide, the nearest first. A split
  without files takes files with a word ending in its name, as in `mytrain.txt`.
  """
  paths = list(paths)
  splits = [_split_of_path(path, root) for path in paths]
  meaning = {'second': 'validation'}
  if 'validation' in splits and 'test' not in splits:
    meaning['second'] = 'test'
  splits = [meaning.get(split, split) for split in splits]
  splits = _add_uncertain(paths, splits)
  by_split: dict[str, list[pathlib.Path]] = {}
  for split in SPLITS:
    if split in splits:
      by_split[split] = _select(paths, splits, split)
  return by_split, _select(paths, splits, None)


def _split_of_path(path: pathlib.Path, root: pathlib.Path) -> str | None:
  """Returns the split named by a file, or else by its nearest folder."""
  for name in reversed(path.relative_to(root).parts):
    split = _find_split(name, SPLIT_WORDS, WORD)
    if split is not None:
      return split
  return None


def _add_uncertain(paths: Sequence[pathlib.Path], splits: list[str | None]) -> list[str | None]:
  """Adds files with names ending in the word of a split, for splits without files."""
  endings = [_find_split(path.name, LONG_WORDS, ENDS_WORD) for path in paths]
  has_certain = set(splits) != {None}
  has_train_and_another = 'train' in endings and len(set(endings) - {None}) > 1
  if not has_certain and not has_train_and_another:
    return splits
  missing = set(SPLITS) - set(splits)
  completed = []
  for split, ending in zip(splits, endings, strict=True):
    if split is None and ending in missing:
      split = ending
    completed.append(split)
  return completed


def _select(
  paths: Sequence[pathlib.Path], splits: Sequence[str | None], split: str | None
) -> list[pathlib.Path]:
  """Returns the files of a split."""
  return [path for path, other in zip(paths, splits, strict=True) if other == split]


def _find_split(name: str, words: Mapping[str, str], pattern: str) -> str | None:
  """Returns the split of the first row with a word of the name."""
  name = re.sub('(?<=[a-z])(?=[A-Z])', '-', name)  # trainA.txt, wikiTrain.txt
  for word, split in words.items():
    if re.search(pattern.format(word=word), name, re.IGNORECASE):
      return split
  return None


def find(
  root: pathlib.Path,
  paths: list[pathlib.Path],
  share: float | None = None,
  prefers_root: bool = False,
) -> SplitFiles:
  """Returns the files of a corpus by split; empty for a single file, or without split names.

  Args:
    root: the folder, or the only file.
    paths: its files.
    share: held-out share of the training split without a file for validation.
    prefers_root: whether to ignore subfolders if the files beside them suffice.

  Raises:
    BadInput: some names mention splits, but train or validation is missing.
  """
  if [str(path) for path in paths] == [str(root)]:
    return {}, paths
  needed = ['train']
  if not share:
    needed.append('validation')
  if prefers_root:
    beside = [path for path in paths if str(path.parent) == str(root)]
    within = [path for path in paths if str(path.parent) != str(root)]
    by_split, others = group_by_split(beside, root)
    if set(needed) <= set(by_split):
      return by_split, others + within
  by_split, others = group_by_split(paths, root)
  missing = [split for split in needed if split not in by_split]
  if by_split and missing:
    present = ', '.join(f'{split}: {paths[0].name}' for split, paths in by_split.items())
    remedy = ''
    if missing == ['validation']:
      remedy = ', or set data.validation_share=0.05'
    raise errors.BadInput(
      f'data.path={root} has no file for {" and ".join(missing)} ({present}): put one there with '
      f'train, valid or test in its name{remedy}'
    )
  return by_split, others


def visible_files(root: pathlib.Path | str) -> list[pathlib.Path]:
  """Returns a file, or the files of a folder and its subfolders, sorted.

  Hidden files and METADATA are ignored. Files in object storage are `buckets.BucketFile`s, with the
  same methods.
  """
  if buckets.is_bucket(root):
    logging.info('listing the files of %s', root)
    paths = buckets.find(str(root))
  elif root.is_file():
    paths = [root]
  else:
    paths = [path for path in root.rglob('*') if path.is_file()]
  return sorted(p for p in paths if p.name not in METADATA and not _is_hidden(p, root))


def _is_hidden(path: pathlib.Path, root: pathlib.Path | str) -> bool:
  return any(part.startswith('.') for part in path.relative_to(root).parts)
