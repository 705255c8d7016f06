"""Configs by the name or path of their files: Python files, and configs of the package."""

import difflib
import inspect
import pathlib
import runpy
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config import catalog, conversion
from ngrammer_jax.config.experiment import Config
from ngrammer_jax.system import storage


def load(source: str | pathlib.Path) -> Config:
  """Returns the checked config of a config file, or the stored config of a run.

  Args:
    source: `FILE` or `FILE:VARIANT`, where FILE may be the name of a config of the package, as in
      `transformer:llama_quickstart`; or a run directory or its `config.json`, also of an earlier
      version. A model without training has the sections `model` and `data` only.

  Raises:
    BadInput: an unknown file or variant; or see `resolve`.
    file_errors.DAMAGE_ERRORS: a `config.json` is not JSON, or lacks a section.
  """
  path = storage.user_path('config.load', source)
  if path.is_dir() and ((path / 'config.json').exists() or str(source) not in catalog.files()):
    path /= 'config.json'
  if path.suffix == '.json':
    if not path.exists():
      raise errors.BadInput(f'config.load: no file {path}')
    return conversion.load_stored(path)
  with errors.named(f'config.load({str(source)!r})'):
    return conversion.resolve(read_file('config.load', str(source)))


def split(key: str, spec: str) -> tuple[str, str]:
  """Returns the name of a file and its variant, '' without one.

  Args:
    key: flag or function of the text, for messages.
    spec: FILE or FILE:VARIANT.
  """
  if storage.user_path(key, spec).exists():
    return spec, ''
  name, _, variant = spec.partition(':')
  return name, variant


def read_file(key: str, spec: str) -> dict[str, Any]:
  """Returns the values of the Python file FILE or FILE:VARIANT, from its get_config().

  Args:
    key: flag or function of the text, for messages.
    spec: FILE may be the name of a config of the package.

  Raises:
    BadInput: an unknown file or variant, or a file that fails.
  """
  name, variant = split(key, spec)
  path = storage.user_path(key, name)
  if not path.is_file():
    path = _find_packaged(spec, name)
  return _run_file(path, name, variant)


def _run_file(path: pathlib.Path, name: str, variant: str) -> dict[str, Any]:
  """Returns the config of a Python file. Raises BadInput for other files, or if it fails."""
  if path.suffix != '.py':
    raise errors.BadInput(f'{name} is not a Python file, FILE.py')
  try:
    get_config = runpy.run_path(str(path.absolute())).get('get_config')
    if get_config is None:
      raise errors.BadInput(f'{name} has no get_config()')
    if variant and not inspect.signature(get_config).parameters:
      raise errors.BadInput(f'{name} has no variants; omit ":{variant}"')
    config = get_config(variant) if variant else get_config()
  except errors.BadInput:
    raise
  except (Exception, SystemExit) as error:
    reason = f'{type(error).__name__}: {error}'
    raise errors.BadInput(f'it fails: {reason}; correct the file') from error
  config = conversion.to_dict(config)
  if not isinstance(config, dict):
    raise errors.BadInput(f'get_config() returned {config!r}, not a ConfigDict')
  return config


def _find_packaged(spec: str, name: str) -> pathlib.Path:
  """Returns the config of the package with a name. Raises BadInput for an unknown name."""
  packaged = catalog.files()
  if name in packaged:
    return packaged[name]
  if name == pathlib.Path(name).stem:
    raise errors.BadInput(_no_such_name(name, packaged))
  raise errors.BadInput(_no_such_file(spec, name, packaged))


def _no_such_name(name: str, packaged: dict[str, pathlib.Path]) -> str:
  """Returns the message for an unknown config name, with the nearest one."""
  missing = f'no file and no config of the package {name}'
  names = ', '.join(packaged)
  near = difflib.get_close_matches(name, packaged, n=1)
  if near:
    return f'{missing}: did you mean {near[0]}? Available: {names}'
  return f'{missing}; available: {names}'


def _no_such_file(spec: str, name: str, packaged: dict[str, pathlib.Path]) -> str:
  """Returns the message for a missing file, with the files of its folder.

  A missing file of a checkout may be a config of the package.
  """
  path = pathlib.Path(name)
  others = sorted(map(str, path.parent.glob('[!_]*.py')))
  if others:
    return f'no file {name}; available: {", ".join(others)}'
  if path.stem in packaged:
    variant = spec[len(name) :]
    return f'no file {name}: use the config of the package, {path.stem}{variant}'
  return f'no file {name}'
