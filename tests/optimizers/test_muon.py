"""Muon equals Keller Jordan's code on the matrices of blocks; Adam trains all other weights."""

import dataclasses
import json
import re
import shutil

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax import sharding
from ngrammer_jax.config.mesh import MeshConfig
from ngrammer_jax.models import language_model, model_variables
from ngrammer_jax.optimizers import muon, orthogonalization, partition, weight_decay
from ngrammer_jax.training import flops, loop, programs, trained_parts
from tests import checks, conftest
from tests.checks import bad_input, full, mesh_of
from tests.models import drawn
from tests.optimizers import test_weight_decay
from tests.training.helpers import arrays, records

PLAIN = {'schedule': 'constant', 'warmup_steps': 0, 'clip_norm': None, 'algorithm': 'muon'}
# Axis names and shapes of the kernels of the official matrices, [out, in] there.
KERNELS = (
  (('embed', 'heads', 'kv'), (16, 4, 4)),
  (('heads', 'kv', 'embed'), (4, 6, 8)),
  (('embed', 'mlp'), (8, 24)),
)
# Paths without numbers that Muon trains; everything else is trained by Adam.
MATRICES = r"""
  layer/attention/(query|key|value|out|relative/position)/kernel layer/attention/query_kernel
  layer/feed_forward/(gate|in|out)/kernel layer/ngram_memory/gate/(key|value)/kernel
  layer/ngram_memory/product/(gate|embedding|out)/kernel
  layer/product_memory/(query|swilu|value)/kernel layer/ngram_memory/values/projection"""


def boxed_model(kernels):
  """Kernels in blocks, and an embedding."""
  params = {'embedding': nn.LogicallyPartitioned(np.full((5, 2), 0.5), ('vocab', 'embed'))}
  for i, (names, kernel) in enumerate(kernels):
    params[f'layer_{i}'] = {'out': {'kernel': nn.LogicallyPartitioned(kernel, names)}}
  return params


def train(config, boxed, gradients):
  """The parameters after each step; gradients are trees."""
  mask = weight_decay.mask(config, boxed)
  matrices = muon.find_matrices(boxed)
  optimizer = partition.make(config, 9, partition.labels(boxed), (), mask, matrices)
  update = jax.jit(optimizer.update)
  params = nn.unbox(boxed)
  state = nn.unbox(optimizer.init(boxed))
  for gradient in gradients:
    updates, state = update(gradient, state, params)
    params = jax.tree.map(np.add, params, updates)
    yield params, state


@pytest.mark.parametrize('dtype, tolerance', [('float64', 1e-12), full('float32', 2e-6)])
def test_it_equals_the_official_code(x64, dtype, tolerance):
  """Parameters and momentum of each step, and matrices that are orthogonalised."""
  with np.load(checks.REFERENCE / 'vp_muon.npz') as f:
    official = json.loads(str(f['config']))
    array = {name: f[name].astype(dtype) for name in f.files if name != 'config'}

  def kernel(name, i):
    return array[name].T.reshape(KERNELS[i][1])

  boxed = boxed_model([(names, kernel(f'first/{i}', i)) for i, (names, _) in enumerate(KERNELS)])
  boxed = jax.tree.map(lambda leaf: leaf.astype(dtype), boxed)
  gradients = []
  for t in range(official['steps']):
    gradient = {f'layer_{i}': {'out': {'kernel': kernel(f'gradient/{i}/{t}', i)}} for i in range(3)}
    gradients.append(gradient | {'embedding': np.ones((5, 2), dtype)})
  for t, (params, state) in enumerate(train(experiment.OptimizerConfig(**PLAIN), boxed, gradients)):
    (momentum,) = (s.momentum for s in jax.tree.leaves(state, is_leaf=_is_muon) if _is_muon(s))
    for i in range(3):
      layer = f'layer_{i}'
      for name, tree in (('parameter', params), ('momentum', momentum)):
        expected = kernel(f'{name}/{i}/{t}', i)
        actual = tree[layer]['out']['kernel']
        assert actual.dtype == dtype
        np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)
    adam = 0.5 - 1e-3 * (t + 1)  # of gradients that are always 1
    np.testing.assert_allclose(params['embedding'], adam, rtol=1e-6)
  for i in range(2):
    x = orthogonalization.orthogonalize(
      array[f'matrix/{i}'][None], experiment.MuonConfig(), orthogonalization.StackSharding()
    )
    np.testing.assert_allclose(x[0], array[f'orthogonal/{i}'], rtol=0, atol=10 * tolerance)


def _is_muon(node):
  return isinstance(node, muon.MuonState)


def by_hand(kernel, gradients, config, rate, decay):
  """The matrices of a stack [S, in, out] after all steps, in a loop over matrices."""
  w, m = kernel.copy(), np.zeros_like(kernel)
  for g in gradients:
    m = config.momentum * m + (1 - config.momentum) * g
    u = m
    if config.nesterov:
      u = config.momentum * m + (1 - config.momentum) * g
    for s in range(len(w)):
      x = u[s] / (np.sqrt((u[s] ** 2).sum()) + config.epsilon)
      for _ in range(config.steps):
        a = x.T @ x  # the products of all rows; those of columns give the same
        x = 3.4445 * x + x @ (-4.7750 * a + 2.0315 * a @ a)
      inputs, outputs = x.shape
      scale = {
        'jordan': np.sqrt(max(1, outputs / inputs)),
        'moonlight': 0.2 * np.sqrt(max(inputs, outputs)),
        'none': 1.0,
      }
      w[s] = w[s] * (1 - rate * decay) - rate * scale[config.scale] * x
  return w


@pytest.mark.parametrize(
  'fields, decay',
  [
    ({'scale': 'moonlight', 'steps': 3, 'weight_decay': 0.3}, 0.3),
    full({'scale': 'none', 'nesterov': False, 'momentum': 0.8, 'learning_rate': 0.1}, 0.2),
    full({'epsilon': 0.5}, 0.2),
  ],
)
def test_each_option_equals_the_formula_by_hand(x64, fields, decay):
  """Of kernels that stack matrices, which are orthogonalised one by one."""
  rng = np.random.default_rng(0)
  kernels = (
    (('heads', 'kv', None), rng.normal(size=(3, 4, 4))),
    ((None, 'branches', 'embed'), rng.normal(size=(6, 2, 4))),
    (('mlp', 'embed'), rng.normal(size=(4, 6))),
  )
  to_stack = (lambda x: x, lambda x: x.transpose(1, 0, 2), lambda x: x[None])
  boxed = boxed_model(kernels)
  gradients = [
    jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), nn.unbox(boxed)) for _ in range(3)
  ]
  options = experiment.MuonConfig(**fields)
  config = experiment.OptimizerConfig(**PLAIN, muon=options, weight_decay=0.2)
  *_, (params, _) = train(config, boxed, gradients)
  for i, (_, kernel) in enumerate(kernels):
    of_layer = [to_stack[i](gradient[f'layer_{i}']['out']['kernel']) for gradient in gradients]
    expected = by_hand(to_stack[i](kernel), of_layer, options, options.learning_rate, decay)
    actual = to_stack[i](params[f'layer_{i}']['out']['kernel'])
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)


def test_the_clip_counts_all_dense_weights(x64):
  """As with Adam: the norm of the clip is that of matrices and other weights together."""
  boxed = boxed_model([(('embed', 'mlp'), np.ones((2, 2)))])
  config = experiment.OptimizerConfig(**PLAIN | {'clip_norm': 1e-3})
  gradient = jax.tree.map(lambda leaf: np.full(leaf.shape, 2.0), nn.unbox(boxed))
  *_, (_, state) = train(config, boxed, [gradient])
  (momentum,) = (s.momentum for s in jax.tree.leaves(state, is_leaf=_is_muon) if _is_muon(s))
  norm = 2 * np.sqrt(10 + 4)
  clipped = 2 * 1e-3 / (norm + 1e-6)
  np.testing.assert_allclose(momentum['layer_0']['out']['kernel'], 0.05 * clipped, rtol=1e-9)


@pytest.mark.full
def test_the_matrices_of_blocks_are_those_of_the_table():
  found = set()
  for _, config in test_weight_decay.models():
    if config.recurrent is not None:
      continue
    params = model_variables.abstract(language_model.build(config, drawn.V))['params']
    expected = set()
    for path, _ in jax.tree_util.tree_leaves_with_path(params, is_leaf=sharding.is_boxed):
      name = sharding.leaf_name(path)
      without_numbers = re.sub(r'_\d+', '', name)
      if any(re.fullmatch(pattern, without_numbers) for pattern in MATRICES.split()):
        expected.add(name)
        found.add(without_numbers)
    assert set(muon.find_matrices(params)) == expected
  for pattern in MATRICES.split():
    assert any(re.fullmatch(pattern, path) for path in found), f'no model has {pattern}'


@pytest.mark.parametrize('train', [('head',), ('copy_memory',), ('new',)])
def test_a_run_that_trains_no_matrix_is_refused_before_devices(tiny, train, monkeypatch):
  """Also one of a memory without matrices, such as copies of the document."""
  config = tiny(
    model={'ngram': None, 'layers': 1, 'copy_memory': experiment.CopyMemoryConfig()},
    optimizer={'algorithm': 'muon', 'train': train},
  )
  params = model_variables.abstract(language_model.build(config.model, 256))['params']
  paths = jax.tree_util.tree_leaves_with_path(params, is_leaf=sharding.is_boxed)
  names = {sharding.leaf_name(path) for path, _ in paths}
  source = {name: np.dtype('float32') for name in names if 'copy_memory' not in name}
  config = dataclasses.replace(config, init_from='another')
  for name in ('devices', 'default_backend'):
    monkeypatch.setattr(jax, name, None)  # whoever asks for a device fails
  with bad_input(
    f"optimizer.algorithm='muon' is for the matrices of blocks, and optimizer.train={train} has "
    f"none: use 'adam', or name blocks in optimizer.train"
  ):
    trained_parts.check(config, 256, source)


def test_flops_are_those_of_the_products():
  kernels = [(names, jnp.ones(shape)) for names, shape in KERNELS]
  kernels.append(((None, 'branches', 'embed'), jnp.ones((6, 2, 4))))
  boxed = boxed_model(kernels)
  matrices = muon.find_matrices(boxed)
  params = {name: leaf for name, leaf in nn.unbox(boxed).items() if name != 'embedding'}
  transform = muon.scale_by_muon(experiment.MuonConfig(steps=3), matrices)
  jaxpr = jax.make_jaxpr(transform.update)(params, transform.init(params))
  assert flops.matrix_flops(jaxpr) == muon.flops(matrices, 3) > 0


def test_devices_share_whole_matrices(x64):
  """Two stacks of sharded kernels on eight devices, with the results of one device."""
  mesh = mesh_of(2, 2, 2)
  rng = np.random.default_rng(0)
  kernels = [(('embed', 'mlp'), rng.normal(size=(8, 12))) for _ in range(4)]
  kernels += [(('embed', 'heads', 'kv'), rng.normal(size=(12, 2, 4))) for _ in range(3)]
  boxed = {f'layer_{i}': value for i, value in enumerate(boxed_model(kernels).values()) if i}
  matrices = muon.find_matrices(boxed)
  transform = muon.scale_by_muon(experiment.MuonConfig(), matrices)
  params = nn.unbox(boxed)
  expected, _ = transform.update(params, transform.init(params))
  shardings = sharding.shardings(boxed, mesh)
  with sharding.use(mesh):
    update = jax.jit(transform.update, out_shardings=(shardings, None))
    compiled = update.lower(jax.device_put(params, shardings), transform.init(params)).compile()
    actual, _ = compiled(jax.device_put(params, shardings), transform.init(params))
    on_a_device = muon.flops(matrices, 5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), actual, expected)
  products = re.findall(r'= f64\[([0-9,]+)\][^=]* dot\(', compiled.as_text())
  assert set(products) == {'8,8', '8,12'}  # of whole matrices, one of each stack on a device
  assert len(products) == 2 * 5 * 3
  assert on_a_device == 2 * orthogonalization.flops(1, 8, 12, 5)


def test_the_share_of_a_step_is_that_of_its_flops(tiny):
  """A step with it less one without it."""
  counted = {}
  for algorithm in ('adam', 'muon'):
    config = tiny(model={'layers': 1, 'ngram': None}, optimizer={'algorithm': algorithm})
    run = programs.Programs(config, 64, mesh_of(1))
    traced, _ = run.trace_program('train')
    counted[algorithm] = flops.matrix_flops(traced.jaxpr)
  share = 1 - counted['adam'] / counted['muon']
  assert 0.01 < share < 0.5
  assert run.muon_share(traced) == pytest.approx(share, rel=1e-9)


@pytest.mark.full
@pytest.mark.parametrize('mesh', [MeshConfig(data=2, fsdp=2, model=2), MeshConfig(zero=1)])
def test_a_run_on_eight_devices_is_that_of_one_and_resumes_exactly(tiny, tmp_path, mesh):
  fields = {'algorithm': 'muon', 'weight_decay': 0.1}
  config = tiny(optimizer=fields, mesh=mesh)
  loop.train(config, tmp_path / 'run')
  resumed = shutil.copytree(tmp_path / 'run', tmp_path / 'resumed')
  for step in (8, 12):
    shutil.rmtree(resumed / 'checkpoints' / str(step))
  loop.train(config, resumed)
  assert arrays(resumed) == arrays(tmp_path / 'run')
  with conftest.single_device(pytest.MonkeyPatch()):
    loop.train(tiny(optimizer=fields), tmp_path / 'one')
  for line, expected in zip(records(tmp_path / 'run'), records(tmp_path / 'one'), strict=True):
    assert line == pytest.approx(expected, rel=1e-4)
