"""Instructions of a compiled program, read from its HLO text."""

import dataclasses
import math
import re
from typing import NamedTuple

import numpy as np

COLLECTIVES = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute')
# Markers of asynchronous collectives in fusions.
ASYNC_START = 'AsyncCollectiveStart'
ASYNC_DONE = 'AsyncCollectiveDone'
ASYNC_FUSION = 'async_collective_fusion'  # its collectives may continue in the next fusion
ASYNC_UPDATE = 'async-update'  # a collective that was started in another fusion
# Devices in the order of an iota: its shape, and the order of its axes.
IOTA = r'\[([\d,]+)\](?:T\(([\d,]+)\))?'


class Array(NamedTuple):
  """An array of a shape: its text, its axes, its bytes, those with the padding of its tiles."""

  text: str
  axes: tuple[int, ...]
  size: int
  padded: int
  on_chip: bool  # not in main memory


@dataclasses.dataclass(eq=False)
class Instruction:
  """An instruction of an HLO computation.

  Attributes:
    name: name of the result.
    opcode: operation, without the `-start` of an asynchronous one; the target of a custom call.
    arrays: arrays of its shape.
    operands, users: instructions.
    text: text after the opening parenthesis of the operands.
    is_root: whether it is the root of its computation.
    is_start: whether it starts an asynchronous operation.
    fused: instructions of a fusion.
    in_fusion: whether it is in a fusion.
  """

  name: str
  opcode: str
  arrays: list[Array]
  operands: list['Instruction']
  text: str
  is_root: bool
  is_start: bool
  users: list['Instruction'] = dataclasses.field(default_factory=list)
  fused: list['Instruction'] = dataclasses.field(default_factory=list)
  in_fusion: bool = False

  @property
  def results(self) -> list[Array]:
    """The arrays that it makes: the shape of an asynchronous operation may begin with others."""
    operands = sum(len(operand.arrays) for operand in self.operands)
    if not self.is_start or operands >= len(self.arrays):
      return self.arrays
    if self.opcode == 'copy':
      return self.arrays[:1]
    return self.arrays[operands:]

  @property
  def elements(self) -> int:
    """Number of elements of its first result."""
    return math.prod(self.results[0].axes)

  def find(self, pattern: str) -> str:
    """Returns the first group of a pattern in the text, '' without a match."""
    match = re.search(pattern, self.text)
    if match is None:
      return ''
    return match[1]

  def called(self, role: str) -> list[str]:
    """Returns the names of the computations that it calls in a role."""
    return re.findall(r'[\w.\-]+', self.find(rf'\b{role}=(\{{[^}}]*\}}|%?[\w.\-]+)'))


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
  """Returns the instructions of each computation by name, and the name of the entry."""
  computations: dict[str, list[Instruction]] = {}
  entry = ''
  body: list[Instruction] = []
  by_name: dict[str, Instruction] = {}  # of the computation
  for line in re.sub(r'/\*.*?\*/', '', text).splitlines():
    header = re.match(r'(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$', line)
    if header:
      by_name = {}
      body = computations.setdefault(header[2], [])
      if header[1]:
        entry = header[2]
      continue
    instruction = _parse_instruction(line, by_name)
    if instruction is not None:
      body.append(instruction)
      by_name[instruction.name] = instruction
    elif body and line != '}':  # attributes of several lines
      body[-1].text += line
  for body in computations.values():
    for instruction in body:
      if instruction.opcode == 'fusion':
        _link_fusion(instruction, computations)
  return computations, entry


def _parse_instruction(line: str, by_name: dict[str, Instruction]) -> Instruction | None:
  """Returns the instruction of a line, linked to its operands; None if the line has none."""
  match = re.match(r'\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$', line)
  if match is None:
    return None
  root, name, shape, opcode, rest = match.groups()
  operands = [by_name[each] for each in re.findall(r'%([\w.\-]+)', rest.partition('), ')[0])]
  is_start = opcode.endswith('-start') or opcode == 'send'
  if opcode == 'custom-call':
    target = re.search(r'custom_call_target="([^"]*)"', rest)
    if target:
      opcode = target[1]
  else:
    opcode = opcode.removesuffix('-start')
  instruction = Instruction(name, opcode, parse_arrays(shape), operands, rest, bool(root), is_start)
  for operand in operands:
    operand.users.append(instruction)
  return instruction


def _link_fusion(fusion: Instruction, computations: dict[str, list[Instruction]]) -> None:
  """Links a fusion to its instructions, and marks collectives that another fusion has started."""
  called = fusion.called('calls')[0]
  fusion.fused = computations[called]
  has_markers = any(i.opcode in (ASYNC_START, ASYNC_DONE) for i in fusion.fused)
  is_async = has_markers or called.startswith(ASYNC_FUSION)
  for i in fusion.fused:
    i.in_fusion = True
    is_started = any(user.opcode == ASYNC_START for user in i.users)
    if is_async and i.opcode in COLLECTIVES and not is_started:
      i.opcode = ASYNC_UPDATE


def parse_arrays(shape: str) -> list[Array]:
  """Returns the arrays of a shape, such as `bf16[16,2731]{1,0:T(8,128)(2,1)S(1)}`."""
  arrays = []
  for match in re.finditer(r'(\w+)\[([\d,]*)\](?:\{([\d,]*):?([^}]*)\})?', shape):
    axes = _integers(match[2])
    layout = match[4] or ''
    tile = _integers(layout.partition('T(')[2].partition(')')[0])
    padded = [*axes]
    for axis, size in zip(_integers(match[3] or ''), reversed(tile), strict=False):
      padded[axis] = -(-padded[axis] // size) * size
    bits = _bits(match[1])
    arrays.append(
      Array(
        text=f'{match[1]}[{match[2]}]',
        axes=tuple(axes),
        size=math.prod(axes) * bits // 8,
        padded=math.prod(padded) * bits // 8,
        on_chip='S(' in layout,
      )
    )
  return arrays


def _bits(dtype: str) -> int:
  """Returns the bits of an element; 0 for a token."""
  digits = re.search(r'\d+', dtype)
  if digits:
    return int(digits[0])
  if dtype == 'pred':
    return 8
  return 0


def device_group(text: str, devices: int) -> list[int]:
  """Returns a group of devices of a collective, as flat indices into the mesh."""
  match = re.search(r'(?:source_target_pairs|replica_groups)=\{\{([\d,{}]*)\}\}', text)
  if match:
    groups = [_integers(group) for group in match[1].split('},{')]
    return next((group for group in groups if len(set(group)) > 1), [0])
  match = re.search(rf'replica_groups=\[([\d,]+)\]<={IOTA}', text)
  if match:
    shape, *order = map(_integers, match.groups(''))
    return _transposed_iota(*order).reshape(shape)[0].tolist()
  match = re.search(r'replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}', text)
  if match:
    sizes = re.findall(r"('\w+')=(\d+)", match[1])
    index = tuple(slice(None) if name in match[2] else 0 for name, _ in sizes)
    order = re.search(rf'device_ids=\({IOTA}\)', text)
    ids = np.arange(devices)
    if order:
      ids = _transposed_iota(*map(_integers, order.groups('')))
    return ids.reshape([int(size) for _, size in sizes])[index].ravel().tolist()
  return list(range(devices))


def _transposed_iota(shape: list[int], axes: list[int]) -> np.ndarray:
  return np.arange(math.prod(shape)).reshape(shape).transpose(axes or None)


def _integers(text: str) -> list[int]:
  return [int(number) for number in text.split(',') if number]


def contracting_axes(product: Instruction) -> list[int]:
  """Returns the axes of the left operand of a `dot` that are summed over."""
  return _integers(product.find(r'lhs_contracting_dims=\{([\d,]*)\}'))
