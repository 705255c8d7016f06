"""Memory traffic and collectives of a compiled program, read from its HLO text.

Both are for one device, multiplied by the trip counts of the loops. A loop whose trip count is only
known at run time, such as the loop over the blocks of a learned span, counts once.
"""

from collections.abc import Iterator
import dataclasses
import functools
import math
import re

import numpy as np

# Bytes by element type.
ITEM_SIZES = {'pred': 1, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 'bf16': 2, 'f16': 2, 's32': 4}
ITEM_SIZES |= {'u32': 4, 'f32': 4, 's64': 8, 'u64': 8, 'f64': 8, 'token': 0}
COLLECTIVES = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute')
# Opcodes without memory traffic of their own: aliases, and calls whose bodies are counted.
NO_TRAFFIC = (
  'parameter',
  'constant',
  'tuple',
  'get-tuple-element',
  'bitcast',
  'after-all',
  'while',
)
NO_TRAFFIC += ('conditional', 'call', 'partition-id', 'replica-id', 'async-start', 'async-update')


@dataclasses.dataclass(frozen=True)
class Instruction:
  """An instruction of an HLO computation.

  Attributes:
    name: name of the result.
    shape: shape of the result, as text.
    opcode: operation.
    operands: names of the operands.
    attributes: text after the opening parenthesis of the operands.
    is_root: whether the instruction is the root of its computation.
  """

  name: str
  shape: str
  opcode: str
  operands: tuple[str, ...]
  attributes: str
  is_root: bool


@dataclasses.dataclass(frozen=True)
class Collective:
  """One or several equal collectives.

  Attributes:
    kind: one of COLLECTIVES.
    axes: mesh axes over which the devices of a group are distributed.
    devices: number of devices in a group.
    shape: shape of the full array that is reduced or gathered, or of the block that is permuted.
    size: bytes of this shape.
    times: number of executions in one call of the program.
  """

  kind: str
  axes: tuple[str, ...]
  devices: int
  shape: str
  size: int
  times: int

  @property
  def bytes_sent(self) -> float:
    """Bytes that a device sends in all executions, for a ring algorithm."""
    share = (self.devices - 1) / self.devices
    factor = {'all-reduce': 2 * share, 'collective-permute': 1}.get(self.kind, share)
    return self.times * factor * self.size


class Program:
  """A compiled program, parsed from its HLO text.

  Args:
    text: HLO text of the program.
    mesh: sizes of the mesh axes by name, in order.
  """

  def __init__(self, text: str, mesh: dict[str, int]):
    self._mesh = mesh
    # Per computation and channel, the fusion that the collective is counted in.
    self._fusion_by_channel = {}
    self._computations, self._entry = _parse(text)

  def collectives(self) -> list[Collective]:
    """Returns all collectives that are executed, sorted by descending `bytes_sent`."""
    counts: dict[Collective, int] = {}
    for instruction, times in self._executed():
      for candidate in self._unfuse(instruction):
        kind = candidate.opcode.removesuffix('-start')
        collective = self._collective(kind, candidate) if kind in COLLECTIVES else None
        if collective is not None and collective.devices > 1:
          counts[collective] = counts.get(collective, 0) + times
    collectives = [dataclasses.replace(c, times=times) for c, times in counts.items()]
    return sorted(collectives, key=lambda collective: -collective.bytes_sent)

  def bytes_moved(self) -> int:
    """Estimates the bytes that one device reads from and writes to its main memory.

    The estimate sums the operands and results of all instructions; of arrays that are sliced or
    updated in place, only the slice or the update counts. Arrays that the compiler keeps in on-chip
    memory do not count.
    """
    return sum(times * self._bytes(instruction) for instruction, times in self._executed())

  def _unfuse(self, instruction: Instruction) -> Iterator[Instruction]:
    """Yields the instruction itself or, for a fusion, the collectives inside it.

    The compiler can split an asynchronous collective into several fusions with the same channel:
    its start, the computation that overlaps with it, and its end. It counts once, in the fusion
    that starts it if one is marked as such, because a later fusion can be inside a loop.
    """
    if instruction.opcode != 'fusion':
      yield instruction
      return
    fused = self._computations[_called_computations(instruction)['calls'][0]]
    for inner in fused.values():
      channel = re.search(r'channel_id=(\d+)', inner.attributes)
      if channel is None or inner.opcode.removesuffix('-start') not in COLLECTIVES:
        continue
      if channel[1] in self._started_channels and not _has_async_start(fused):
        continue
      key = id(self._computation_of[id(instruction)]), channel[1]
      if self._fusion_by_channel.setdefault(key, instruction.name) == instruction.name:
        yield inner

  def _executed(self) -> Iterator[tuple[Instruction, int]]:
    """Yields each instruction that is executed, and how many times."""
    waiting = [(self._entry, 1)]
    while waiting:
      name, times = waiting.pop()
      for instruction in self._computations[name].values():
        yield instruction, times
        called = _called_computations(instruction)
        if instruction.opcode == 'while':
          match = re.search(r'known_trip_count\W+n\W+(\d+)', instruction.attributes)
          trips = int(match[1]) if match else self._trip_count(called['condition'][0])
          waiting.append((called['body'][0], times * trips))
        elif instruction.opcode == 'conditional':
          # Count the last branch: the step that is executed.
          waiting.append((called['branches'][-1], times))
        elif instruction.opcode == 'call':
          waiting.append((called['to_apply'][0], times))
        elif instruction.opcode == 'async-start':
          waiting.append((called['calls'][0], times))

  def _trip_count(self, condition: str) -> int:
    """Returns the bound in a loop condition, the trip count of a counter that starts at 0."""
    bounds = []
    for instruction in self._computations[condition].values():
      if instruction.opcode == 'constant' and instruction.shape.startswith('s32[]'):
        bounds.append(int(instruction.attributes.split(')')[0]))
      elif instruction.opcode == 'fusion':
        bounds.append(self._trip_count(_called_computations(instruction)['calls'][0]))
    return max(bounds, default=1)

  def _collective(self, kind, instruction):
    computation = self._computation_of[id(instruction)]
    shapes = [computation[operand].shape for operand in instruction.operands]
    if kind == 'all-gather':  # the shape of a start includes the operands
      arrays = _arrays(instruction.shape)
      if instruction.opcode.endswith('start'):
        arrays = arrays[len(arrays) // 2 :]
      shapes = [text for text, _, _ in arrays]
    groups = _device_groups(instruction.attributes, math.prod(self._mesh.values()))
    coordinates = np.unravel_index(groups[0], tuple(self._mesh.values()))
    by_axis = zip(self._mesh, coordinates, strict=True)
    axes = tuple(name for name, indices in by_axis if len(set(indices.tolist())) > 1)
    shape = ', '.join(re.sub(r'\{[^}]*\}', '', text) for text in shapes)
    return Collective(kind, axes, len(groups[0]), shape, sum(map(_total_bytes, shapes)), 0)

  def _bytes(self, instruction):
    opcode = instruction.opcode
    if opcode in NO_TRAFFIC or opcode.endswith('-done'):
      return 0
    computation = self._computation_of[id(instruction)]
    operand_bytes = lambda name: _main_memory_bytes(computation[name].shape)
    if opcode in ('dynamic-slice', 'gather', 'slice'):
      return 2 * _main_memory_bytes(instruction.shape)
    if opcode == 'dynamic-update-slice':
      return 2 * operand_bytes(instruction.operands[1])
    if opcode != 'fusion':
      return _main_memory_bytes(instruction.shape) + sum(map(operand_bytes, instruction.operands))
    fused = self._computations[_called_computations(instruction)['calls'][0]]
    parameters = [i for i in fused.values() if i.opcode == 'parameter']
    parameters.sort(key=lambda i: int(i.attributes.split(')')[0]))
    read = sum(map(functools.partial(_bytes_read, fused), parameters))
    return read + _bytes_written(fused)

  @functools.cached_property
  def _started_channels(self) -> set[str]:
    """Channels of collectives whose starting fusion is marked."""
    fusions = [c for c in self._computations.values() if _has_async_start(c)]
    texts = [i.attributes for fused in fusions for i in fused.values()]
    return {channel for text in texts for channel in re.findall(r'channel_id=(\d+)', text)}

  @functools.cached_property
  def _computation_of(self):
    """The computation of each instruction, by the id of the instruction object."""
    return {id(i): c for c in self._computations.values() for i in c.values()}


def _has_async_start(fused):
  return any('"AsyncCollectiveStart"' in i.attributes for i in fused.values())


def _bytes_read(fused, parameter):
  """Returns the bytes that a fusion reads from a parameter; only the slices if it is sliced."""
  uses = [i for i in fused.values() if parameter.name in i.operands]
  if len(uses) == 1 and uses[0].opcode == 'bitcast':
    return _bytes_read(fused, uses[0])
  if uses and all(i.opcode in ('dynamic-slice', 'slice', 'gather') for i in uses):
    return sum(_main_memory_bytes(i.shape) for i in uses)
  updates = [i for i in uses if i.opcode == 'dynamic-update-slice']
  if uses and len(updates) == len(uses) and all(i.operands[0] == parameter.name for i in uses):
    return 0  # in place
  return _main_memory_bytes(parameter.shape)


def _bytes_written(fused):
  """Returns the bytes that a fusion writes; only the updates of arrays updated in place."""
  (root,) = (i for i in fused.values() if i.is_root)
  results = [fused[name] for name in root.operands] if root.opcode == 'tuple' else [root]
  return sum(_result_bytes(fused, result) for result in results)


def _result_bytes(fused, instruction):
  while instruction.opcode == 'bitcast':
    instruction = fused[instruction.operands[0]]
  if instruction.opcode == 'dynamic-update-slice':
    return _main_memory_bytes(fused[instruction.operands[1]].shape)
  return _main_memory_bytes(instruction.shape)


def _parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
  """Returns the instructions by name of each computation by name, and the entry computation."""
  computations, entry, instructions = {}, '', {}
  for line in text.splitlines():
    header = re.match(r'(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$', line)
    if header:
      instructions = computations[header[2]] = {}
      entry = header[2] if header[1] else entry
      continue
    match = re.match(r'\s+(ROOT )?%?([\w.\-]+) = (.*)$', line)
    if match:
      shape, call = _split_shape(match[3])
      opcode, _, attributes = call.partition('(')
      operands = tuple(re.findall(r'%([\w.\-]+)', attributes[: _closing_index(attributes)]))
      instructions[match[2]] = Instruction(
        match[2], shape, opcode, operands, attributes, bool(match[1])
      )
  return computations, entry


def _closing_index(text: str) -> int:
  """Returns the index of the parenthesis that closes one opened before the text."""
  depth = 1
  for index, character in enumerate(text):
    depth += {'(': 1, ')': -1}.get(character, 0)
    if not depth:
      return index
  return len(text)


def _split_shape(text: str) -> tuple[str, str]:
  """Splits the text of an instruction into its shape and the rest."""
  end = 2 + _closing_index(text[1:]) if text.startswith('(') else text.index(' ')
  return text[:end], text[end:].lstrip()


def _arrays(shape: str) -> list[tuple[str, int, bool]]:
  """Returns text, bytes and whether it is in main memory for each array of a shape."""
  arrays = []
  for match in re.finditer(r'(\w+)\[([\d,]*)\](\{[^}]*\})?', re.sub(r'/\*.*?\*/', '', shape)):
    count = math.prod(map(int, match[2].split(','))) if match[2] else 1
    in_main_memory = 'S(' not in (match[3] or '')
    arrays.append((match[0], count * ITEM_SIZES.get(match[1], 1), in_main_memory))
  return arrays


def _main_memory_bytes(shape: str) -> int:
  return sum(size for _, size, in_main_memory in _arrays(shape) if in_main_memory)


def _total_bytes(shape: str) -> int:
  return sum(size for _, size, _ in _arrays(shape))


def _called_computations(instruction: Instruction) -> dict[str, list[str]]:
  """Returns the names of the computations that an instruction calls, by role."""
  called = {}
  for key in ('calls', 'body', 'condition', 'to_apply'):
    if match := re.search(rf'\b{key}=%?([\w.\-]+)', instruction.attributes):
      called[key] = [match[1]]
  if match := re.search(r'branch_computations=\{([^}]*)\}', instruction.attributes):
    called['branches'] = re.findall(r'%?([\w.\-]+)', match[1])
  elif match := re.search(r'true_computation=%?([\w.\-]+)', instruction.attributes):
    called['branches'] = [match[1]]
  return called


def _device_groups(attributes: str, devices: int) -> list[list[int]]:
  """Returns the groups of devices of a collective, as flat indices into the mesh."""
  if match := re.search(r'source_target_pairs=\{\{([\d,{}]*)\}\}', attributes):
    pairs = [_parse_integers(pair) for pair in match[1].split('},{')]
    return [pair for pair in pairs if pair[0] != pair[1]] or [[0]]
  if match := re.search(r'replica_groups=\{\{([\d,{}]*)\}\}', attributes):
    return [list(map(int, group.split(','))) for group in match[1].split('},{')]
  if match := re.search(r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', attributes):
    shape, tiles = _parse_integers(match[1]), _parse_integers(match[2])
    order = _parse_integers(match[3]) if match[3] else range(len(tiles))
    return np.arange(math.prod(tiles)).reshape(tiles).transpose(order).reshape(shape).tolist()
  if match := re.search(r'replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}', attributes):
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
    group_axes = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", match[2])]
    order = [i for i in range(len(sizes)) if i not in group_axes] + group_axes
    indices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    group_size = math.prod(list(sizes.values())[i] for i in group_axes)
    return indices.transpose(order).reshape(-1, group_size).tolist()
  return [list(range(devices))]


def _parse_integers(text: str) -> list[int]:
  return list(map(int, text.split(',')))
