"""Config files: how a file is loaded, and those that come with the package, by name.

The files of the folder `configs` are installed as `ngrammer_jax.configs`.
"""

from collections.abc import Iterator
import importlib.util
import inspect
import pathlib
import types

from ngrammer_jax.config import conversion
from ngrammer_jax.config.experiment import Config
from ngrammer_jax.config.model import ModelConfig
from ngrammer_jax.system import text_tables

# Optional blocks of a model that its description names.
NAMED_BLOCKS = (
  *('ngram', 'ngram_memories', 'memory', 'span', 'persistent', 'convolution'),
  'adaptive_softmax',
)
PACKAGE = pathlib.Path(__file__).resolve().parents[1]


def load_module(path: pathlib.Path) -> types.ModuleType:
  """Runs a config file, and returns it as a module."""
  spec = importlib.util.spec_from_file_location(f'config_{path.stem}', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def files() -> dict[str, pathlib.Path]:
  """Returns the config files that come with the package, by their names without `.py`."""
  installed, checkout = PACKAGE / 'configs', PACKAGE.parent / 'configs'
  folder = installed if installed.is_dir() else checkout
  return {path.stem: path for path in sorted(folder.glob('[!_]*.py'))}


def format_list() -> str:
  """Formats all configs of the package and their variants, one line each."""
  blocks = ['configs, for --config=NAME or --config=NAME:VARIANT']
  for name, path in files().items():
    module = load_module(path)
    rows = [[f'  :{variant}', _describe(config)] for variant, config in _variants(module)]
    description = module.__doc__.splitlines()[0]
    blocks.append('\n'.join([f'{name}: {description}', *(text_tables.align_columns(rows, '<'))]))
  return '\n\n'.join(blocks)


def _variants(module: types.ModuleType) -> Iterator[tuple[str, Config]]:
  """Yields the variants of a config file and their configs, the default first."""
  parameters = inspect.signature(module.get_config).parameters
  if not parameters:
    return
  (default,) = (parameter.default for parameter in parameters.values())
  for variant in dict.fromkeys((default, *module.VARIANTS)):
    config = conversion.resolve(conversion.to_dict(module.get_config(variant)))
    yield f'{variant} (default)' if variant == default else variant, config


def _describe(config: Config) -> str:
  """Describes a config in one line: the model, the text and the steps."""
  steps = f'{config.training.steps:,} steps'
  if config.finetune is not None:
    return f'fine-tuning on {config.finetune.task}, {steps}'
  return f'{describe_model(config.model)}; {config.data.corpus}, {steps}'


def describe_model(config: ModelConfig) -> str:
  """Describes a model in one line: its size and its optional blocks."""
  model = f'{config.layers} layers of width {config.width}'
  if config.recurrent is not None:
    recurrent = config.recurrent
    model = f'{recurrent.cell} of {recurrent.hidden}, readout {recurrent.readout}'
  used = [name.replace('_', ' ') for name in NAMED_BLOCKS if getattr(config, name)]
  return ', '.join([model, *used])
