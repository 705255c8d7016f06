"""A trained run as an object: what verbs, notebooks and other programs work with."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import logging
import math
import numbers
import pathlib
from typing import Any

import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, files, hosts, progress, sharding
from ngrammer_jax.config import data as data_config
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data import corpora, token_cache
from ngrammer_jax.data import vocabulary as vocabularies
from ngrammer_jax.decoding import detokenizer, generation, sampling
from ngrammer_jax.evaluation import cloze, language_modeling, scoring
from ngrammer_jax.models import heads, language_model
from ngrammer_jax.training import checkpoints, manifest, programs, windows, workdirs
from ngrammer_jax.training import state as train_state

ROWS = 8  # texts at a time


@dataclasses.dataclass(frozen=True)
class Score:
  """How well a text is predicted, as a document of its own.

  Attributes:
    text: what was scored.
    tokens: its ids.
    nats: negative log-likelihood of each token, float64.
    lossless: whether the tokens give the text back.
  """

  text: str
  tokens: np.ndarray
  nats: np.ndarray
  lossless: bool

  @property
  def perplexity(self) -> float:
    """exp of the mean over tokens; nan of an empty text."""
    return math.exp(min(self.nats.mean(), 700)) if self.nats.size else math.nan

  @property
  def bits_per_byte(self) -> float:
    """Of the text in UTF-8; nan of an empty text, or of one that its tokens do not give back."""
    size = len(self.text.encode()) if self.lossless else 0
    return float(self.nats.sum()) / math.log(2) / size if size else math.nan


@dataclasses.dataclass(frozen=True)
class Completion:
  """A continued prompt.

  Attributes:
    prompt: what was given.
    text: what follows it.
    tokens: ids of what follows.
    ended: whether the model ended the document; if not, it ran out of tokens.
    seed: given this one, the prompt alone is continued alike.
  """

  prompt: str
  text: str
  tokens: list[int]
  ended: bool
  seed: int


@dataclasses.dataclass(frozen=True)
class Run:
  """A workdir. Nothing is read before it is asked for.

  Attributes:
    workdir: of the run.
    config: what it was trained with.
    step: of the checkpoint: a number, `newest`, or `best` on the validation split.
  """

  workdir: pathlib.Path
  config: experiment.Config
  step: int | str = 'newest'

  @functools.cached_property
  def vocabulary(self) -> vocabularies.Vocabulary:
    """Reads and writes the run's tokens."""
    return vocabularies.load(self.workdir)

  @functools.cached_property
  def mesh(self) -> jax.sharding.Mesh:
    """All devices: in the shape of the config where it fits them, else all along `data`."""
    m = self.config.mesh
    try:
      return sharding.make_mesh(m.data, m.fsdp, m.model)
    except errors.BadInput as error:
      logging.info('%s; using all of them along mesh.data', error)
      return sharding.make_mesh()

  @functools.cached_property
  def model(self) -> language_model.LanguageModel:
    """The model, without its variables."""
    return language_model.build(self.config.model, self.vocabulary.size)

  @functools.cached_property
  def evaluated(self) -> language_model.LanguageModel:
    """The model with the memory and the positions of evaluation, which it writes with too.

    Where spans are numbers of the heads, it computes no more than those of the checkpoint need.
    """
    m = self.config.model
    held = windows.first(m)
    if windows.fitted(m):
      held = windows.chosen(m, windows.spans(m, self.state.params), reserve=0)
    return language_model.build(self.config.evaluation_model(), self.vocabulary.size, held)

  @functools.cached_property
  def state(self) -> train_state.TrainState:
    """The checkpoint. Raises BadInput where there is none."""
    made = programs.Programs(self.config, self.vocabulary.size, self.mesh)
    # The rows of training need not be divisible by the devices of an evaluation.
    whole = lambda leaf: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding.replicated(self.mesh)
    )

    def abstract(known):
      state = made.abstract(known)
      return state.replace(memory=jax.tree.map(whole, state.memory))

    # One answer for all processes: another run may be adding and dropping some.
    there, best = hosts.broadcast(
      [checkpoints.steps(self.workdir), checkpoints.best_step(self.workdir)]
    )
    if not there:
      raise errors.BadInput(f'--workdir={self.workdir} has no checkpoint yet')
    if self.step == 'newest':
      return checkpoints.restore_newest(self.workdir, abstract)[1]
    step = best if self.step == 'best' else self.step
    if step not in there:
      raise errors.BadInput(
        f'--step={self.step}: --workdir={self.workdir} has no such checkpoint, '
        f'but {", ".join(map(str, there))}'
      )
    try:
      return checkpoints.restore(self.workdir, step, abstract)
    except manifest.CorruptError as error:
      raise errors.BadInput(
        f'--step={self.step}: checkpoint {step} is damaged: {error}; use another step'
      ) from error

  def split(self, name: str) -> token_cache.TokenSplit:
    """A split of the corpus. Raises BadInput where it is not the one of the training."""
    _check_split(name)
    with hosts.collective_errors():
      corpus = token_cache.prepare(self.config.data, finder(self.config.data))
      workdirs.check_text(self.workdir, self.config, corpus.content_hash)
    if name not in corpus.splits:
      raise errors.BadInput(
        f'--split={name}: data.corpus={self.config.data.corpus!r} has no such split to evaluate, '
        f'but {", ".join(corpus.splits)}'
      )
    return corpus.splits[name]

  @functools.cached_property
  def token_clusters(self) -> np.ndarray:
    """The cluster of every token and head, int32 [V, N].

    Raises BadInput where there are none, or none that depend on the token alone.
    """
    ngram = self.config.model.ngram
    if ngram is None or ngram.clusters is None or ngram.layer != 'input':
      raise errors.BadInput(
        f'--workdir={self.workdir} has no clusters of tokens: it needs model.ngram, with '
        f'model.ngram.clusters and model.ngram.layer="input"'
      )
    return np.asarray(self._serving[1]['ngrammer']['quantizer']['token_ids'])

  def evaluate(self, split: str = 'test', max_tokens: int | None = None) -> dict[str, Any]:
    """Scores a split of the corpus, or its first tokens; see `language_modeling.Evaluator`."""
    tokens = self.split(split)
    count = min(max_tokens or len(tokens.tokens), len(tokens.tokens))
    evaluate = language_modeling.Evaluator(
      self.evaluated,
      self.mesh,
      self.config.evaluation.streams,
      self.config.evaluation_length(),
      self.config.training.batch_size,
      self.config.evaluation.protocol,
      self.vocabulary.line_end,
    )
    with progress.Progress(f'evaluating {split}', count, 'tokens') as bar:
      given = self.state.params, self.state.codebook, tokens, max_tokens
      result = evaluate(*given, report=bar.advance)
    return {'split': split, 'step': int(self.state.step), **result}

  def cloze(
    self,
    path: str | pathlib.Path,
    split: str = 'test',
    protocol: str = 'query',
    made: int | None = None,
  ) -> tuple[dict[str, Any], list[cloze.Answer]]:
    """Answers the questions of the Children's Book Test; see `evaluation.cloze`.

    Args:
      path: its folder or one of its files; with `made`, the raw books.
      split: of a folder: train, validation or test.
      protocol: `query`, or `prefix`, which does not look at what follows a candidate.
      made: make so many questions of each class from raw books, which are not the official ones.

    Raises:
      BadInput: no questions there, a damaged file, or a model that cannot answer them.
    """
    _check_split(split)
    cloze.check_protocol(protocol)
    cloze.check_model(self.config.model)
    with hosts.collective_errors():
      source = cloze.open_questions(pathlib.Path(path).expanduser(), split, made)
    context = self.config.evaluation_context()
    evaluate = cloze.Evaluator(
      self.evaluated, self.mesh, self.vocabulary, self.config.training.batch_size, context, protocol
    )
    with progress.Progress('cloze', sum(source.counts.values()), 'questions') as bar:
      answers = list(evaluate(*self._serving, source.read(), bar.advance))
    return cloze.build_result(answers, source, int(self.state.step), protocol, context), answers

  def score(self, texts: str | Sequence[str]) -> list[Score]:
    """Scores texts, each as a document of its own.

    A text is read as evaluation reads a split: in segments of the evaluation's length.

    Raises:
      BadInput: the vocabulary does not have a character.
    """
    texts = [texts] if isinstance(texts, str) else list(texts)
    ids = [self._encoded(text, f'text {i + 1}') for i, text in enumerate(texts)]
    nats = self._scorer(_rows(len(ids))).score_documents(
      *self._serving, ids, self.vocabulary.document_start, self.config.evaluation_length()
    )
    lossless = [
      self.vocabulary.decode(one) == text.encode() for one, text in zip(ids, texts, strict=True)
    ]
    return [Score(*each) for each in zip(texts, ids, nats, lossless, strict=True)]

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
  ) -> list[Completion]:
    """Continues prompts, each as the beginning of a document of its own.

    Args:
      prompts: the texts; '' begins a new document.
      tokens: to add, at most; a document may end earlier.
      temperature, top_k, top_p: see `decoding.sampling.SamplingConfig`; temperature 0 is greedy.
      seed: prompt number i, from 0, draws with seed + i, whatever the other prompts are.
      context: tokens that a token is predicted from, at most. None: the segment length of the
        evaluation and, where the model has one, its memory.
      on_text: called with the number of a prompt and what its text has grown by.

    Raises:
      BadInput: a prompt does not fit the context, or a value is impossible.
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    how = sampling.SamplingConfig(temperature, top_k, top_p)
    return list(self.completions(prompts, how, tokens, seed, context, on_text))

  def completions(
    self,
    prompts: Sequence[str],
    how: sampling.SamplingConfig,
    tokens: int,
    seed: int = 0,
    context: int | None = None,
    on_text: Callable[[int, str], None] | None = None,
  ) -> Iterator[Completion]:
    """Yields what `generate` returns, some prompts at a time, as soon as they are done."""
    how.check()
    if self.config.model.position in model_config.SEGMENT_POSITIONS:
      raise errors.BadInput(
        f'model.position={self.config.model.position!r} counts from the end of a segment: such a '
        f'model can be evaluated, but not write'
      )
    if context is not None and self.config.model.recurrent is not None:
      raise errors.BadInput(
        f'context={context} has no meaning for model.recurrent, whose state holds all it has read: '
        f'leave it out'
      )
    context = self.config.evaluation_context() if context is None else context
    for name, value, least in (('tokens', tokens, 1), ('context', context, 1), ('seed', seed, 0)):
      if not isinstance(value, numbers.Integral) or value < least:
        raise errors.BadInput(f'{name}={value} must be a whole number from {least} on')
    if seed + len(prompts) > 2**32:
      raise errors.BadInput(f'seed={seed} and one more for each prompt exceed 2^32 - 1')
    ids = [self._prompt(prompt, i, context) for i, prompt in enumerate(prompts)]
    if max(map(len, ids), default=0) + tokens > context:
      logging.info('a token is predicted from the last %s tokens, the context', f'{context:,}')
    for first in range(0, len(ids), ROWS):
      rows = range(first, min(first + ROWS, len(ids)))
      texts = [
        detokenizer.IncrementalDetokenizer(self.vocabulary, ids[row][1:], tokens) for row in rows
      ]
      generator = self._generator(context, _rows(len(rows)))
      seeds = [seed + row for row in rows]
      for token_B in generator(*self._serving, [ids[row] for row in rows], seeds, how):
        for row, text, token in zip(rows, texts, token_B.tolist(), strict=True):
          if not text.is_done:
            grown = text.add(token)
            if on_text is not None:
              on_text(row, grown)
        if all(text.is_done for text in texts):
          break
      for row, text in zip(rows, texts, strict=True):
        yield Completion(prompts[row], text.text, text.tokens, text.document_ended, seed + row)

  @functools.cached_property
  def _serving(self) -> tuple[Any, Any]:
    """Parameters, and the clusters of all tokens in place of the codebook."""
    params, codebook = self.state.params, self.state.codebook
    serve = jax.jit(functools.partial(heads.for_serving, self.config.model))
    with sharding.use(self.mesh):
      return params, serve(params, codebook)

  @functools.cached_property
  def _scorer(self) -> Callable[[int], scoring.Scorer]:
    """By rows; kept, as the generators are."""
    return functools.cache(functools.partial(scoring.Scorer, self.evaluated, self.mesh))

  @functools.cached_property
  def _generator(self) -> Callable[[int, int], generation.Generator]:
    """By context and rows; kept, since each compiles its own steps."""
    return functools.cache(functools.partial(generation.Generator, self.evaluated, self.mesh))

  def _encoded(self, text: str, name: str) -> np.ndarray:
    if not isinstance(text, str):
      raise TypeError(f'{name} is not a str: {text!r}')
    try:
      return self.vocabulary.encode(text.encode()).astype(np.int32)
    except UnicodeEncodeError as error:
      raise errors.BadInput(f'{name} is not valid Unicode: {error.reason}') from error
    except errors.BadInput as error:
      raise errors.BadInput(f'{name}: {error}') from error

  def _prompt(self, prompt: str, number: int, context: int) -> np.ndarray:
    """The ids of a prompt, the document start first."""
    name = f'prompt {number + 1}'
    ids = np.insert(self._encoded(prompt, name), 0, self.vocabulary.document_start)
    if len(ids) > context:
      raise errors.BadInput(
        f'{name} is too long: {len(ids) - 1:,} tokens, but {context - 1:,} and the document '
        f'start fill the context of {context:,}; shorten it, or raise the context'
      )
    return ids


def finder(
  config: data_config.DataConfig,
) -> Callable[[data_config.DataConfig], corpora.Corpus] | None:
  """What opens a corpus that is read through seqio; None for others."""
  if not config.is_tfds_corpus:
    return None
  from ngrammer_jax.tasks import c4  # with TensorFlow

  return c4.open_corpus


def _check_split(name: str) -> None:
  if name not in corpora.SPLITS:
    raise errors.BadInput(f'--split={name} is not one of: {", ".join(corpora.SPLITS)}')


def _rows(texts: int) -> int:
  """Rows for so many texts: few different numbers, for each is compiled."""
  return min(ROWS, 1 << max(texts - 1, 0).bit_length())


def load_run(workdir: str | pathlib.Path, step: int | str = 'newest') -> Run:
  """Opens the workdir of a run.

  Args:
    workdir: of the run.
    step: which checkpoint: a number, `newest`, or `best` on the validation split.

  Raises:
    BadInput: it is no workdir of a run.
  """
  workdir = files.path(workdir)
  return Run(workdir, workdirs.load_config(workdir), step)
