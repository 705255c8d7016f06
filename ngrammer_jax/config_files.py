"""The values of --config=FILE[:VARIANT], from a Python file, a run or a published model."""

from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config import sources
from ngrammer_jax.runs import model_source
from ngrammer_jax.system import storage


def load(spec: str, flag: str = '--config') -> dict[str, Any]:
  """Returns the config of FILE or FILE:VARIANT, from its get_config() or get_config(VARIANT).

  If FILE does not exist, it may be the name of a config of the package, such as `quickstart`.
  `pretrained:NAME` is the config of a pretrained model, with its vocabulary. The folder of a run or
  a published model, optionally with the prefix `hf:`, is its config.

  Args:
    spec: the text.
    flag: the flag of the text, for messages.
  """
  name, _ = sources.split(flag, spec)
  path = storage.user_path(flag, name)
  with errors.named(f'{flag}={spec}'):
    if spec.startswith(model_source.PREFIXES) and not path.exists():
      return model_source.resolve(spec).config_values()
    folder = path.parent if path.name == 'config.json' else path
    if (folder / 'config.json').is_file() or path.suffix == '.gguf':
      return model_source.ModelSource.from_path(folder).config_values()
    return sources.read_file(flag, spec)
