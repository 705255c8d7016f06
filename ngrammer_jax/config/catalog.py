"""The config files of the package, by name.

The files of the folder `configs` are installed as `ngrammer_jax.configs`.
"""

import inspect
import pathlib
import runpy
import textwrap

PACKAGE = pathlib.Path(__file__).resolve().parents[1]


def files() -> dict[str, pathlib.Path]:
  """Returns the config files of the package, by their names without `.py`."""
  installed = PACKAGE / 'configs'
  checkout = PACKAGE.parent / 'configs'
  folder = installed if installed.is_dir() else checkout
  return {path.stem: path for path in sorted(folder.glob('[!_]*.py'))}


def format_list() -> str:
  """Formats all configs of the package, each with its variants, the default first."""
  lines = ['configs, for --config=NAME or --config=NAME:VARIANT']
  for name, path in files().items():
    names = runpy.run_path(str(path))
    lines.append(f'{name}: {names["__doc__"].splitlines()[0]}')
    for parameter in inspect.signature(names['get_config']).parameters.values():
      variants = ', '.join(dict.fromkeys((parameter.default, *names['VARIANTS'])))
      lines += textwrap.wrap(variants, 100, initial_indent='  ', subsequent_indent='  ')
  return '\n'.join(lines)
