"""A trained run as an object, for the commands, notebooks and other programs."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import logging
import pathlib
from typing import Any, ClassVar

from flax import linen as nn
import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, open_weights, sharding
from ngrammer_jax.checkpoints import checksums, manifest, reader, workdirs
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import corpora, mixture, token_cache, vocabularies
from ngrammer_jax.inference import cloze, conversation, language_modeling, pairs, sampling, text
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.layers.ngram.memory import NGramMemory
from ngrammer_jax.models import language_model, memories, model_variables
from ngrammer_jax.runs import exported, huggingface_export
from ngrammer_jax.system import file_errors, hosts, progress, result_files, storage
from ngrammer_jax.training import programs
from ngrammer_jax.training import state as train_state


@dataclasses.dataclass(frozen=True)
class Run:
  """A run directory. Everything is loaded on first use.

  Attributes:
    workdir: the run directory.
    config: the config of the training.
    step: checkpoint: a step number, `newest`, or `best` on the validation split.
  """

  workdir: pathlib.Path
  config: experiment.Config = dataclasses.field(repr=False)  # long
  step: int | str = 'newest'
  # The files of a published model; None: it was trained here.
  published: ClassVar[open_weights.Model | None] = None

  @functools.cached_property
  def vocabulary(self) -> vocabularies.Vocabulary:
    """The vocabulary, which encodes and decodes text."""
    return vocabularies.load(self.workdir)

  @property
  def vocabulary_size(self) -> int:
    """V, number of token ids of the model."""
    return self.vocabulary.size

  @property
  def content_hash(self) -> str | None:
    """The hash of the text of the training; None: it is not known."""
    return workdirs.read_content_hash(self.workdir)

  @property
  def origin(self) -> dict[str, Any]:
    """`open_weights.Model.origin` of the model that training started from, or empty."""
    return workdirs.read_origin(self.workdir)

  @property
  def results_folder(self) -> pathlib.Path | None:
    """Where results are written unless the user names a folder; None: nowhere."""
    return self.workdir

  @functools.cached_property
  def mesh(self) -> jax.sharding.Mesh:
    """The mesh of the config, or one with all devices along `data` if their number does not fit."""
    m = self.config.mesh
    try:
      return sharding.make_mesh(m.data, m.fsdp, m.model)
    except errors.BadInput as error:
      logging.info('%s; using all of them along mesh.data', error)
      return sharding.make_mesh()

  @functools.cached_property
  def model(self) -> language_model.LanguageModel:
    """The model, without its variables."""
    return language_model.build(self.config.model, self.vocabulary_size)

  @functools.cached_property
  def evaluated(self) -> language_model.LanguageModel:
    """The model with the memory and the positions of evaluation, which also generates text."""
    config = self.config.evaluation_model()
    return language_model.build(config, self.vocabulary_size, jit_layers=True)

  def find_checkpoint(self) -> int | None:
    """Returns the step of the checkpoint, of `newest` the last; None if the run was exported.

    All processes use the list of the first: a running training may change it meanwhile.

    Raises:
      BadInput: there is no such checkpoint.
    """
    if workdirs.is_exported(self.workdir):
      return None
    steps, best = hosts.broadcast([reader.steps(self.workdir), reader.best_step(self.workdir)])
    if not steps:
      raise errors.BadInput(f'--workdir={self.workdir} has no checkpoint yet')
    number = {'newest': steps[-1], 'best': best}.get(self.step, self.step)
    if number not in steps:
      raise errors.BadInput(
        f'--step={self.step}: --workdir={self.workdir} has no such checkpoint; available: '
        f'{", ".join(map(str, steps))}'
      )
    return number

  @functools.cached_property
  def state(self) -> train_state.TrainState:
    """The train state of the checkpoint. Raises BadInput if there is none."""
    step = self.find_checkpoint()
    base = reader.frozen_dtypes(self.workdir)
    abstract = programs.Programs(self.config, self.vocabulary_size, self.mesh, base).abstract
    if step is None:
      return exported.restore(self.workdir, self.step, abstract)
    # The batch size of training need not be divisible by the devices of an evaluation.
    memory = sharding.abstract(abstract.memory, sharding.replicated(self.mesh))
    abstract = abstract.replace(memory=memory)
    if self.step == 'newest':
      return reader.restore_newest(self.workdir, abstract)[1]
    try:
      return reader.restore(self.workdir, step, abstract)
    except manifest.CorruptError as error:
      raise errors.BadInput(
        f'--step={self.step}: checkpoint {step} is damaged: {error}; use another step'
      ) from error

  @functools.cached_property
  def abstract_parameters(self) -> Any:
    """Shapes of the parameters, with their logical axis names."""
    return model_variables.abstract(self.model)['params']

  @functools.cached_property
  def parameter_dtypes(self) -> dict[str, np.dtype]:
    """Dtype of each parameter by name."""
    params = checksums.named_leaves(nn.unbox(self.abstract_parameters))
    dtypes = {name: leaf.dtype for name, leaf in params.items()}
    return dtypes | reader.frozen_dtypes(self.workdir)

  @functools.cached_property
  def engine(self) -> inference.Engine:
    """Scores, ranks and generates; compiles every program once."""
    return inference.Engine.shared(self.evaluated, self.mesh)

  @functools.cached_property
  def variables(self) -> inference.Variables:
    """The variables of the engine, with precomputed clusters of all tokens."""
    state = self.state  # first: it finds out whether there is a checkpoint before devices are used
    return self.engine.prepare(state.variables)

  @property
  def token_clusters(self) -> np.ndarray:
    """The cluster of every token and head, int32 [V, N], in the first of `token_memories`."""
    return self.token_clusters_of(next(iter(self.token_memories())))

  def token_clusters_of(self, memory: str) -> np.ndarray:
    """Returns the cluster of every token and head, int32 [V, N], in one of `token_memories`."""
    codebook = functools.reduce(dict.__getitem__, memory.split('/'), self.variables['codebook'])
    return np.asarray(codebook['quantizer']['token_ids'])

  def token_memories(self) -> dict[str, NGramMemory]:
    """Returns the memories whose clusters depend on the token alone, by the path of their module.

    Raises BadInput if the model has none.
    """
    memories_by_path = {
      '/'.join(path): memory
      for path, memory in memories.ngram_modules(self.config.model, self.vocabulary_size)
      if memory.clusters_depend_on_token and self.config.model.adaptive_softmax is None
    }
    if not memories_by_path:
      raise errors.NotApplicable(
        f'--workdir={self.workdir} has no clusters of tokens: it needs model.ngram, with '
        f'model.ngram.clusters and model.ngram.layer="input", or an n-gram memory with '
        f'key="embedding_clusters"'
      )
    return memories_by_path

  def export(
    self, folder: str | pathlib.Path, dtype: str | None = None, format: str = 'run'
  ) -> None:
    """Writes config, vocabulary and variables to a folder, which `load_run` reads.

    Args:
      folder: a new or empty folder.
      dtype: dtype of the parameters in the file, such as `bfloat16`. None: their own.
      format: `run`, or `huggingface` for a folder that other libraries read, too.

    Raises:
      BadInput: the folder is remote, is not empty or cannot be created; or no family of published
        models is such a model.
    """
    folder = storage.path(folder)
    exported.check_folder(folder)
    message = f'--output={folder}: the disk is full: delete what is there, and use another folder'
    with file_errors.translate_disk_full(lambda: message):
      if format == 'huggingface':
        huggingface_export.save(self, folder, dtype)
        return
      settings, origin = (self.config, self.vocabulary, self.content_hash), self.origin
      state = self.state
      result_files.make_output_folder(folder)  # once it is known that all can be read
      workdirs.write(folder, *settings)
      workdirs.write_origin(folder, origin)
      exported.save(state, folder, dtype)

  def split(self, name: str) -> token_cache.TokenSplit:
    """Returns a split of the corpus, or of a part of a mixture, such as 'validation/PART'.

    Raises BadInput if it is not the corpus of the training.
    """
    _check_split(name)
    if name not in (names := self._mixture.split_names()):
      data = self.config.data
      source = 'data.mixture' if data.mixture else f'data.corpus={data.corpus!r}'
      raise errors.NotApplicable(
        f'--split={name}: {source} has no such split to evaluate; available: {", ".join(names)}'
      )
    return self._mixture.split(name)

  @functools.cached_property
  def _mixture(self) -> mixture.Mixture:
    """The tokenised corpora."""
    data = self.config.data
    self.log_paths('path', 'cache_dir', 'vocabulary_path')
    with hosts.collective_errors():
      # Of a foreign run: the user has not said that anything may be deleted there.
      may_delete = data.cache_dir is None
      # Where a run was exported to, its vocabulary need not be learned again; `conversion.load`
      # names it where that of the training is gone.
      has_only_own = str(data.vocabulary_path).startswith(f'{self.workdir}/')
      is_given = workdirs.is_exported(self.workdir) or has_only_own
      vocabulary = self.vocabulary if is_given else None
      prepared = mixture.prepare(data, open_corpus, may_delete, vocabulary, self.workdir)
      workdirs.check_text(self.workdir, self.config, prepared.content_hash)
    return prepared

  def log_paths(self, *names: str) -> None:
    """Logs the paths of the data section that are read: the run may be of somebody else."""
    data = self.config.data
    paths = [f'data.{name}={getattr(data, name)}' for name in names if getattr(data, name)]
    for index, part in enumerate(data.mixture if 'path' in names else ()):
      paths.append(f'data.mixture.{index}.path={part.path}')
    if paths:
      logging.info('using %s, from the config of --workdir=%s', ', '.join(paths), self.workdir)

  def evaluate(self, split: str = 'test', max_tokens: int | None = None) -> dict[str, Any]:
    """Scores a split of the corpus, or its first tokens; see `language_modeling.evaluate`.

    The result of a mixture has those of its `parts` by name; see `language_modeling.combine`.
    """
    _check_split(split)
    self.find_checkpoint()  # before the corpus is tokenised
    options = dataclasses.replace(self.config.evaluation, max_tokens=max_tokens)
    if not self.config.data.mixture or '/' in split:
      return {'split': split, **self._evaluate(self.split(split), split, options)}
    self.split(split)  # reports a split that a part does not have
    parts = {part: self.evaluate(f'{split}/{part}', max_tokens) for part in self._mixture.parts}
    result = language_modeling.combine(parts, self._mixture.weights)
    return {'split': split, 'step': int(self.state.step), **result, 'parts': parts}

  def evaluate_file(
    self, path: str | pathlib.Path, max_tokens: int | None = None
  ) -> dict[str, Any]:
    """Scores a text file as one document, or its first tokens; see `evaluate`.

    A short text is divided into fewer streams, so that each has at least one segment; a text
    shorter than a segment is read in one of 128 tokens, or of the next power of two.

    Raises:
      BadInput: the file cannot be read, or the vocabulary lacks a character of it.
    """
    with hosts.collective_errors():
      options = corpora.read_options(self.config.data)
      tokens = token_cache.encode_file(storage.user_path('--text', path), self.vocabulary, options)
    count = min(max_tokens or len(tokens.tokens), len(tokens.tokens))
    streams = min(self.config.evaluation.streams, max(count // self.config.evaluation_length(), 1))
    if streams < self.config.evaluation.streams:
      logging.info('%s: %s tokens, divided into evaluation.streams=%s', path, f'{count:,}', streams)
    length = min(
      self.config.evaluation_length(), inference.bucket(count, inference.MIN_TEXT_LENGTH)
    )
    options = dataclasses.replace(
      self.config.evaluation, max_tokens=max_tokens, streams=streams, segment_length=length
    )
    return {'text': str(path), **self._evaluate(tokens, str(path), options)}

  def _evaluate(self, tokens, name, options):
    config = dataclasses.replace(self.config, evaluation=options)
    count = min(options.max_tokens or len(tokens.tokens), len(tokens.tokens))
    with progress.Progress(f'evaluating {name}', count, 'tokens') as bar:
      result = language_modeling.evaluate(
        self.engine, self.state.variables, tokens, config, self.vocabulary.line_end, bar.advance
      )
    return {'step': int(self.state.step), **result}

  def cloze(
    self, path: str | pathlib.Path, split: str = 'test', protocol: str = 'query'
  ) -> tuple[dict[str, Any], list[cloze.Answer]]:
    """Answers the questions of the Children's Book Test; see `inference.cloze`.

    Args:
      path: folder or file of the questions.
      split: split of a folder: train, validation or test.
      protocol: `query`, or `prefix`, which ignores the text after a candidate.

    Raises:
      BadInput: there are no such questions, a file is damaged, or the model cannot answer them.
    """
    _check_split(split)
    cloze.check_protocol(protocol)
    inference.check_model(self.config.model)
    with hosts.collective_errors():
      source, count = cloze.open_questions(storage.user_path('--cloze', path), split)
    rows, context = self.config.training.batch_size, self.config.evaluation_context()
    variables = self.variables
    evaluate = cloze.Evaluator(self.engine, self.vocabulary, rows, context, protocol)
    with progress.Progress('cloze', count, 'questions') as bar:
      answers = list(evaluate(variables, source.read(), bar.advance))
    return cloze.build_result(answers, source, int(self.state.step), protocol, context), answers

  def score(self, texts: str | Sequence[str]) -> list[text.Score]:
    """Scores texts, each as a separate document, in segments of the evaluation length.

    Raises:
      BadInput: the vocabulary does not have a character.
    """
    texts = [texts] if isinstance(texts, str) else list(texts)
    encoded = [text.encode(self.vocabulary, t, f'text {i + 1}') for i, t in enumerate(texts)]
    length = self.config.evaluation_length()
    variables = self.variables
    return text.score(self.engine, variables, self.vocabulary, encoded, length)

  def score_pairs(
    self, texts: Sequence[tuple[pairs.Encodable, pairs.Encodable]], rows: int = inference.MAX_ROWS
  ) -> list[pairs.PairScore]:
    """Scores continuations, each after its context at the start of a separate document.

    A token is predicted from the last tokens that fit the context of the evaluation.

    Args:
      texts: pairs of a context and its continuation, texts or token ids; see `pairs.encode`.
      rows: maximum batch size in contexts.

    Raises:
      BadInput: the vocabulary lacks a character or an id, or the model cannot continue a text.
    """
    inference.check_model(self.config.model)
    encoded = [pairs.encode(self.vocabulary, pair, f'pair {i + 1}') for i, pair in enumerate(texts)]
    limit, variables = self.config.evaluation_context(), self.variables
    return pairs.score(self.engine, variables, encoded, limit, rows)

  def generate(
    self,
    prompts: str | Sequence[str],
    tokens: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    context: int | None = None,
    on_text: Callable[[int, str], None] | None = None,
    repetition_penalty: float = 1.0,
    stop: str | Sequence[str] = (),
    chat: bool = False,
  ) -> list[text.Completion]:
    """Continues prompts, each as the start of a separate document.

    Args:
      prompts: the prompts; '' starts a new document.
      tokens: maximum number of new tokens; a document may end earlier.
      temperature: divides the logits; 0 is greedy decoding.
      top_k: samples from this number of most likely tokens. None: from all.
      top_p: samples from the most likely tokens with this total probability. None: from all.
      seed: prompt number i, from 0, uses seed + i; it does not depend on the other prompts.
      context: maximum number of tokens that a token is predicted from. None: the segment length of
        the evaluation and, if the model has one, its memory.
      on_text: called with the index of a prompt and its new text, for each token.
      repetition_penalty: lowers the logits of tokens that occurred, if above 1 (CTRL).
      stop: texts before which a continuation ends.
      chat: whether the prompts are messages that the model answers, by its chat template.

    Raises:
      BadInput: a prompt does not fit the context, or a value is out of range.
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    config = sampling.SamplingConfig(temperature, top_k, top_p, repetition_penalty)
    return list(self.completions(prompts, config, tokens, seed, context, on_text, stop, chat))

  def completions(
    self,
    prompts: Sequence[str],
    sampling_config: sampling.SamplingConfig,
    tokens: int,
    seed: int = 0,
    context: int | None = None,
    on_text: Callable[[int, str], None] | None = None,
    stop: str | Sequence[str] = (),
    chat: bool = False,
  ) -> Iterator[text.Completion]:
    """Yields the completions of `generate`, batch by batch, as soon as they are done."""
    config = self._completion_config(sampling_config, tokens, seed, context, stop, len(prompts))
    encode = conversation.encode_prompt if chat else text.encode_prompt
    encoded = [
      encode(self.vocabulary, prompt, f'prompt {i + 1}', config) for i, prompt in enumerate(prompts)
    ]
    variables = self.variables
    yield from text.complete(self.engine, variables, self.vocabulary, encoded, config, on_text)

  def converse(
    self,
    sampling_config: sampling.SamplingConfig,
    tokens: int = 100,
    seed: int = 0,
    context: int | None = None,
    stop: str | Sequence[str] = (),
  ) -> conversation.Conversation:
    """Starts a conversation; its arguments are those of `completions`.

    Raises:
      BadInput: the model has no chat template, or a value is out of range.
    """
    config = self._completion_config(sampling_config, tokens, seed, context, stop, 1)
    conversation.check(self.vocabulary)
    return conversation.Conversation(self.engine, self.variables, self.vocabulary, config)

  def _completion_config(self, sampling_config, tokens, seed, context, stop, num_prompts):
    context = self.config.evaluation_context() if context is None else context
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    model = self.config.evaluation_model()
    config = text.CompletionConfig(
      sampling_config, tokens, seed, context, stop, model.longest_document
    )
    config.check(model, num_prompts)
    return config


def open_corpus(config: data_config.DataConfig) -> corpora.Corpus:
  """Opens the corpus of a config, one of TFDS through seqio."""
  if not config.is_tfds_corpus:
    return corpora.open_corpus(config)
  from ngrammer_jax.tasks import c4  # imports TensorFlow

  return c4.open_corpus(config)


def _check_split(name: str) -> None:
  if name.partition('/')[0] not in corpora.SPLITS:
    raise errors.BadInput(f'--split={name} is not one of: {", ".join(corpora.SPLITS)}')
