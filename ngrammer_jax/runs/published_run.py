"""A published model as a run, for evaluation, sampling, export and further training."""

import dataclasses
import functools
import logging
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from ngrammer_jax import errors, memory_limits
from ngrammer_jax.checkpoints import checksums
from ngrammer_jax.config import conversion
from ngrammer_jax.data import mixture, vocabularies
from ngrammer_jax.data.mixture import Mixture
from ngrammer_jax.data.vocabularies import published, token_ids
from ngrammer_jax.interop.huggingface import published_model, tensors
from ngrammer_jax.models import model_variables, precision
from ngrammer_jax.runs import corpus, restoring, run
from ngrammer_jax.system import storage


@dataclasses.dataclass(frozen=True)
class PublishedRun(run.Run):
  """A published model at step 0.

  Attributes:
    dtype: dtype of the parameters; None: dtypes of the file.
    published: the files of the model.
  """

  dtype: str | None = None
  published: published_model.PublishedModel = dataclasses.field(
    kw_only=True, repr=False, compare=False
  )

  @property
  def vocabulary_size(self) -> int:
    return self.published.description.vocabulary_size  # of which a tokenizer may not use all

  content_hash = None  # its text is not known
  is_exported = False
  results_folder = None  # nothing is added to its files

  @property
  def origin(self) -> dict[str, Any]:
    return self.published.origin

  @functools.cached_property
  def vocabulary(self) -> vocabularies.Vocabulary:
    """The tokenizer of the model. Raises BadInput if it is missing or too large."""
    return published.read(self.workdir, self.vocabulary_size)

  @functools.cached_property
  def vocabulary_of_ids(self) -> vocabularies.Vocabulary:
    """The tokenizer of the model, or a vocabulary of plain token ids."""
    if published.has_tokenizer(self.workdir):
      return self.vocabulary
    ends: list[int] = []
    for source in (self.origin['generation'], self.origin['token_ids']):
      end = source.get('eos_token_id', [])
      ends += end if isinstance(end, list) else [end]
    ends = [end for end in dict.fromkeys(ends) if self._is_id(end)]
    begin = self.origin['token_ids'].get('bos_token_id')
    if not self._is_id(begin):
      begin = None
    reason = f'{self.workdir} has no tokenizer: add its tokenizer.json'
    return token_ids.TokenIds(self.vocabulary_size, begin, ends, reason)

  def _is_id(self, token: Any) -> bool:
    """Whether a value of the files is a valid id (files may have null or -1)."""
    return type(token) is int and 0 <= token < self.vocabulary_size

  def find_checkpoint(self) -> None:
    """Returns None: there are no checkpoints. Raises BadInput for a step other than 0."""
    if self.step not in ('newest', 'best', 0):
      raise errors.BadInput(f'--step={self.step}: {self.workdir} has no steps: omit it')

  @functools.cached_property
  def parameter_dtypes(self) -> dict[str, np.dtype]:
    stored = self.published.checkpoint.tensors
    dtypes = {}
    for name, rows in self.published.slices.items():
      dtypes[name] = jnp.dtype(self.dtype or stored[rows.name].dtype)
    available = {name: precision.available_dtype(dtype) for name, dtype in dtypes.items()}
    if available != dtypes:
      logging.info('%s: float64 is read as float32, without JAX_ENABLE_X64=1', self.workdir)
    return available

  def load(self, abstract: Any) -> dict[str, Any]:
    """Returns the parameters, in the dtypes and shards of `abstract`."""
    return tensors.load(self.published.checkpoint, self.published.slices, abstract)

  def tensors_by_name(self, params: Any) -> dict[str, np.ndarray]:
    """Returns parameters, or their gradients, as tensors by their names in the file."""
    return tensors.by_name(params, self.published.slices)

  @functools.cached_property
  def restored(self) -> model_variables.ModelVariables:
    self.find_checkpoint()
    abstract = restoring.abstract_variables(self)['params']
    memory = memory_limits.device_memory(self.mesh)
    memory_limits.check_fits(checksums.named_leaves(abstract), memory, 'the parameters')
    return model_variables.ModelVariables(0, self.load(abstract), {})

  @functools.cached_property
  def mixture(self) -> Mixture:
    data = self.config.data
    return mixture.prepare(data, corpus.open_corpus, data.cache_dir is None, self.vocabulary)


def open_run(
  path: pathlib.Path,
  step: int | str = 'newest',
  dtype: Any = None,
  adapter: str | pathlib.Path | None = None,
) -> PublishedRun:
  """Opens a published model.

  Args:
    path: its folder or GGUF file.
    step: `newest`, `best` or 0.
    dtype: dtype of the parameters, see `precision.loaded_dtype`; None: dtypes of the file.
    adapter: folder of a LoRA adapter; None: no adapter.

  Raises:
    BadInput: see `published_model.open`, or an invalid parameter dtype.
  """
  dtype = precision.loaded_dtype(dtype)
  if adapter is not None:
    adapter = storage.path(adapter)
  model = published_model.open(path, adapter)
  values = model.config_values()
  if 'vocabulary_path' not in values['data']:  # it has no tokenizer
    values = values | {'data': {}}
  with errors.named(model.checkpoint.config_path):
    config = conversion.resolve(values)
  return PublishedRun(path, config, step, dtype, published=model)
