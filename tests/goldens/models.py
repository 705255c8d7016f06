"""Three segments of a drawn config: hidden states, memory, codebook, loss and gradients, projected.

B batch, T segment length, V vocabulary.
"""

import json
import pathlib
from typing import Any
import zlib

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import ngrammer_jax

FOLDER = pathlib.Path(__file__).parent
PROJECTIONS = 8
SEGMENTS, B, T, V = 3, 3, 6, 23


def cases() -> dict[str, dict[str, Any]]:
  """The drawn configs by name: `model`, a section of a config, and `prefix`."""
  return json.loads((FOLDER / 'models.json').read_text(encoding='utf-8'))


def options(case: dict[str, Any], path: str = '') -> list[str]:
  """Every option of a case with its value, of blocks those inside."""
  found = []
  for key, value in case.items():
    if key == 'quick':  # which is no option
      continue
    if isinstance(value, dict):
      found += [f'{path}{key}', *options(value, f'{path}{key}.')]
    elif key == 'pairing':
      found += [f'{path}{key}={one}' for one in sorted(set(value))]
    else:
      found.append(f'{path}{key}={value}')
  return found


def workdir_of(model: dict[str, Any], folder: pathlib.Path) -> pathlib.Path:
  """A folder that `load_run` opens, with a config and a vocabulary of V words."""
  words = ['<unk>', '<eos>', *(f'word{i}' for i in range(V - 2))]
  data = {'corpus': 'text', 'path': 'text.txt', 'vocabulary': 'words'}
  (folder / 'config.json').write_text(json.dumps({'model': model, 'data': data}))
  (folder / 'vocabulary.json').write_text(json.dumps({'kind': 'words', 'words': words}))
  return folder


def compute(case: dict[str, Any], folder: pathlib.Path) -> dict[str, np.ndarray]:
  """Projections by name, of one compiled program. Needs float64."""
  model = ngrammer_jax.load_run(workdir_of(case['model'], folder)).model
  memory = model.empty_memory(B)
  tokens, starts, valid, prefix = inputs()
  given = {'starts_BxT': starts, 'valid_BxT': valid, 'prefix_BxT': prefix}
  if not case['prefix']:
    del given['prefix_BxT']
  variables = drawn_variables(model, memory)

  def segment(params, carry, inputs):
    memory, codebook = carry
    tokens, key, given = inputs
    (hidden, memory, aux), learned = model.apply(
      {'params': params, 'codebook': codebook},
      tokens[:, :-1],
      memory,
      **given,
      train=True,
      rngs={'dropout': key},
      mutable=['codebook'],
    )
    scores = model.apply({'params': params}, hidden, tokens[:, 1:], method='scores')
    nll = jnp.where(given['valid_BxT'] > 0, scores.nll_BxT, 0)
    carry = memory, learned.get('codebook', codebook)
    return carry, (hidden, nll, sum(aux.values(), 0.0))

  def loss(params):
    carry = memory, variables['codebook']
    keys = jax.random.split(jax.random.key(0), SEGMENTS)
    step = lambda carry, inputs: segment(params, carry, inputs)
    (last, codebook), (hidden, nll, aux) = jax.lax.scan(step, carry, (tokens, keys, given))
    return nll.sum() / given['valid_BxT'].sum() + aux.sum(), (hidden, nll, last, codebook)

  (total, (hidden, nll, last, codebook)), gradient = jax.jit(
    jax.value_and_grad(loss, has_aux=True)
  )(variables['params'])
  hidden = np.where(given['valid_BxT'][..., None] > 0, hidden, 0)
  found = {'loss': projected(total), 'hidden': projected(hidden), 'nll': projected(nll)}
  found['memory'] = sum(map(features, jax.tree.leaves(last)))
  for name, tree in (('gradient', gradient), ('codebook', codebook)):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
      found[f'{name}/{path_of(path)}'] = projected(leaf)
  return found


def differing(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
  """How far projections differ, of those that are not equal up to rounding, by name."""
  assert set(found) == set(expected)
  differences = {key: np.abs(found[key] - values).max() for key, values in expected.items()}
  is_close = lambda key: differences[key] <= 1e-10 * np.abs(expected[key]).max() + 1e-12
  return {key: value for key, value in differences.items() if not is_close(key)}  # and NaN


def golden(name: str) -> dict[str, np.ndarray]:
  """What `compute` gave when the goldens were made."""
  with np.load(FOLDER / 'models.npz') as arrays:
    return dict(zip(str(arrays[f'{name}/names']).split('\n'), arrays[name], strict=True))


def inputs() -> tuple[np.ndarray, ...]:
  """Tokens [SEGMENTS, B, T + 1], and where documents start, what is no padding, and prefixes."""
  rng = np.random.default_rng(0)
  stream = rng.integers(0, V, (B, SEGMENTS * T + 1)).astype(np.int32)
  tokens = np.stack([stream[:, i * T : i * T + T + 1] for i in range(SEGMENTS)])
  starts, valid = np.zeros((2, SEGMENTS, B, T), np.int32)
  starts[0, 0, 0] = starts[0, 1, 3] = starts[1, 1, 0] = starts[1, 2, [1, 2]] = 1
  valid[:] = 1
  valid[0, 2, 4:] = valid[1, 1, 5:] = valid[2, 2, 1:] = 0
  prefix = np.zeros_like(starts)
  prefix[0, 0, :3] = prefix[1, 2, :2] = 1
  return tokens, starts > 0, valid, prefix > 0


def path_of(path: Any) -> str:
  """The name of a leaf: keys joined by slashes."""
  return '/'.join(str(key.key) for key in path)


def drawn_variables(model: Any, memory: Any) -> dict[str, Any]:
  """Parameters and codebook from their own paths, whatever `init` draws."""
  tokens = np.zeros((B, T), np.int32)
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens, memory))

  def draw(path, leaf):
    name = path_of(path)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if name.endswith('/span/span'):
      return rng.uniform(0.2, 0.8, leaf.shape)  # a fraction of the limit
    if name.endswith('/usage'):
      usage_NxK = rng.uniform(0.01, 1, leaf.shape)
      return usage_NxK / usage_NxK.sum(axis=-1, keepdims=True)
    return rng.normal(0, 0.5, leaf.shape) + name.endswith('/scale')

  return {'codebook': {}} | jax.tree_util.tree_map_with_path(draw, nn.unbox(shapes))


def projected(array: Any) -> np.ndarray:
  """Fixed random projections of an array, by its shape."""
  array = np.asarray(array, np.float64)
  rng = np.random.default_rng(zlib.crc32(str(array.shape).encode()))
  return np.stack([(rng.normal(size=array.shape) * array).sum() for _ in range(PROJECTIONS)])


def features(array: Any) -> np.ndarray:
  """Fixed random functions of the values of an array of floats, summed; of zeros they are zero.

  How a memory is arranged is free: its values are held, as a set.
  """
  if not jnp.issubdtype(array.dtype, jnp.floating):
    return np.zeros(PROJECTIONS)
  rng = np.random.default_rng(1)
  return np.stack([np.sin(w * np.asarray(array)).sum() for w in rng.normal(size=PROJECTIONS)])
