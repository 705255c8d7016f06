"""A trained run as an object, for the commands, notebooks and other programs."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import pathlib
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax.checkpoints import workdirs
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.mixture import Mixture
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.inference import (
  cloze,
  conversation,
  encoding,
  pairs,
  sampling,
  text,
)
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.interop.huggingface import published_model
from ngrammer_jax.layers.ngram.memory import NGramMemory
from ngrammer_jax.models import language_model, model_variables
from ngrammer_jax.runs import (
  corpus,
  evaluation,
  exported,
  generation,
  generation_config,
  restoring,
  token_clusters,
)

if TYPE_CHECKING:
  from ngrammer_jax.training.state import TrainState


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
  published: ClassVar[published_model.PublishedModel | None] = None

  # What the files of the run say.

  @functools.cached_property
  def vocabulary(self) -> vocabularies.Vocabulary:
    """The vocabulary, which encodes and decodes text."""
    return vocabularies.load(self.workdir)

  @property
  def vocabulary_of_ids(self) -> vocabularies.Vocabulary:
    """The vocabulary for texts in token ids; a model without tokenizer has it too."""
    return self.vocabulary

  @property
  def vocabulary_size(self) -> int:
    """V, number of token ids of the model."""
    return self.vocabulary.size

  @property
  def content_hash(self) -> str | None:
    """The hash of the training text; None: unknown."""
    return workdirs.read_content_hash(self.workdir)

  @property
  def origin(self) -> dict[str, Any]:
    """`published_model.PublishedModel.origin` of the published model in `init_from`, or empty."""
    return workdirs.read_origin(self.workdir)

  @functools.cached_property
  def recommended_sampling(self) -> dict[str, float | int]:
    """Sampling settings of the published model in `init_from`, by name; or empty."""
    return generation_config.read(self.origin.get('generation', {}))

  @property
  def results_folder(self) -> pathlib.Path | None:
    """Default folder of results; None: results are not written."""
    return self.workdir

  @property
  def is_exported(self) -> bool:
    """Whether it is an exported run, with variables but no checkpoints."""
    return workdirs.is_exported(self.workdir)

  # The model and its variables.

  @functools.cached_property
  def mesh(self) -> jax.sharding.Mesh:
    """The mesh of the config, or all devices along `data` if their number does not fit."""
    return restoring.make_mesh(self.config.mesh)

  @functools.cached_property
  def model(self) -> language_model.LanguageModel:
    """The model, without its variables."""
    return language_model.build(self.config.model, self.vocabulary_size)

  @functools.cached_property
  def evaluated(self) -> language_model.LanguageModel:
    """The model with the memory and the positions of evaluation and generation."""
    config = self.config.evaluation_model()
    return language_model.build(config, self.vocabulary_size, jit_layers=True)

  def find_checkpoint(self) -> int | None:
    """Returns the step of the checkpoint (`newest`: the last); None for an exported run.

    All processes use the list of the first one, because a running training may change it.

    Raises:
      BadInput: there is no such checkpoint.
    """
    return restoring.find_checkpoint(self)

  @functools.cached_property
  def abstract_parameters(self) -> Any:
    """Shapes of the parameters, with their logical axis names."""
    return model_variables.abstract(self.model)['params']

  @functools.cached_property
  def parameter_dtypes(self) -> dict[str, np.dtype]:
    """Dtype of each parameter by name."""
    return restoring.parameter_dtypes(self)

  @functools.cached_property
  def restored(self) -> model_variables.ModelVariables:
    """Step, parameters and codebook of the checkpoint; no other arrays are read.

    Raises:
      BadInput: there is no checkpoint, or it is damaged.
    """
    return restoring.restore_variables(self)

  @functools.cached_property
  def state(self) -> 'TrainState':
    """The train state of the checkpoint, with optimizer state and memory; see `restored`."""
    from ngrammer_jax.training import run_state  # inference needs nothing of training

    return run_state.restore(self)

  @functools.cached_property
  def engine(self) -> inference.Engine:
    """Scores, ranks and generates; compiles every program once."""
    return inference.Engine.shared(self.evaluated, self.mesh)

  @functools.cached_property
  def variables(self) -> inference.Variables:
    """The variables of the engine, with precomputed clusters of all tokens."""
    # Restored first: it finds out whether there is a checkpoint before devices are used.
    collections = self.restored.collections
    return self.engine.prepare(collections)

  @property
  def token_clusters(self) -> np.ndarray:
    """The cluster of every token and head, int32 [V, N], in the first of `token_memories`."""
    return self.token_clusters_of(next(iter(self.token_memories())))

  def token_clusters_of(self, memory: str) -> np.ndarray:
    """Returns the cluster of every token and head, int32 [V, N], in one of `token_memories`."""
    return token_clusters.clusters_of(self, memory)

  def token_memories(self) -> dict[str, NGramMemory]:
    """Returns the memories with token clusters, by the path of their module.

    Raises BadInput if there are none.
    """
    return token_clusters.find_memories(self)

  def export(self, folder: str | pathlib.Path, dtype: Any = None, format: str = 'run') -> None:
    """Writes config, vocabulary and variables to a folder for `load_run`.

    Args:
      folder: a new or empty folder.
      dtype: dtype of the parameters in the file, such as `bfloat16`. None: unchanged.
      format: `run`, or `huggingface` for other libraries.

    Raises:
      BadInput: a remote or non-empty folder, or one that cannot be created; an invalid parameter
        dtype; or no compatible family of published models.
    """
    exported.export(self, folder, dtype, format)

  # The corpus, and metrics on it.

  @functools.cached_property
  def mixture(self) -> Mixture:
    """The tokenised corpora. Raises BadInput if they differ from the training corpora."""
    return corpus.prepare(self)

  def split(self, name: str) -> token_split.TokenSplit:
    """Returns a split of the corpus, or of a part of a mixture, such as 'validation/PART'.

    Raises BadInput if the corpus differs from the training corpus.
    """
    return corpus.find_split(self, name)

  def log_paths(self, *names: str) -> None:
    """Logs the paths read by the data section, since the run may come from someone else."""
    corpus.log_paths(self, *names)

  def evaluate(self, split: str = 'test', max_tokens: int | None = None) -> dict[str, Any]:
    """Scores a split of the corpus, or its first tokens; see `language_modeling.evaluate`.

    The result of a mixture has its `parts` by name; see `language_modeling.combine`.
    """
    return evaluation.evaluate(self, split, max_tokens)

  def evaluate_file(
    self, path: str | pathlib.Path, max_tokens: int | None = None
  ) -> dict[str, Any]:
    """Scores a text file as one document, or its first tokens; see `evaluate`.

    A short text is divided into fewer streams, each with at least one segment. A text shorter than
    a segment is read in one segment of 128 tokens, or of the next power of two.

    Raises:
      BadInput: the file cannot be read, or has a character outside the vocabulary.
    """
    return evaluation.evaluate_file(self, path, max_tokens)

  def cloze(
    self, path: str | pathlib.Path, split: str = 'test', protocol: str = 'query'
  ) -> tuple[dict[str, Any], list[cloze.ClozeAnswer]]:
    """Answers the questions of the Children's Book Test; see `inference.cloze`.

    Args:
      path: folder or file of the questions.
      split: split of a folder: train, validation or test.
      protocol: `query`, or `prefix` (ignores the text after a candidate).

    Raises:
      BadInput: there are no such questions, a file is damaged, or the model cannot answer them.
    """
    return evaluation.answer_cloze(self, path, split, protocol)

  # Texts.

  def score(self, texts: str | Sequence[str], special: bool = False) -> list[text.Score]:
    """Scores texts, each as a separate document, in segments of the evaluation length.

    Args:
      texts: the texts.
      special: whether the text of a special token is read as the token.

    Raises:
      BadInput: a character outside the vocabulary, or a vocabulary without special tokens.
    """
    return generation.score(self, texts, special)

  def score_pairs(
    self,
    texts: Sequence[tuple[encoding.TextOrIds, encoding.TextOrIds]],
    rows: int = inference.MAX_ROWS,
    special: bool = False,
  ) -> list[pairs.PairScore]:
    """Scores continuations, each after its context at the start of a separate document.

    A token is predicted from the last tokens within the context of the evaluation.

    Args:
      texts: pairs of a context and its continuation, texts or token ids; see `pairs.encode`. Token
        ids need no tokenizer.
      rows: maximum batch size in contexts.
      special: whether the text of a special token is read as the token.

    Raises:
      BadInput: a character or id outside the vocabulary, a vocabulary without special tokens, or a
        model that cannot continue a text.
    """
    return generation.score_pairs(self, texts, rows, special)

  def generate(
    self,
    prompts: conversation.Prompt | Sequence[conversation.Prompt],
    tokens: int = 100,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    context: int | None = None,
    on_text: Callable[[int, str], None] | None = None,
    repetition_penalty: float | None = None,
    stop: str | Sequence[str] = (),
    chat: bool = False,
    min_p: float | None = None,
    special: bool = False,
    system: str | None = None,
  ) -> list[text.Completion]:
    """Continues prompts, each as the start of a separate document.

    Sampling arguments of None take the values of the model, see `sampling_config`.

    Args:
      prompts: the prompts, texts or token ids; '' starts a new document. Token ids are used
        unchanged, and need no tokenizer.
      tokens: maximum number of new tokens; a document may end earlier.
      temperature: divides the logits; 0 is greedy decoding.
      top_k: samples from this number of most likely tokens; 0: from all.
      top_p: samples from the most likely tokens with this total probability; 1: from all.
      seed: prompt number i, from 0, uses seed + i; it does not depend on the other prompts.
      context: context length in tokens. None: the segment length of the evaluation plus the memory
        of the model.
      on_text: called with the index of a prompt and its new text, for each token.
      repetition_penalty: above 1, lowers the logits of tokens that occurred (CTRL).
      stop: stop strings; a continuation ends before them. A stop string may be a special token.
      chat: whether the prompts are chat messages, formatted by the model's chat template. A prompt
        is the text of a message, or a list of messages with `role` and `content`.
      min_p: samples from the tokens with at least this share of the highest probability; 0: from
        all.
      special: whether the text of a special token in a prompt is read as the token.
      system: a system message before each prompt, for `chat`. None: the template decides.

    Raises:
      BadInput: a prompt does not fit the context, or a value is out of range.
    """
    config = self.sampling_config(temperature, top_k, top_p, repetition_penalty, min_p)
    prompts = conversation.as_list(prompts)
    completions = self.completions(
      prompts, config, tokens, seed, context, on_text, stop, chat, special, system
    )
    return list(completions)

  def sampling_config(
    self,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    min_p: float | None = None,
  ) -> sampling.SamplingConfig:
    """Returns sampling options. An argument of None takes the recommendation of the model.

    A published model recommends values in its generation_config.json. A run takes them from the
    published model in `init_from`. Otherwise the defaults of `SamplingConfig` apply: temperature 1
    and all tokens.
    """
    arguments = {
      'temperature': temperature,
      'top_k': top_k,
      'top_p': top_p,
      'repetition_penalty': repetition_penalty,
      'min_p': min_p,
    }
    return generation.sampling_config(self, arguments)

  def completions(
    self,
    prompts: Sequence[conversation.Prompt],
    sampling_config: sampling.SamplingConfig,
    tokens: int,
    seed: int = 0,
    context: int | None = None,
    on_text: Callable[[int, str], None] | None = None,
    stop: str | Sequence[str] = (),
    chat: bool = False,
    special: bool = False,
    system: str | None = None,
  ) -> Iterator[text.Completion]:
    """Yields the completions of `generate`, batch by batch, as they finish."""
    config = generation.completion_config(self, sampling_config, tokens, seed, context, stop)
    prompt_config = generation.PromptConfig(chat, special, system)
    return generation.complete(self, prompts, prompt_config, config, on_text)

  def converse(
    self,
    sampling_config: sampling.SamplingConfig | None = None,
    tokens: int = 100,
    seed: int = 0,
    context: int | None = None,
    stop: str | Sequence[str] = (),
    system: str | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    min_p: float | None = None,
  ) -> conversation.Conversation:
    """Starts a conversation; for the other arguments see `generate`.

    Args:
      sampling_config: all options of sampling. None: taken from the arguments and the model, see
        the method `sampling_config`.

    Raises:
      BadInput: the model has no chat template, a value is out of range, or the template does not
        support a system message.
    """
    if sampling_config is None:
      sampling_config = self.sampling_config(temperature, top_k, top_p, repetition_penalty, min_p)
    config = generation.completion_config(self, sampling_config, tokens, seed, context, stop)
    return generation.converse(self, config, system)
