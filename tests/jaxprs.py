"""What a traced function is made of."""

from collections.abc import Iterator
import math

import jax
from jax.extend import core


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
  """All equations, those of scans, checkpoints and other inner jaxprs included."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in core.jaxprs_in_params(equation.params):
      yield from equations(inner)


def largest_array(function, *arguments) -> int:
  """Number of elements of the largest array that `function` computes on its way."""
  jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
  return max(math.prod(out.aval.shape) for e in equations(jaxpr) for out in e.outvars)
