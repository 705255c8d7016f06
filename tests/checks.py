"""What tests assert with, and the variables that they run models with."""

from collections.abc import Container, Iterable
import gzip
import os
import pathlib
import re
from typing import Any
import zlib

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import command_line, config, errors, sharding


def bad_input(message):
  """Like pytest.raises, for a BadInput that says exactly this."""
  return pytest.raises(errors.BadInput, match=rf'\A{re.escape(message)}\Z')


def assert_close(actual, expected, tolerance):
  """Maximum difference relative to the array maximum, as `tolerance * (1 + max|expected|)`."""
  actual, expected = np.asarray(actual), np.asarray(expected)
  assert actual.shape == expected.shape
  worst = np.abs(actual - expected).max()
  limit = tolerance * (1 + np.abs(expected).max())
  assert worst <= limit, f'differs by {worst:.3g}, limit {limit:.3g}'


def config_file_model(spec):
  """The model of a config file and variant, such as `quickstart.py`."""
  folder = pathlib.Path(__file__).resolve().parents[1] / 'configs'
  return config.resolve(command_line.load_file(f'{folder}/{spec}')).model


def assert_same_arrays(actual, expected, tolerance=1e-6):
  """Arrays of the same names are close."""
  assert set(actual) == set(expected)
  for name, array in expected.items():
    assert_close(actual[name], array, tolerance)


def arrays_of(f, prefix, dtype):
  """The arrays of a reference file below a prefix, without it."""
  return {k.removeprefix(prefix): v.astype(dtype) for k, v in f.items() if k.startswith(prefix)}


def with_scan(precisions):
  """Test parameters: each precision with layers in a row and scanned; only the first is quick."""
  first, *others = [(*precision, scan) for precision in precisions for scan in (False, True)]
  return [first, *(pytest.param(*case, marks=pytest.mark.slow) for case in others)]


def missing_arrays(error):
  """Random arrays of the names and shapes that the error of a loader lists as missing."""
  missing = [line.split(': ')[1] for line in str(error).splitlines()[1:]]
  shapes = {line.split(' ')[0]: eval(line.split(' ', 1)[1]) for line in missing}
  rng = np.random.default_rng(0)
  return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def random_variables(module, *inputs, dtype='float32', **given):
  """Random values for all variables of a module, scales and biases too; compiles nothing."""
  shapes = jax.eval_shape(lambda: nn.unbox(module.init(jax.random.key(0), *inputs, **given)))
  rng = np.random.default_rng(0)

  def random(leaf):
    if jnp.issubdtype(leaf.dtype, jnp.integer):
      return jnp.asarray(rng.integers(0, len(leaf), leaf.shape), leaf.dtype)
    return jnp.asarray(0.5 * rng.normal(size=leaf.shape), dtype)

  return jax.tree.map(random, shapes)


def rest_is_slow(values: Iterable[Any], quick: Container[Any]) -> list[Any]:
  """Parameters of a test, of which only some are in the quick tier."""
  return [v if v in quick else pytest.param(v, marks=pytest.mark.slow) for v in values]


def rest_is_full(values: Iterable[Any], quick: Container[Any]) -> list[Any]:
  """Parameters of a test, of which only some are in the quick tier, the others in the full one."""
  return [v if v in quick else pytest.param(v, marks=pytest.mark.full) for v in values]


def full(*values: Any) -> Any:
  """The parameters of one case of a test that only the full tier runs."""
  return pytest.param(*values, marks=pytest.mark.full)


def mesh_of(data: int, fsdp: int = 1, model: int = 1) -> jax.sharding.Mesh:
  """The first devices as a mesh of these sizes."""
  return sharding.make_mesh(data, fsdp, model, jax.devices()[: data * fsdp * model])


# Arrays that official implementations computed, see the README there.
REFERENCE = pathlib.Path(__file__).resolve().parent / 'reference'


def external_data() -> pathlib.Path:
  """The folder of what is not part of the project: NGRAMMER_JAX_TEST_DATA, or `../shared`.

  It has real corpora in `data/`, and may have more reference arrays in `reference/`, and configs of
  published checkpoints in `published_configs/`.
  """
  beside = pathlib.Path(__file__).resolve().parents[2] / 'shared'
  return pathlib.Path(os.environ.get('NGRAMMER_JAX_TEST_DATA', beside))


def reference_files(pattern: str) -> dict[str, pathlib.Path]:
  """Files of reference arrays by name, of this repository and of `external_data`."""
  files = {}
  for folder in (external_data() / 'reference', REFERENCE):
    files |= {path.stem: path for path in sorted(folder.glob(f'{pattern}.npz'))}
  return files


def smollm2_expected() -> dict[str, Any]:
  """What SmolLM2 computes of texts; that of enwik8 only where the corpus is."""
  expected = dict(np.load(REFERENCE / 'hf' / 'smollm2_expected.npz'))
  for name in ('english', 'python'):
    expected[f'ids_crc32/{name}'] = zlib.crc32(expected[f'ids/{name}'])
  corpus = external_data() / 'data' / 'enwik8.gz'
  if corpus.exists():
    with gzip.open(corpus) as file:
      file.seek(94_000_000)
      expected['text/enwik8'] = file.read(2500).decode()
  return expected


def data_root(name: str) -> pathlib.Path:
  """A folder of real data that is not part of the project, or skip."""
  root = external_data()
  if not (root / name).is_dir():
    pytest.skip(f'{name}/ not found: set NGRAMMER_JAX_TEST_DATA to the folder that holds it')
  return root / name
