"""The train state and its creation."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from flax import linen as nn
from flax import struct, traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ngrammer_jax import host_arrays, sharding
from ngrammer_jax.layers.ngram import host_rows, table
from ngrammer_jax.models import (
  host_tables,
  initialization,
  language_model,
  model_variables,
  parameter_groups,
  table_drawing,
  width_rule,
)
from ngrammer_jax.optimizers import zero

# All random parameters in one kernel would take minutes to compile.
GPU_OPTIONS = {'xla_disable_hlo_passes': 'multi_output_fusion'}

# They treat every value alone, or know how many rows are in a packed one.
PACKED_OPTIMIZERS = 'adagrad', 'row_adagrad', 'adam'
PACKED_PLATFORMS = ('tpu',)


class TrainState(struct.PyTreeNode):
  """The values changed by a training step.

  Attributes:
    step: number of updates so far, int32.
    params: parameters, trained by gradient.
    codebook: centroids and their statistics, trained by k-means.
    opt_state: state of the optimizer.
    memory: memory of the model, carried from segment to segment, one row per stream.
  """

  step: jax.Array
  params: Any
  codebook: Any
  opt_state: Any
  memory: Any

  @property
  def variables(self) -> dict[str, Any]:
    """The variables of the model."""
    return {'params': self.params, 'codebook': self.codebook}


def make_initializer(
  model: language_model.LanguageModel,
  variables: dict[str, Any],
  optimizer: optax.GradientTransformation,
  batch_size: int,
  seed: int,
  mesh: jax.sharding.Mesh,
  frozen: Mapping[str, np.dtype] | None = None,
  replaced: Collection[str] = (),
  is_split: bool = False,
  width_factors: width_rule.WidthFactors | None = None,
) -> tuple[Callable[[], TrainState], TrainState]:
  """Returns a function for the initial state, and the abstract state.

  The function takes no arguments; the state is sharded. The abstract state has shapes, dtypes and
  shardings, for restoring a checkpoint.

  Args:
    model, optimizer: model and optimizer of the run.
    variables: see `models.model_variables.abstract`.
    batch_size: rows of the memory.
    seed: seed of the parameters.
    mesh: device mesh.
    frozen: dtype of every frozen parameter, by name. Frozen parameters have no optimizer state.
    replaced: names of parameters replaced by another run, initially 0.
    is_split: whether the optimizer state is split over `data`, see `optimizers.zero`.
    width_factors: factors of the initial values, see `models.width_rule`.
  """
  frozen = frozen or {}

  def make_state(variables):
    params = variables['params']
    if model.config.initial is not None:
      key = jax.random.fold_in(jax.random.key(seed), 1)
      params = initialization.reinitialize(model.config.initial, params, key)
    if width_factors is not None:
      params = width_rule.scale_initial(model.config, width_factors, params)
    params = _zero_replaced_params(params, replaced, frozen)
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      codebook=variables.get('codebook', {}),
      opt_state=optimizer.init(parameter_groups.without(params, frozen)),
      memory=language_model.empty_memory(model.config, batch_size),
    )

  shapes = jax.eval_shape(make_state, variables)
  shardings = sharding.shardings(shapes, mesh)
  rows = sharding.rows_sharding(mesh)
  shardings = shardings.replace(memory=jax.tree.map(lambda _: rows, shardings.memory))
  if is_split:
    shardings = shardings.replace(opt_state=zero.split(shapes.opt_state, shardings.opt_state))

  def with_sharding(
    leaf: jax.ShapeDtypeStruct, leaf_sharding: jax.sharding.Sharding
  ) -> jax.ShapeDtypeStruct:
    return leaf.update(sharding=leaf_sharding)

  abstract = jax.tree.map(with_sharding, nn.unbox(shapes), shardings)

  def create() -> TrainState:
    def init() -> tuple[TrainState, Any]:
      variables = model_variables.init(model, batch_size, seed)
      keys = variables.get(host_rows.KEYS, {})
      # The state of each row of a table in host memory starts alike: devices make one row.
      return nn.unbox(make_state(host_tables.with_one_row(model.config, variables))), keys

    def on_devices(leaf_sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
      return leaf_sharding.with_memory_kind('device')

    options = None
    if mesh.devices.flat[0].platform == 'gpu':
      options = GPU_OPTIONS
    outputs = jax.tree.map(on_devices, shardings), sharding.replicated(mesh)
    with sharding.use(mesh):
      state, keys = jax.jit(init, out_shardings=outputs, compiler_options=options)()
    return table_drawing.create(model, state, abstract, keys, replaced)

  return create, abstract


def _zero_replaced_params(
  params: Any, replaced: Collection[str], frozen: Mapping[str, np.dtype]
) -> Any:
  """Returns parameters: 0 if replaced by another run, frozen ones in their dtypes.

  Args:
    params: the parameters, boxed or not.
    replaced: names of parameters replaced by another run.
    frozen: dtype of every frozen parameter, by name.
  """

  def convert(path: tuple[str, ...], leaf: Any) -> Any:
    name = '/'.join(path)
    if name in replaced:
      leaf = jax.tree.map(jnp.zeros_like, leaf)
    return jax.tree.map(lambda x: x.astype(frozen.get(name, x.dtype)), leaf)

  return traverse_util.path_aware_map(convert, params)


def pack_tables(abstract: TrainState, labels: Any, optimizers: Mapping[str, str]) -> TrainState:
  """Returns an abstract state with packed narrow tables and optimizer state.

  See `layers.ngram.table`. Not packed: frozen tables, tables with an optimizer or rounding by row,
  and tables or shards without a whole number of packed rows.

  Args:
    abstract: the abstract state.
    labels: label of every trained parameter.
    optimizers: name of the optimizer of each label of tables.
  """
  params = traverse_util.flatten_dict(abstract.params, sep='/')
  packed_shapes = {}
  for name, label in traverse_util.flatten_dict(labels, sep='/').items():
    if optimizers.get(label) in PACKED_OPTIMIZERS and params[name].dtype != jnp.bfloat16:
      packed_shapes[name] = params[name].shape

  def table_shape(name: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Returns the table shape of a leaf: a table, or the optimizer state of one."""
    for table_name, (V, E) in packed_shapes.items():
      if f'/{name}'.endswith(f'/{table_name}') and shape in ((V, E), (V, 1)):
        return V, E
    return None

  def pack(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    shape = table_shape(sharding.leaf_name(path), leaf.shape)
    if shape is None or host_arrays.is_on_host(leaf):
      return leaf
    V, E = shape
    shard_rows, _ = leaf.sharding.shard_shape(leaf.shape)
    packed_rows, packed_width = table.packed_shape(V, E)
    if table.packed_shape(shard_rows, E)[1] != packed_width:  # no whole number of packed rows
      return leaf
    return leaf.update(shape=(packed_rows, V * leaf.shape[1] // packed_rows))

  return abstract.replace(
    params=jax.tree_util.tree_map_with_path(pack, abstract.params),
    opt_state=jax.tree_util.tree_map_with_path(pack, abstract.opt_state),
  )


def reshape_tables(state: TrainState, like: TrainState, delete: bool = False) -> TrainState:
  """Returns a state with the shapes of another one, abstract or not, packed or not.

  Args:
    state: the state.
    like: the other one.
    delete: delete each reshaped array, so that at most one array exists twice at a time.
  """

  def reshape(leaf: jax.Array, like: Any) -> jax.Array:
    if leaf.shape == like.shape:
      return leaf
    new = jax.jit(jnp.reshape, static_argnums=1, out_shardings=like.sharding)(leaf, like.shape)
    if delete:
      jax.block_until_ready(new)
      leaf.delete()
    return new

  params = jax.tree.map(reshape, state.params, like.params)
  opt_state = jax.tree.map(reshape, state.opt_state, like.opt_state)
  return state.replace(params=params, opt_state=opt_state)
