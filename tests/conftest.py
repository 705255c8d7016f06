"""Eight simulated devices, and no accelerator unless one is asked for."""

import os
import pathlib
import re
import shutil
import signal
import tempfile

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['XLA_FLAGS'] = (
  os.environ.get('XLA_FLAGS', '')
  + ' --xla_force_host_platform_device_count=8'
  + ' --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true'  # tiny programs
)
# Tests compile the same tiny programs over and over, some in processes of their own.
COMPILED = pathlib.Path(tempfile.gettempdir()) / f'ngrammer_jax-compiled-{os.getuid()}'
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(COMPILED))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.2')

from flax import linen as nn  # noqa: E402  the flags above come first
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from ngrammer_jax import errors  # noqa: E402

# A shell in the background ignores Ctrl-C, and so would all that is started here.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def x64():
  """Double precision for one test."""
  with jax.enable_x64(True):
    yield


def data_root(name: str) -> pathlib.Path:
  """A folder of real data that is not part of the project, or skip.

  NGRAMMER_JAX_TEST_DATA names a folder with `data/` (corpora) and `reference/` (arrays
  computed with the official implementations); `../shared` is taken if it is there.
  """
  beside = pathlib.Path(__file__).resolve().parents[2] / 'shared'
  root = pathlib.Path(os.environ.get('NGRAMMER_JAX_TEST_DATA', beside))
  if not (root / name).is_dir():
    pytest.skip(f'{name}/ not found: set NGRAMMER_JAX_TEST_DATA to the folder that holds it')
  return root / name


@pytest.fixture
def reference():
  """Loads a file of reference arrays by name."""
  root = data_root('reference')
  return lambda name: dict(np.load(root / f'{name}.npz'))


@pytest.fixture
def corpora():
  """The folder of real corpora."""
  return data_root('data')


@pytest.fixture
def cache(tmp_path, monkeypatch):
  """An empty folder for tokenised corpora, instead of the user's own."""
  monkeypatch.setenv('NGRAMMER_JAX_CACHE', str(tmp_path / 'cache'))
  yield tmp_path / 'cache'
  shutil.rmtree(tmp_path / 'cache', ignore_errors=True)  # pytest keeps the rest for a while


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


def random_variables(module, *inputs, dtype='float32', **given):
  """Random values for all variables of a module, scales and biases too; compiles nothing."""
  shapes = jax.eval_shape(lambda: nn.unbox(module.init(jax.random.key(0), *inputs, **given)))
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape), dtype), shapes)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
  """Makes configs of a tiny N-Grammer on a tiny text; keyword arguments replace whole sections."""
  from ngrammer_jax import config as experiment
  from ngrammer_jax import evaluation_config
  from ngrammer_jax.data import token_cache
  from ngrammer_jax.models import config as model_config

  monkeypatch.setenv('NGRAMMER_JAX_CACHE', str(tmp_path / 'cache'))
  text = tmp_path / 'text.txt'
  words = np.random.RandomState(0).choice(['the', 'union', 'of', 'states', 'is\n', 'strong'], 4000)
  text.write_text(' '.join(words))

  def make(model=(), optimizer=(), training=(), **sections):
    ngram = model_config.NGramConfig(clusters=8, vocabulary_size=64, dim=4)
    model = {'layers': 2, 'width': 16, 'heads': 2, 'feed_forward_width': 32, 'ngram': ngram} | dict(
      model
    )
    training = {
      'steps': 12,
      'batch_size': 8,
      'segment_length': 16,
      'segments_per_call': 2,
      'log_every': 2,
      'evaluate_every': 6,
      'checkpoint_every': 4,
    } | dict(training)
    return experiment.Config(
      model=model_config.ModelConfig(**model),
      data=token_cache.DataConfig(corpus='text', path=str(text), vocabulary='bytes'),
      optimizer=experiment.OptimizerConfig(**{'warmup_steps': 2} | dict(optimizer)),
      training=experiment.TrainingConfig(**training),
      **{'evaluation': evaluation_config.EvaluationConfig(streams=4)} | sections,
    )

  return make
