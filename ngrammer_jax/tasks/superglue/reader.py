"""Reader of the original SuperGLUE files, without TensorFlow; examples have the TFDS schema."""

from collections.abc import Iterator
import dataclasses
import functools
import hashlib
import json
import logging
import pathlib
from typing import Any
import zipfile

from ngrammer_jax import errors
from ngrammer_jax.data.files import text_files
from ngrammer_jax.data.files.split_files import SPLITS
from ngrammer_jax.system import file_errors, git_lfs, storage
from ngrammer_jax.tasks.superglue import wsc

URL = 'https://dl.fbaipublicfiles.com/glue/superglue/data/v2/'
COMBINED_ZIP = 'combined.zip'
REMEDY = 'download the file again'


@dataclasses.dataclass(frozen=True)
class TaskFiles:
  """Files and schema of a config of the TFDS dataset super_glue:1.0.2.

  Attributes:
    folder: folder name, and name of the zip without its suffix.
    fields: fields of an example, except idx and label.
    labels: class names.
    splits: available splits.
  """

  folder: str
  fields: tuple[str, ...]
  labels: tuple[str, ...]
  splits: tuple[str, ...] = SPLITS

  @property
  def zip(self) -> str:
    """Name of the zip."""
    return f'{self.folder}.zip'

  def file(self, split: str) -> str:
    """Returns the path of the file of a split, in a folder or in a zip."""
    if self.splits != SPLITS:  # a diagnostic set has one file
      return f'{self.folder}/{self.folder}.jsonl'
    name = {'train': 'train', 'validation': 'val', 'test': 'test'}[split]
    return f'{self.folder}/{name}.jsonl'


BOOLEAN = ('False', 'True')
ENTAILMENT = ('entailment', 'not_entailment')
_WSC = TaskFiles('WSC', ('text', 'span1_text', 'span2_text', 'span1_index', 'span2_index'), BOOLEAN)
CONFIGS = {
  'boolq': TaskFiles('BoolQ', ('question', 'passage'), BOOLEAN),
  'cb': TaskFiles('CB', ('premise', 'hypothesis'), ('entailment', 'contradiction', 'neutral')),
  'copa': TaskFiles('COPA', ('premise', 'choice1', 'choice2', 'question'), ('choice1', 'choice2')),
  'multirc': TaskFiles('MultiRC', ('paragraph', 'question', 'answer'), BOOLEAN),
  'record': TaskFiles('ReCoRD', ('passage', 'query', 'entities', 'answers'), ()),
  'rte': TaskFiles('RTE', ('premise', 'hypothesis'), ENTAILMENT),
  'wic': TaskFiles(
    'WiC', ('word', 'sentence1', 'sentence2', 'start1', 'start2', 'end1', 'end2'), BOOLEAN
  ),
  'wsc': _WSC,
  'wsc.fixed': _WSC,
  'axb': TaskFiles('AX-b', ('sentence1', 'sentence2'), ENTAILMENT, splits=('test',)),
  'axg': TaskFiles('AX-g', ('premise', 'hypothesis'), ENTAILMENT, splits=('test',)),
}
# Size in bytes and SHA-256 of the official zips, by folder.
OFFICIAL_ZIPS = {
  'BoolQ': (4_118_001, '853fbe7922f70c59629f06a39e8d9ca440c3d740e760fd3b87a5ddf3dcba2436'),
  'CB': (75_482, '8d641383298d54554066ba1c93f56ae7410af75df621b90c63028806bbbbb535'),
  'COPA': (43_986, '405906cddac74bc1e1ce8220f1107d1025b66a25ef10149d91b10bb30651125f'),
  'MultiRC': (1_116_225, 'b3cd440856e72eb166b2edcd37b798455f1ebd51f2c3de64c0c2a4e1971d2737'),
  'ReCoRD': (51_757_880, '30c7b651ab21b8bf8fab986495cd1084333010e040548f861b839eec0044ac18'),
  'RTE': (750_920, '6310aab3f000424c9d0318a1ff20692e07c7f4aa15e8f17a5972ea0a35c398b9'),
  'WiC': (396_213, 'ee7e67f4ae9eafbf533780faa198e62167f3cda54256cdf261877be3c0e90900'),
  'WSC': (32_751, '2ed6dfa94556b4a128ff0441efe365b2e883124e7e6aa00fb8d3a6cb1fd520a9'),
  'AX-b': (33_950, '43b45c55a273575c58a33cd68f10a971f83daa3aa223bfbc4077b92fbdf960b3'),
  'AX-g': (10_413, '2d4e00d3a7d23d2c3787ee4c1382cc81a72cb05a76fc9d78d142949247ed61b9'),
}


def check_split(config: str, split: str) -> None:
  """Raises BadInput if a config does not have the split."""
  splits = CONFIGS[config].splits
  if split not in splits:
    raise errors.BadInput(
      f'SuperGLUE config {config} has no split {split!r}: it has {", ".join(splits)}'
    )


def read(folder: str | pathlib.Path, config: str, split: str) -> list[dict[str, Any]]:
  """Reads the examples of a split, in file order and in the TFDS schema.

  A label is the index of a class, or -1 without a label.

  Args:
    folder: folder that contains the task folder with .jsonl files, the task zip, or the combined
      zip of all tasks; or the path of a zip.
    config: a key of CONFIGS.
    split: one of SPLITS. The diagnostic sets axb and axg have only 'test'.

  Raises:
    BadInput: the split does not exist, or its file is missing, damaged, malformed or empty, or has
      an index twice.
  """
  check_split(config, split)
  path, file = _find_file(storage.user_path('data.superglue_dir', folder), config, split)
  examples = []
  line_by_idx: dict[str, int] = {}
  with file_errors.translate_damage(path, 'download it again'), file.open('rb') as lines:
    for number, line in enumerate(lines, 1):
      if not line.strip():
        continue
      location = f'{file}, line {number}'
      row = text_files.parse_json(line, location, REMEDY, REMEDY)
      with file_errors.translate_damage(location, REMEDY):
        line_examples = list(_to_examples(config, split, row))
      for example in line_examples:  # metrics and answers are by index
        idx = json.dumps(example['idx'])
        if idx in line_by_idx:
          raise errors.BadInput(
            f'{location}: idx {idx} is also in line {line_by_idx[idx]}, expected a different idx '
            f'in every example; {REMEDY}'
          )
        line_by_idx[idx] = number
      examples += line_examples
  if not examples:
    raise errors.BadInput(f'{file} has no examples: {REMEDY}')
  return examples


def _find_file(
  folder: pathlib.Path, config: str, split: str
) -> tuple[pathlib.Path, pathlib.Path | zipfile.Path]:
  """Returns the file or the zip of a split, and the file of the split itself."""
  files = CONFIGS[config]
  file = files.file(split)
  git_lfs.check_file(folder / file)
  if (folder / file).is_file():
    return folder / file, folder / file
  combined = folder if folder.suffix == '.zip' else folder / COMBINED_ZIP
  for path in (folder / files.zip, combined):
    if not path.is_file():
      continue
    git_lfs.check_file(path)
    if path.name == files.zip:
      _warn_if_not_official(config, path)
    with file_errors.translate_damage(path, 'download it again'):
      archive = zipfile.ZipFile(path)
      member = _find_member(archive.namelist(), file)
    if member is not None:
      return path, zipfile.Path(archive, member)
  size, digest = OFFICIAL_ZIPS[files.folder]
  raise errors.BadInput(
    f'{folder} has no {split} split of SuperGLUE {config}: expected the file {file}, which can '
    f'also be inside {files.zip} ({size:,} bytes, sha256 {digest}) or {COMBINED_ZIP}; '
    f'download {URL}{files.zip}'
  )


def _find_member(names: list[str], file: str) -> str | None:
  """Returns the zip member for a file, in the outermost folder; None: not found."""
  members = []
  for name in names:
    if f'/{name}'.endswith(f'/{file}') and not name.startswith('__MACOSX/'):
      members.append(name)
  return min(members, key=lambda name: (name.count('/'), name), default=None)


@functools.cache  # one warning per file
def _warn_if_not_official(config: str, path: pathlib.Path) -> None:
  """Logs a warning if a zip differs from the official one."""
  official_size, official_digest = OFFICIAL_ZIPS[CONFIGS[config].folder]
  size = path.stat().st_size
  with file_errors.translate_damage(path, 'download it again'), path.open('rb') as file:
    digest = hashlib.file_digest(file, 'sha256').hexdigest()
  if (size, digest) != (official_size, official_digest):
    logging.warning(
      f'{path} has {size:,} bytes, sha256 {digest}, but the official file has {official_size:,} '
      f'bytes, sha256 {official_digest}: it is read, but its examples may differ; to compare with '
      f'published results, download {URL}{CONFIGS[config].zip}'
    )


def _to_examples(config: str, split: str, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
  """Yields the examples of one line."""
  if config == 'multirc':
    yield from _multirc_examples(split, row)
  elif config == 'record':
    yield from _record_examples(split, row)
  else:
    fields = row
    if config.startswith('wsc'):
      fields = row | row['target']
    example = {name: fields[name] for name in CONFIGS[config].fields}
    # The idx of AX-b is "0", "1", ...
    example |= {'idx': int(row['idx']), 'label': _label(config, split, row)}
    if config == 'wsc.fixed':
      example = wsc.repair_spans(example)
    yield example


def _multirc_examples(split: str, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
  """Yields one example per answer option."""
  passage = row['passage']
  for question in passage['questions']:
    for answer in question['answers']:
      yield {
        'paragraph': passage['text'],
        'question': question['question'],
        'answer': answer['text'],
        'idx': {'paragraph': row['idx'], 'question': question['idx'], 'answer': answer['idx']},
        'label': _label('multirc', split, answer),
      }


def _record_examples(split: str, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
  """Yields one example per query."""
  text = row['passage']['text']
  entities = row['passage']['entities']
  entity_texts = {text[entity['start'] : entity['end'] + 1] for entity in entities}
  for query in row['qas']:
    if split == 'test':
      answers = query.get('answers', [])
    else:
      answers = query['answers']
    yield {
      'passage': text,
      'query': query['query'],
      'entities': sorted(entity_texts),
      'answers': sorted({answer['text'] for answer in answers}),
      'idx': {'passage': row['idx'], 'query': query['idx']},
    }


def _label(config: str, split: str, fields: dict[str, Any]) -> int:
  """Returns the class in the field `label`, -1 if a test split does not have it."""
  labels = CONFIGS[config].labels
  label = fields.get('label')
  if label is None and split == 'test':
    return -1
  values = labels
  if labels is BOOLEAN or config == 'copa':
    values = (0, 1)  # equal to false and true
  if label not in values:
    raise ValueError(f'label is {json.dumps(label)}, expected one of {json.dumps(values)}')
  return values.index(label)
