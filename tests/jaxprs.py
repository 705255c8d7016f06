"""What a traced function is made of, and a function with a loop to look into."""

from collections.abc import Iterator
import math
import re

import jax
from jax.extend import core
import jax.numpy as jnp


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


def operand_dtypes(function, *arguments) -> list[set[str]]:
  """The dtypes of the operands of each matrix product of the lowered function.

  What XLA is given: products whose result is not used are gone.
  """
  text = jax.jit(function).trace(*arguments).lower(lowering_platforms=('cuda',)).as_text()
  names = {'f64': 'float64', 'f32': 'float32', 'bf16': 'bfloat16'}
  products = re.findall(r'stablehlo\.dot_general .* : \((.*)\) -> ', text)
  # As in tensor<4x8xbf16>, tensor<8x2xbf16>.
  dtypes = [re.findall(r'x([a-z]+\d+)>', operands) for operands in products]
  return [{names[name] for name in operands} for operands in dtypes]


def scatters(text: str) -> list[str]:
  """The attributes of each scatter of a lowered program."""
  return re.findall(r'"stablehlo\.scatter"\(.*?\) <\{(.*?)\}>', text)


def tanh_layers(x_BxD, w_LxDxD, loop):
  """Applies L layers tanh(x w), in a scan or unrolled."""
  layer = lambda x_BxD, w_DxD: jnp.tanh(x_BxD @ w_DxD)
  if loop:
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x_BxD, w_LxDxD)[0]
  for w_DxD in w_LxDxD:
    x_BxD = layer(x_BxD, w_DxD)
  return x_BxD
