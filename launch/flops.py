"""FLOPs of a program, counted in its jaxpr: they depend on neither compiler nor device."""

import math

from jax.extend import core


def matrix_flops(jaxpr: core.Jaxpr) -> float:
  """Counts the FLOPs of all matrix products, including rematerialized ones.

  A multiply-add counts as two. Of a conditional the most expensive branch counts; a loop with an
  unknown trip count counts as one iteration.
  """
  total = 0.0
  for equation in jaxpr.eqns:
    name = equation.primitive.name
    inner = [matrix_flops(inner_jaxpr) for inner_jaxpr in core.jaxprs_in_params(equation.params)]
    if name == 'dot_general':
      (contracting_axes, _), _ = equation.params['dimension_numbers']
      lhs_shape = equation.invars[0].aval.shape
      contracted = math.prod(lhs_shape[axis] for axis in contracting_axes)
      total += 2.0 * math.prod(equation.outvars[0].aval.shape) * contracted
    elif name == 'scan':
      total += equation.params['length'] * sum(inner)
    elif name == 'pallas_call':  # all blocks, including those that a mask skips
      total += math.prod(equation.params['grid_mapping'].grid) * sum(inner)
    else:
      total += max(inner, default=0.0) if name == 'cond' else sum(inner)
  return total
