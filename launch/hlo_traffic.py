"""Main memory traffic of an instruction of a compiled program: bytes read and written.

A sliced operand counts as its slices, also inside of nested fusions. An operand with an update in
place counts as its updates.
"""

import hlo_text
from hlo_text import Array, Instruction

SLICES = ('slice', 'dynamic-slice', 'gather')
UPDATES = {'dynamic-update-slice': 1, 'scatter': 2}  # the operand that has the updates
PRODUCTS = ('dot', 'convolution')
ASYNC = (hlo_text.ASYNC_START, hlo_text.ASYNC_UPDATE, hlo_text.ASYNC_DONE)


def moved_bytes(i: Instruction, measure: str) -> float:
  """Returns the bytes that an instruction reads and writes.

  Args:
    i: the instruction.
    measure: `size`, or `padded` for bytes with the padding of tiles.
  """

  def bytes_of(array: Array) -> int:
    if array.on_chip:
      return 0
    return getattr(array, measure)

  total = 0
  for operand in dict.fromkeys(i.operands):
    total += _read_share(i, operand) * sum(bytes_of(array) for array in operand.results)
  written = 0
  for maker, array in zip(_makers(i), i.results, strict=True):
    written += _written_share(maker) * bytes_of(array)
  return total + written


def _makers(i: Instruction) -> list[Instruction]:
  """Returns the instruction that makes each array: of a fusion, one in it."""
  i = _source(i)
  if not i.fused:
    return [i] * len(i.results)
  root = next(fused for fused in i.fused if fused.is_root)
  made = root.operands if root.opcode == 'tuple' else [root]
  return [maker for instruction in made for maker in _makers(instruction)]


def _source(i: Instruction) -> Instruction:
  """Returns the value that a bitcast is an alias of."""
  while i.opcode == 'bitcast':
    i = i.operands[0]
  return i


def _written_share(maker: Instruction) -> float:
  """Returns the share of an array that is written: only the updates of an array in place."""
  if maker.opcode in (*ASYNC, 'parameter'):  # a parameter is passed on
    return 0.0
  if not _is_in_place(maker):
    return 1.0
  return min(1.0, maker.operands[UPDATES[maker.opcode]].elements / maker.elements)


def _is_in_place(i: Instruction) -> bool:
  """Whether it updates an array in place that exists before its fusion."""
  if i.opcode not in UPDATES or not _is_result(i):
    return False
  return not i.in_fusion or _source(i.operands[0]).opcode == 'parameter'


def _read_share(user: Instruction, value: Instruction) -> float:
  """Returns the share of a value that a user reads."""
  positions = [str(number) for number, operand in enumerate(user.operands) if operand is value]
  if user.fused:
    parameters = []
    for i in user.fused:
      if i.opcode == 'parameter' and i.text.split(')')[0] in positions:
        parameters.append(i)
    return min(1.0, sum(map(_total_read_share, parameters)))
  if user.opcode in ASYNC or (user.opcode == 'tuple' and value.opcode == 'parameter'):
    return 0.0
  if positions == ['0'] and _is_in_place(user):
    if user.opcode == 'dynamic-update-slice':
      return 0.0
    return _written_share(user)
  if user.opcode in SLICES and '0' in positions:
    return min(1.0, user.elements / value.elements) * _total_read_share(user)
  is_elementwise = user.opcode not in PRODUCTS and len(user.arrays) == 1
  if is_elementwise and user.elements == value.elements:
    return _total_read_share(user)
  return 1.0


def _total_read_share(value: Instruction) -> float:
  """Returns the share of a value that all its users read; 1 for a value that is a result."""
  if value.is_root or not value.in_fusion:
    return 1.0
  return min(1.0, sum(_read_share(user, value) for user in dict.fromkeys(value.users)))


def _is_result(i: Instruction) -> bool:
  """Whether a value is the result of its fusion, or of an instruction outside of fusions."""
  if i.is_root or not i.in_fusion:
    return True
  return any(_is_result(user) for user in i.users if user.opcode in ('bitcast', 'tuple'))
