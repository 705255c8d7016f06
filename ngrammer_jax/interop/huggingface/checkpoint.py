"""The files of a published model: config, tokenizer, and tensors read by ranges of rows.

A folder has config.json and model.safetensors, or several files with model.safetensors.index.json.
Pickles, such as pytorch_model.bin, are never read, because they can run code.
"""

from collections.abc import Mapping
import contextlib
import dataclasses
import pathlib
from typing import Any, Protocol

import numpy as np

from ngrammer_jax import errors
from ngrammer_jax.data.vocabularies import gguf_header
from ngrammer_jax.interop import row_files
from ngrammer_jax.interop.huggingface import adapter_config
from ngrammer_jax.system import file_errors, git_lfs, json_files, storage

CONFIG = 'config.json'
WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
PICKLES = ('*.bin', '*.pt', '*.pth', '*.ckpt')
# Files about text that belong to a model, besides tokenizer.json.
TEXT_FILES = (
  'tokenizer_config.json',
  'special_tokens_map.json',
  'generation_config.json',
  'chat_template.jinja',
)


class StoredTensor(Protocol):
  """A tensor of a file.

  Attributes:
    shape: its shape.
    dtype: its dtype.
  """

  shape: tuple[int, ...]
  dtype: np.dtype

  def read(self, start: int, stop: int) -> np.ndarray:
    """Returns the rows from `start` to before `stop`, as a copy."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A published model.

  Attributes:
    path: its folder or file.
    config: the content of config.json.
    tensors: its tensors by name.
    text_files: content of its text files besides the tokenizer, by name.
    versions: size and time of the files when their headers were read, by path.
  """

  path: pathlib.Path
  config: dict[str, Any]
  tensors: Mapping[str, StoredTensor]
  text_files: Mapping[str, bytes]
  versions: Mapping[pathlib.Path, tuple[int, int]]

  @property
  def config_path(self) -> pathlib.Path:
    """The file of the config."""
    return self.path if self.path.is_file() else self.path / CONFIG

  def check_unchanged(self) -> None:
    """Raises BadInput if a file changed since its header was read."""
    for path, expected in self.versions.items():
      if version(path) != expected:
        raise errors.BadInput(f'{path} was changed while it was read: wait for its end, and rerun')


def is_published(folder: pathlib.Path) -> bool:
  """Whether a path is a published model: a GGUF file, or a folder other than a run.

  The config.json of a published model has a model_type. Published models are local.
  """
  if storage.is_remote(folder):
    return False
  if gguf_header.is_gguf(folder):
    return True
  with contextlib.suppress(*file_errors.DAMAGE_ERRORS):
    return 'model_type' in json_files.read(folder / CONFIG)
  return False


def open_folder(folder: pathlib.Path) -> Checkpoint:
  """Returns the model in a folder; reads only the headers.

  Raises:
    BadInput: a missing or damaged file, or only pickles.
  """
  git_lfs.check_file(folder)  # in place of a GGUF file whose name does not tell it
  if (folder / adapter_config.FILE).is_file() and not (folder / CONFIG).is_file():
    raise errors.BadInput(
      f'{folder} is a LoRA adapter: name the model that it was trained on by --pretrained, and the '
      f'adapter by --adapter={folder}'
    )
  if not (folder / CONFIG).is_file():
    reason = 'expected the folder of a published model'
    gguf_files = sorted(folder.glob('*.gguf'))
    if gguf_files:
      reason = f'name its file {gguf_files[0].name}'
    raise errors.BadInput(f'{folder} has no {CONFIG}: {reason}')
  with file_errors.translate_damage(folder / CONFIG):
    config = json_files.read(folder / CONFIG)
  paths, weight_map = _weight_files(folder)
  versions = {path: version(path) for path in paths}
  tensors, _ = row_files.stored_arrays(paths)
  for name, file in weight_map.items():
    if name not in tensors or pathlib.Path(tensors[name].path).name != file:
      raise errors.BadInput(f'{folder / INDEX} says that {file} has {name}, but {file} lacks it')
  text_files = {}
  for name in TEXT_FILES:
    if (folder / name).is_file():
      text_files[name] = git_lfs.read_bytes(folder / name)
  return Checkpoint(folder, config, tensors, text_files, versions)


def _weight_files(folder: pathlib.Path) -> tuple[list[pathlib.Path], dict[str, str]]:
  """Returns the files of the weights, and the file of each tensor if there is an index."""
  if (folder / WEIGHTS).exists():
    return [folder / WEIGHTS], {}
  if (folder / INDEX).exists():
    with file_errors.translate_damage(folder / INDEX):
      weight_map = dict(json_files.read(folder / INDEX)['weight_map'])
      names = sorted(set(weight_map.values()))
      for name in names:
        if pathlib.Path(name).name != name:
          raise ValueError(f'{name!r} is not a file of the folder')
      return [folder / name for name in names], weight_map
  reason = ': get the files of the weights too'
  pickles = [path.name for pattern in PICKLES for path in sorted(folder.glob(pattern))]
  if pickles:
    reason = f', only pickles ({pickles[0]}), which can run code and are never read: convert them'
  raise errors.BadInput(f'{folder} has neither {WEIGHTS} nor {INDEX}{reason}')


def version(path: pathlib.Path) -> tuple[int, int]:
  """Returns the size and the time of a file; zeros for a missing one."""
  with contextlib.suppress(OSError):
    status = path.stat()
    return status.st_size, status.st_mtime_ns
  return 0, 0
