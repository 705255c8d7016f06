"""The adapter_config.json of a LoRA adapter: the rank and the scale of each adapted layer.

The tensors of the adapter determine the adapted layers, so `target_modules` is not read.
"""

from collections.abc import Mapping
import dataclasses
import math
import pathlib
import re
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config import fields
from ngrammer_jax.system import file_errors, json_files

FILE = 'adapter_config.json'
# Fields of the training, and fields determined by the tensors or the layers of the base.
HARMLESS = frozenset(
  """
  peft_version auto_mapping base_model_name_or_path revision task_type inference_mode lora_dropout
  fan_in_fan_out target_modules exclude_modules layers_to_transform layers_pattern modules_to_save
  bias eva_config megatron_core qalora_group_size ensure_weight_tying merge_weights
  """.split()
)
# Values of init_lora_weights that leave the base as it is; others, as pissa, train on another one.
INITIALIZATIONS = (True, False, None, 'gaussian', 'eva', 'orthogonal')
USED = {
  'r': fields.Key(8, '', 'r', types=(int,), at_least=1),
  'lora_alpha': fields.Key(8.0, '', 'lora_alpha', types=(float,)),
  'use_rslora': fields.Key(False, '', 'use_rslora', types=(bool,)),
}
PATTERNS = {'rank_pattern': 'r', 'alpha_pattern': 'lora_alpha'}  # values of other modules


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
  """The content of adapter_config.json.

  Attributes:
    rank: rank of the matrices A and B.
    alpha: numerator of the scale.
    use_rslora: whether the scale is alpha / sqrt(rank) instead of alpha / rank.
    rank_pattern: other ranks, by a regular expression of the end of the name of a module.
    alpha_pattern: other alphas, in the same way.
    base: name of the base model given by the author; None: unknown.
  """

  rank: int
  alpha: float
  use_rslora: bool
  rank_pattern: Mapping[str, int]
  alpha_pattern: Mapping[str, float]
  base: str | None

  def rank_of(self, module: str) -> int:
    """Returns the rank of a module."""
    return _find(self.rank_pattern, module, self.rank)

  def scale_of(self, module: str) -> float:
    """Returns the factor of B A of a module."""
    alpha = _find(self.alpha_pattern, module, self.alpha)
    rank = self.rank_of(module)
    if self.use_rslora:
      return alpha / math.sqrt(rank)
    return alpha / rank


def _find(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
  """Returns the value of the first expression matching a module name or its suffix."""
  for expression, value in pattern.items():
    if re.match(rf'(.*\.)?({expression})$', module):
      return value
  return default


def read(folder: pathlib.Path) -> AdapterConfig:
  """Reads the config of an adapter.

  Raises:
    BadInput: a missing or damaged file, or an adapter of an unsupported kind.
  """
  path = folder / FILE
  if not path.is_file():
    raise errors.BadInput(f'{folder} has no {FILE}: expected the folder of a LoRA adapter')
  with file_errors.translate_damage(path, 'get it again'), errors.named(path):
    values = json_files.read(path)
    _check_kind(values)
    own = {name: _value(key, values.get(name)) for name, key in USED.items()}
    patterns = {name: _pattern(name, values.get(name)) for name in PATTERNS}
  return AdapterConfig(
    rank=own['r'],
    alpha=own['lora_alpha'],
    use_rslora=own['use_rslora'],
    base=values.get('base_model_name_or_path'),
    **patterns,
  )


def _check_kind(values: Mapping[str, Any]) -> None:
  """Raises BadInput for another kind of adapter, or a field that may change the numbers."""
  kind = values.get('peft_type')
  if kind != 'LORA':
    raise errors.BadInput(f'peft_type={kind!r} is not supported; expected LORA')
  initialization = values.get('init_lora_weights')
  if initialization not in INITIALIZATIONS:
    raise errors.BadInput(
      f'init_lora_weights={initialization!r} is not supported: the adapter was trained on a base '
      f'with other weights; convert it to a plain LoRA adapter'
    )
  supported = HARMLESS | USED.keys() | PATTERNS.keys() | {'peft_type', 'init_lora_weights'}
  for name, value in values.items():
    if name not in supported and value:  # None, False and {} say that an option is not used
      raise errors.BadInput(
        f'{name}={fields.format_value(value)} is not supported: an adapter is merged as '
        f'W + scale B A'
      )


def _value(key: fields.Key, value: Any) -> Any:
  """Returns the value of a field or the default of its key. Raises BadInput for an invalid one."""
  if value is None:
    return key.default
  value = key.convert(value)
  key.check_value(value)
  return value


def _pattern(name: str, pattern: Any) -> dict[str, Any]:
  """Returns values by regular expressions. Raises BadInput for anything else."""
  if pattern is None:
    return {}
  if not isinstance(pattern, dict):
    raise errors.BadInput(f'{name}={fields.format_value(pattern)} must be an object {{...}}')
  values = {}
  for expression, value in pattern.items():
    path = f'{name}[{expression!r}]'
    key = dataclasses.replace(USED[PATTERNS[name]], path=path)
    values[expression] = _value(key, value)
    try:
      re.compile(expression)
    except re.error as error:
      raise errors.BadInput(f'{path} is no regular expression: {error}') from error
  return values
