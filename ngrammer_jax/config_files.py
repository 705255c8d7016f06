"""The values of --config=FILE[:VARIANT]: of a Python file, a run or a published model."""

import difflib
import inspect
import pathlib
import runpy
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config import catalog, conversion
from ngrammer_jax.runs import model_source
from ngrammer_jax.system import storage


def load(spec: str) -> dict[str, Any]:
  """Returns the config of FILE or FILE:VARIANT, from its get_config() or get_config(VARIANT).

  A FILE that does not exist may be the name of a config of the package, such as `quickstart`, and
  `pretrained:NAME` is the config of a pretrained model, with its vocabulary. The folder of a run or
  of a published model, with or without `hf:` before it, is its config.
  """
  if storage.user_path('--config', spec).exists():
    name = spec
    variant = ''
  else:
    name, _, variant = spec.partition(':')
  path = storage.user_path('--config', name)
  with errors.named(f'--config={spec}'):
    if spec.startswith(model_source.PREFIXES) and not path.exists():
      return model_source.resolve(spec).config_values()
    folder = path.parent if path.name == 'config.json' else path
    if (folder / 'config.json').is_file() or path.suffix == '.gguf':
      return model_source.ModelSource.from_path(folder).config_values()
    if not path.is_file():
      path = _find_packaged(spec, name)
    return _run_file(path, name, variant)


def _run_file(path: pathlib.Path, name: str, variant: str) -> dict[str, Any]:
  """Returns the config of a Python file. Raises BadInput if it is none, or fails."""
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
  """Returns the config of the package with a name. Raises BadInput if there is none."""
  packaged = catalog.files()
  if name in packaged:
    return packaged[name]
  if name == pathlib.Path(name).stem:
    raise errors.BadInput(_no_such_name(name, packaged))
  raise errors.BadInput(_no_such_file(spec, name, packaged))


def _no_such_name(name: str, packaged: dict[str, pathlib.Path]) -> str:
  """Returns the message for a name that no config of the package has, with the nearest one."""
  missing = f'no file and no config of the package {name}'
  names = ', '.join(packaged)
  near = difflib.get_close_matches(name, packaged, n=1)
  if near:
    return f'{missing}: did you mean {near[0]}? Available: {names}'
  return f'{missing}; available: {names}'


def _no_such_file(spec: str, name: str, packaged: dict[str, pathlib.Path]) -> str:
  """Returns the message for a file that does not exist: which ones its folder has.

  A file of a checkout, which is not here, may be a config of the package.
  """
  path = pathlib.Path(name)
  others = sorted(map(str, path.parent.glob('[!_]*.py')))
  if others:
    return f'no file {name}; available: {", ".join(others)}'
  if path.stem in packaged:
    variant = spec[len(name) :]
    return f'no file {name}: use the config of the package, --config={path.stem}{variant}'
  return f'no file {name}'
