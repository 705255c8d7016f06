"""Small programs of the package, compiled for a TPU without one."""

import json

from tests import test_compile

# Prints the largest number of executions of an instruction, of sums of clusters.
CODEBOOK = """
import json, runpy, sys
sys.path.insert(0, 'launch')
slice_devices = runpy.run_path('launch/compile.py')['slice_devices']
import hlo, jax, jax.numpy as jnp
from ngrammer_jax import sharding
from ngrammer_jax.layers.ngram import quantizer
mesh = sharding.make_mesh(1, 1, 1, slice_devices('v5e:2x2', 1)[:1])
place = jax.sharding.NamedSharding(mesh, jax.P())
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


def test_sums_of_clusters_are_no_loop_over_tokens():
  process = test_compile.run('-c', CODEBOOK, script=())
  assert process.returncode == 0, process.stderr
  assert json.loads(process.stdout.splitlines()[-1]) == {'64': 1, '8192': 1}
