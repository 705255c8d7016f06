"""Small programs of the package, compiled for a TPU without one, in one process."""

import json

import pytest

from tests import test_compile

pytestmark = pytest.mark.slow

SETUP = """
import json, runpy, sys
sys.path.insert(0, 'launch')
slice_devices = runpy.run_path('launch/compile.py')['slice_devices']
import hlo, jax, jax.numpy as jnp
from ngrammer_jax import sharding
mesh = sharding.make_mesh(1, 1, 1, slice_devices('v5e:2x2', 1)[:1])
place = jax.sharding.NamedSharding(mesh, jax.P())
"""
# Prints the largest number of executions of an instruction, of sums of clusters.
CODEBOOK = """
from ngrammer_jax.layers.ngram import quantizer
arrays = ((1, 512, 2, 128), jnp.float32), ((1, 512, 2), jnp.int32)
arrays = [jax.ShapeDtypeStruct(*array, sharding=place) for array in arrays]
times = {}
for K in (64, 8192):
  with sharding.use(mesh):
    sums = jax.jit(lambda x, ids: quantizer.cluster_statistics(x, ids, K))
    text = sums.lower(*arrays).compile().as_text()
  times[K] = max(work.times for work in hlo.Program(text, dict(mesh.shape)).work)
print(json.dumps(times))
"""


# Prints how often each Pallas kernel runs in a step of a Transformer of two layers.
BLOCKS = """
from flax import linen as nn
from ngrammer_jax.config import model as model_config
from ngrammer_jax.models import language_model
sizes = {'layers': 2, 'width': 256, 'heads': 2, 'feed_forward_width': 256, 'remat': 'minimal'}
config = model_config.ModelConfig(**sizes, dtype='bfloat16', scan_layers=True)
model = language_model.build(config, 256)
tokens = jax.ShapeDtypeStruct((1, 512), jnp.int32, sharding=place)

def loss(params, tokens):
  hidden, *_ = model.apply({'params': params}, tokens, model.empty_memory(1), train=True)
  return model.apply({'params': params}, hidden, tokens, method='scores').nll_BxT.sum()

make = lambda: nn.unbox(
  model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32), model.empty_memory(1))
)
params = jax.tree.map(
  lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
  jax.eval_shape(make)['params'],
)
with sharding.use(mesh):
  text = jax.jit(jax.grad(loss)).trace(params, tokens).lower().compile().as_text()
kernels = {}
for work in hlo.Program(text, dict(mesh.shape)).work:
  if work.opcode == 'tpu_custom_call':
    name = work.name.split('_segmented')[0]
    kernels[name] = kernels.get(name, 0) + work.times
print(json.dumps(kernels))
"""


# Prints how a step stores the table of an n-gram memory, and whether an instruction copies it.
TABLE = """
import re
from ngrammer_jax import config as experiment
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.training import programs
memory = NGramMemoryConfig(join='sum', hash='polynomial', projection=True, orders=(2,), heads=1,
  rows=(8192,), row_multiple=64, width=32, exchange='table')
sizes = dict(layers=1, width=128, heads=1, feed_forward_width=128, dtype='bfloat16', ngram=None)
config = experiment.Config(
  model=model_config.ModelConfig(**sizes, ngram_memories=(memory,)),
  training=experiment.TrainingConfig(steps=1, batch_size=1, segment_length=128),
)
traced, _ = programs.Programs(config, 256, mesh).trace_program('train')
with sharding.use(mesh):
  text = traced.lower().compile().as_text()
V, E = 8256 // 4, 128
layouts = set(re.findall(rf'f32\\[{V},{E}\\]\\{{([^}}S]*)', text))  # S(1): on the chip
copies = [
  work.name
  for work in hlo.Program(text, dict(mesh.shape)).work
  if work.opcode in ('copy', 'transpose', 'reshape') and work.bytes > 4 * V * E
]
scopes = {*re.findall(r'TransformerLM\\.(\\w+)', text)}
print(json.dumps([sorted(layouts), 'f32[8256,32]' in text, copies, sorted(scopes)]))
"""


# Prints the collectives of a step with product keys on four times four devices.
PRODUCT_KEYS = """
from ngrammer_jax.config.product_memory import ProductMemoryConfig
mesh = sharding.make_mesh(4, 4, 1, slice_devices('v5e:4x4', 1))
memory = ProductMemoryConfig(layers=(0,), sub_keys=64, heads=2, key_width=128, swilu=True)
config = experiment.Config(
  model=model_config.ModelConfig(**sizes | {'width': 256}, product_memory=memory),
  training=experiment.TrainingConfig(steps=1, batch_size=16, segment_length=128),
  mesh=experiment.MeshConfig(data=4, fsdp=4),
)
traced, _ = programs.Programs(config, 256, mesh).trace_program('train')
program = hlo.Program(traced.lower().compile().as_text(), dict(mesh.shape))
print(json.dumps([(each.kind, each.axes, each.shape) for each in program.collectives()]))
"""


@pytest.fixture(scope='module')
def printed():
  """What each program printed."""
  process = test_compile.run('-c', SETUP + CODEBOOK + BLOCKS + TABLE + PRODUCT_KEYS, script=())
  assert process.returncode == 0, process.stderr
  return [json.loads(line) for line in process.stdout.splitlines()[-4:]]


def test_sums_of_clusters_are_no_loop_over_tokens(printed):
  assert printed[0] == {'64': 1, '8192': 1}


def test_attention_runs_once_in_each_direction(printed):
  """What its backward pass needs is kept, not computed again."""
  assert printed[1] == {'splash_mha_fwd': 2, 'splash_mha_dq': 2, 'splash_mha_dkv': 2}


def test_narrow_tables_lie_along_the_lanes(printed):
  """Rows of 32 values: a step looks up, and changes, four of them side by side."""
  layouts, is_unpacked, copies, _ = printed[2]
  assert (layouts, is_unpacked, copies) == (['1,0:T(8,128)'], False, [])


def test_parts_of_the_step_have_the_names_that_are_counted(printed):
  """See `PARTS` of launch/model_parts.py."""
  assert {'scores', 'embed'} <= set(printed[2][3])


def test_values_of_product_keys_stay_where_they_are(printed):
  """Devices exchange what belongs to tokens, and sum the gradients of the same values."""
  shard = f'f32[{64**2 // 4},256]'
  moved = [(kind, axes) for kind, axes, shape in printed[3] if shard in shape]
  assert moved == [('all-reduce', ['data'])]
  assert not any(f'[{64**2},256]' in shape for _, _, shape in printed[3])
