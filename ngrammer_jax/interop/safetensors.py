"""Saves variables to safetensors files and loads them, bit-exact; names are joined by '/'."""

import os
import pathlib
from typing import Any

from flax import traverse_util
from safetensors import flax as library

from ngrammer_jax import errors
from ngrammer_jax.system import git_lfs


def save(variables: dict[str, Any], path: str | pathlib.Path) -> None:
  """Saves nested variables, as in save({'params': run.state.params}, 'model.safetensors')."""
  library.save_file(traverse_util.flatten_dict(variables, sep='/'), path)


def load(path: str | pathlib.Path) -> dict[str, Any]:
  """Loads a file written by `save`. Raises BadInput if the file is missing or corrupt."""
  check_file(path)
  return traverse_util.unflatten_dict(library.load_file(path), sep='/')


def check_file(path: str | os.PathLike[str]) -> None:
  """Raises BadInput if a file is missing or its header or size is wrong; loads no array."""
  git_lfs.check_file(path)
  try:
    with library.safe_open(path, 'numpy'):
      pass
  except Exception as error:  # the class depends on the version of the library
    raise errors.BadInput(f'{path} cannot be read as safetensors: {error}; get it again') from error
