"""Tiny random models of transformers under the config.json of published ones, in float64.

python -m tests.official_models    writes tests/reference/hf/published_* again
"""

from collections.abc import Iterator, Mapping
import contextlib
import copy
import json
import pathlib
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
import transformers.modeling_utils  # its tables of dtypes are made before `double_precision`

from ngrammer_jax.interop.huggingface import families
from tests import checks

V = 96  # rows of the embedding
H = 16  # head width
WINDOW = 5
LENGTH = 12  # tokens of a text, which is longer than the window
# Of these so many layers, from the first one, have each type; of others two.
LAYERS = {'gemma3_text': 6, 'smollm3': 4}
SIZES = (
  'vocab_size',
  'hidden_size',
  'num_hidden_layers',
  'num_attention_heads',
  'num_key_value_heads',
  'intermediate_size',
  'head_dim',
  'sliding_window',
)
VISION_SIZES = {
  'hidden_size': 16,
  'intermediate_size': 24,
  'num_hidden_layers': 1,
  'num_attention_heads': 2,
  'image_size': 28,
}
# Published configs whose arrays are stored, and the names of their folders.
STORED = {
  'Llama-3.2-3B-Instruct': 'published_llama_3_2',
  'Phi-3.5-mini-instruct': 'published_phi_3_5',
  'gemma-3-270m-it-unsloth': 'published_gemma_3_unsloth',
  'gpt2-medium': 'published_gpt2_medium',
  'Wizard-Vicuna-30B-Uncensored': 'published_wizard_vicuna',
  'RedPajama-INCITE-7B-Base': 'published_redpajama',
}


def cut(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a config.json with small sizes, and all other fields as they are.

  A size that is absent keeps its default, but for that of the vocabulary.
  """
  small = dict(config)
  if 'text_config' in config:
    small['text_config'] = cut(config['text_config'])
    small['vision_config'] = config['vision_config'] | VISION_SIZES
    small['mm_tokens_per_image'] = 4
    return small
  model_type = config['model_type']
  names = families.FAMILIES[model_type].names
  sizes = {name: config.get(names.get(name, name)) for name in SIZES}
  for name, size in _small_sizes(sizes, model_type).items():
    if sizes[name] is not None or name == 'vocab_size':
      small[names.get(name, name)] = size
    if name in small:  # a GPT-2 may say it by the name of Llama, too
      small[name] = size
  if 'sliding_window_size' in small:
    small['sliding_window_size'] = WINDOW
  for name in ('layer_types', 'no_rope_layers'):
    if config.get(name) is not None:
      small[name] = config[name][: LAYERS.get(model_type, 2)]
  for name in ('bos_token_id', 'eos_token_id', 'pad_token_id'):
    if name in config:
      small[name] = _small_ids(config[name])
  if config.get('rope_scaling'):
    num_factors = int(H * config.get('partial_rotary_factor', 1)) // 2
    small['rope_scaling'] = {
      name: _thinned(value, num_factors) for name, value in config['rope_scaling'].items()
    }
  return small


def _small_sizes(sizes: Mapping[str, int | None], model_type: str) -> dict[str, int]:
  """Returns small values of all sizes, with as many queries for a key head, up to 3."""
  heads = sizes['num_attention_heads']
  if heads is None:  # of a Gemma 3: it keeps the default
    small_heads = 8
    small_key_heads = 4
  else:
    key_heads = sizes['num_key_value_heads'] or heads
    small_key_heads = min(key_heads, 2)
    small_heads = small_key_heads * min(heads // key_heads, 3)
  width = small_heads * H
  if sizes['head_dim'] and sizes['head_dim'] * heads != sizes['hidden_size']:
    width += small_heads * 2  # the heads together are not as wide as the model
  return {
    'vocab_size': V,
    'hidden_size': width,
    'num_hidden_layers': LAYERS.get(model_type, 2),
    'num_attention_heads': small_heads,
    'num_key_value_heads': small_key_heads,
    'intermediate_size': 24,
    'head_dim': H,
    'sliding_window': WINDOW,
  }


def _small_ids(ids: Any) -> Any:
  """Returns ids of special tokens that a small vocabulary has."""
  if isinstance(ids, list):
    return [_small_ids(i) for i in ids]
  if ids is not None and ids >= V:
    return 1
  return ids


def _thinned(value: Any, count: int) -> Any:
  """Returns so many values of a list, at even distances; all other values as they are."""
  if not isinstance(value, list):
    return value
  return value[:: len(value) // count][:count]


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
  """All casts of the official code to float32 become casts to float64."""
  with (
    mock.patch.object(torch, 'float32', torch.float64),
    mock.patch.object(torch, 'float', torch.float64),
    mock.patch.object(torch.Tensor, 'float', torch.Tensor.double),
  ):
    yield


def write_config(folder: pathlib.Path, config: Mapping[str, Any]) -> None:
  """Writes config.json."""
  folder.mkdir(exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(config, indent=2) + '\n')


def build(folder: pathlib.Path) -> torch.nn.Module:
  """Returns a random model under the config.json of a folder, to be used in `double_precision`.

  Its parameters are float32 numbers, and none has a value that hides it, such as 0 for a bias.
  """
  config = transformers.AutoConfig.from_pretrained(folder)
  model = transformers.AutoModelForCausalLM.from_config(
    config, dtype=torch.float64, attn_implementation='eager'
  )
  rng = np.random.default_rng(0)
  with torch.no_grad():
    for parameter in model.parameters():
      noise = 0.2 * rng.standard_normal(parameter.shape)
      values = (parameter.numpy() + noise).astype(np.float32)
      parameter.copy_(torch.from_numpy(values.astype(np.float64)))
  return model.eval()


def logits(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
  """Returns the logits of texts [B, L] as [B, L, V]."""
  with torch.no_grad():
    return model(torch.from_numpy(ids)).logits.numpy()


def texts(length: int = LENGTH) -> np.ndarray:
  """Returns random ids [2, L]."""
  return np.random.default_rng(1).integers(0, V, (2, length))


def save(model: torch.nn.Module, folder: pathlib.Path, config: Mapping[str, Any]) -> None:
  """Writes the parameters in float32, by the names of published files, and a config.json."""
  copy.deepcopy(model).to(torch.float32).save_pretrained(folder)
  (folder / 'generation_config.json').unlink(missing_ok=True)
  write_config(folder, config)


def write_stored() -> None:
  """Writes the folders of `STORED`."""
  ids = texts()
  for name, folder_name in STORED.items():
    config_path = checks.external_data() / 'published_configs' / name / 'config.json'
    config = cut(json.loads(config_path.read_text()))
    folder = checks.REFERENCE / 'hf' / folder_name
    write_config(folder, config)
    with double_precision():
      model = build(folder)
      expected = logits(model, ids)
    save(model, folder, config)
    np.savez_compressed(folder / 'expected.npz', input_ids=ids, logits=expected)


if __name__ == '__main__':
  write_stored()
