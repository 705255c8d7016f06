"""Variables to a safetensors file and back, bit by bit; names are paths joined by '/'."""

import pathlib
from typing import Any

from flax import traverse_util

from ngrammer_jax import errors


def save(variables: dict[str, Any], path: str | pathlib.Path) -> None:
  """Writes nested variables, as in save({'params': run.state.params}, 'model.safetensors')."""
  _library().save_file(traverse_util.flatten_dict(variables, sep='/'), path)


def load(path: str | pathlib.Path) -> dict[str, Any]:
  """Reads what `save` wrote. Raises BadInput where the file is missing or damaged."""
  library = _library()
  try:
    return traverse_util.unflatten_dict(library.load_file(path), sep='/')
  except Exception as error:  # of a class of its own in each version of the library
    raise errors.BadInput(f'{path} cannot be read as safetensors: {error}') from error


def _library():
  try:
    from safetensors import flax
  except ImportError as error:
    raise errors.BadInput('this needs safetensors: pip install safetensors') from error
  return flax
