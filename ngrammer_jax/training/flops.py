"""FLOPs of a model, counted in the jaxpr of its forward pass, and the peak FLOP/s of devices.

  G(T) = s + a T + b T (M + T)

B batch, T segment length, M memory length; G is the cost of a segment of T tokens, s the cost per
segment (keys and values of the memory), a the cost per token, and b the cost per pair of query and
key. G(T), G(T - 1) and G(T - 2) are counted and determine s, a and b.
"""

import dataclasses
import math
import re
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from ngrammer_jax import sharding
from ngrammer_jax.models import language_model

# Dense bfloat16 FLOP/s of one JAX device, from the vendors' data sheets.
PEAK_FLOPS = {
  'TPU v2': 22.5e12,
  'TPU v3': 61.5e12,
  'TPU v4': 275e12,
  'TPU v5 lite': 197e12,
  'TPU v5e': 197e12,
  'TPU v5': 459e12,
  'TPU v5p': 459e12,
  'TPU v6 lite': 918e12,
  'TPU v6e': 918e12,
  'NVIDIA A100': 312e12,
  'NVIDIA H100': 989e12,
  'NVIDIA H200': 989e12,
  'NVIDIA L4': 121e12,
  'Tesla T4': 65e12,
  'Tesla V100': 125e12,
}


@dataclasses.dataclass(frozen=True)
class ModelFlops:
  """FLOPs of the matrix products of a model, a multiply-add as two, without rematerialisation.

  A causal query attends to half of its segment on average, and to the memory; with a fixed window,
  to M tokens. A training step counts as three forward passes, also for products without a gradient,
  such as the distances of k-means.

  Attributes:
    per_segment: s, for one row.
    per_token: a.
    per_key: b.
    length: T.
    memory: M.
    is_window: whether every query attends to the M tokens before it.
  """

  per_segment: float
  per_token: float
  per_key: float
  length: int
  memory: int = 0
  is_window: bool = False

  def forward(self, spans: np.ndarray | float = math.inf) -> np.ndarray:
    """Returns the FLOPs of one token's forward pass.

    Args:
      spans: mean span of the heads of each layer, in tokens, [..., layers]; keys beyond it are
        free.
    """
    M = self.memory
    T = self.length
    if np.ndim(spans):
      span = np.minimum(spans, M).mean(axis=-1)
    else:
      span = min(spans, M)
    keys = span if self.is_window else M + T / 2
    share_of_memory = span / M if M else 1
    return self.per_token + self.per_key * keys + self.per_segment * share_of_memory / T


def count(
  model: language_model.LanguageModel, variables: dict[str, Any], batch_size: int, length: int
) -> ModelFlops:
  """Counts the FLOPs of a model without running it. Attention counts with full scores.

  Args:
    model: the model.
    variables: its variables, abstract or not.
    batch_size: B; the rows share the cost of distance encodings.
    length: T.
  """
  # In a scan over layers, the intermediates of a layer are not asked for.
  config = dataclasses.replace(model.config, scan_layers=False)
  model = language_model.build(config, model.vocabulary_size)
  memory = jax.eval_shape(lambda: language_model.empty_memory(config, batch_size))
  # Without shardings: a lookup in host memory cannot be traced.
  variables = sharding.abstract(variables, None)

  def forward(variables, memory, tokens_BxT):
    # Asking for the probabilities selects full attention.
    (hidden_BxTxD, *_), _ = model.apply(variables, tokens_BxT, memory, mutable='intermediates')
    return model.apply(variables, hidden_BxTxD, tokens_BxT, method='scores')

  def count_segment(T: int) -> float:
    tokens_BxT = jax.ShapeDtypeStruct((batch_size, T), jnp.int32)
    return matrix_flops(jax.make_jaxpr(forward)(variables, memory, tokens_BxT)) / batch_size

  segment_memory = model.config.memory
  M = 0
  if segment_memory is not None:
    M = segment_memory.length
  T = max(length, 3)
  G0, G1, G2 = (count_segment(T - i) for i in range(3))
  b = (G0 - 2 * G1 + G2) / 2
  a = G0 - G1 - b * (M + 2 * T - 1)
  s = G0 - a * T - b * T * (M + T)
  is_window = M > 0 and segment_memory.window() is not None
  return ModelFlops(s, a, b, length, M, is_window)


def matrix_flops(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> int:
  """Counts the FLOPs of all matrix products of a program, including rematerialised ones.

  A multiply-add counts as two. A conditional counts as its most expensive branch, a platform switch
  as its cheapest; a loop with unknown trip count counts as one iteration.
  """
  return sum(equation_flops(equation) for equation in jaxpr.eqns)


def equation_flops(equation: core.JaxprEqn) -> int:
  """Counts the FLOPs of the matrix products of an equation, see `matrix_flops`."""
  name = equation.primitive.name
  inner = [matrix_flops(inner_jaxpr) for inner_jaxpr in core.jaxprs_in_params(equation.params)]
  if name == 'dot_general':
    (contracting_axes, _), _ = equation.params['dimension_numbers']
    lhs_shape = equation.invars[0].aval.shape
    contracted = math.prod(lhs_shape[axis] for axis in contracting_axes)
    return 2 * math.prod(equation.outvars[0].aval.shape) * contracted
  if name == 'scan':
    return equation.params['length'] * sum(inner)
  if name == 'pallas_call':  # all blocks, including masked ones
    return math.prod(equation.params['grid_mapping'].grid) * sum(inner)
  if name == 'cond':
    is_by_platform = equation.params.get('branches_platforms') is not None
    if is_by_platform:
      return min(inner)
    return max(inner, default=0)
  return sum(inner)


def kernel_flops(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> dict[tuple, float]:
  """Counts the FLOPs of one execution of each Pallas kernel of a program on its device.

  The keys have the name of the kernel and the axes of its results. Splash attention is causal here
  and only counts blocks on and below the diagonal; other kernels count all blocks.
  """
  flops_by_kernel: dict[tuple, float] = {}
  for equation in jaxpr.eqns:
    for inner_jaxpr in core.jaxprs_in_params(equation.params):
      flops_by_kernel |= kernel_flops(inner_jaxpr)
    if equation.primitive.name == 'pallas_call':
      name = equation.params['name']
      share = 1
      if f'{name}'.startswith('splash_mha'):
        blocks = equation.params['grid_mapping'].grid[-1]
        share = (blocks + 1) / (2 * blocks)
      shapes = (variable.aval.shape for variable in equation.outvars)
      flops_by_kernel[name, *shapes] = share * equation_flops(equation)
  return flops_by_kernel


def peak_flops(kind: str) -> float | None:
  """Returns the peak of a device kind. A suffix is ignored, as in A100-SXM4-40GB."""
  names = [name for name in PEAK_FLOPS if re.match(rf'{re.escape(name)}($|-| \d| [A-Z])', kind)]
  if not names:
    return None
  return PEAK_FLOPS[max(names, key=len)]
