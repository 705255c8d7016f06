"""What a compiled program moves, read from its text, as often as its loops run.

FLOPs are counted before compilation, from the jaxpr: they do not depend on a machine. Bytes and
collectives are those of one device.
"""

from collections.abc import Iterator
import dataclasses
import functools
import math
import re

from jax.extend import core
import numpy as np

SIZES = {'pred': 1, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 'bf16': 2, 'f16': 2, 's32': 4, 'u32': 4}
SIZES |= {'f32': 4, 's64': 8, 'u64': 8, 'f64': 8, 'token': 0}
COLLECTIVES = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute')
# What touches no memory itself: names for others, or bodies that are counted on their own.
FREE = ('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'after-all', 'while')
FREE += ('conditional', 'call', 'partition-id', 'replica-id', 'async-start', 'async-update')


@dataclasses.dataclass(frozen=True)
class Instruction:
  """A line of a program: what it makes, and of what."""

  name: str
  shape: str
  opcode: str
  operands: tuple[str, ...]
  rest: str
  root: bool


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective, or several alike: where, over which axes of the mesh, and how much.

  Attributes:
    kind: one of COLLECTIVES.
    axes: the axes along which its devices lie.
    devices: in a group.
    shape: of the whole that is reduced or gathered, or of a part that is sent on.
    size: bytes of that.
    times: that it runs in one call of the program.
  """

  kind: str
  axes: tuple[str, ...]
  devices: int
  shape: str
  size: int
  times: int

  @property
  def sent(self) -> float:
    """Bytes that a device sends in a ring, of all times."""
    share = (self.devices - 1) / self.devices
    factor = {'all-reduce': 2 * share, 'collective-permute': 1}.get(self.kind, share)
    return self.times * factor * self.size


class Program:
  """The text of a compiled program.

  Args:
    text: of the compiler.
    mesh: names and sizes of the axes of the mesh, in order.
  """

  def __init__(self, text: str, mesh: dict[str, int]):
    self._mesh, self._channels = mesh, {}
    self._computations, self._entry = _parsed(text)

  def collectives(self) -> list[Collective]:
    """All that run, those that send most first."""
    counted: dict[Collective, int] = {}
    for instruction, times in self._run():
      for each in self._within(instruction):
        kind = each.opcode.removesuffix('-start')
        made = self._collective(kind, each) if kind in COLLECTIVES else None
        if made is not None and made.devices > 1:
          counted[made] = counted.get(made, 0) + times
    found = [dataclasses.replace(each, times=times) for each, times in counted.items()]
    return sorted(found, key=lambda each: -each.sent)

  def bytes_moved(self) -> int:
    """Bytes that are read from the memory of a device and written to it, about.

    What an instruction reads and writes; of something that is sliced or updated in place, that
    part. What the compiler keeps on the chip is not counted.
    """
    return sum(times * self._bytes(instruction) for instruction, times in self._run())

  def _within(self, instruction: Instruction) -> Iterator[Instruction]:
    """The instruction, or the collectives inside a fusion.

    One that the compiler spreads over several fusions, its start, what is computed meanwhile, and
    its end, is in each of them with the same channel: it counts once, where it starts if one of
    them says so, for it may go on inside a loop.
    """
    if instruction.opcode != 'fusion':
      yield instruction
      return
    fused = self._computations[_called(instruction)['calls'][0]]
    for each in fused.values():
      channel = re.search(r'channel_id=(\d+)', each.rest)
      if channel is None or each.opcode.removesuffix('-start') not in COLLECTIVES:
        continue
      if channel[1] in self._started and not _starts(fused):
        continue
      place = id(self._homes[id(instruction)]), channel[1]
      if self._channels.setdefault(place, instruction.name) == instruction.name:
        yield each

  def _run(self) -> Iterator[tuple[Instruction, int]]:
    """Instructions, and how often each runs."""
    waiting = [(self._entry, 1)]
    while waiting:
      name, times = waiting.pop()
      for instruction in self._computations[name].values():
        yield instruction, times
        called = _called(instruction)
        if instruction.opcode == 'while':
          known = re.search(r'known_trip_count\W+n\W+(\d+)', instruction.rest)
          trips = int(known[1]) if known else self._trips(called['condition'][0])
          waiting.append((called['body'][0], times * trips))
        elif instruction.opcode == 'conditional':
          # The last: of windows the longest; of a step that is made or left out, the one made.
          waiting.append((called['branches'][-1], times))
        elif instruction.opcode == 'call':
          waiting.append((called['to_apply'][0], times))
        elif instruction.opcode == 'async-start':
          waiting.append((called['calls'][0], times))

  def _trips(self, condition: str) -> int:
    """How often a loop runs, whose counter begins at 0: the bound in its condition."""
    bounds = []
    for instruction in self._computations[condition].values():
      if instruction.opcode == 'constant' and instruction.shape.startswith('s32[]'):
        bounds.append(int(instruction.rest.split(')')[0]))
      elif instruction.opcode == 'fusion':
        bounds.append(self._trips(_called(instruction)['calls'][0]))
    return max(bounds, default=1)

  def _collective(self, kind, instruction):
    home = self._homes[id(instruction)]
    shapes = [home[operand].shape for operand in instruction.operands]
    if kind == 'all-gather':  # a start has what goes in, too
      arrays = _arrays(instruction.shape)
      if instruction.opcode.endswith('start'):
        arrays = arrays[len(arrays) // 2 :]
      shapes = [text for text, _, _ in arrays]
    groups = _groups(instruction.rest, math.prod(self._mesh.values()))
    places = np.unravel_index(groups[0], tuple(self._mesh.values()))
    moving = zip(self._mesh, places, strict=True)
    axes = tuple(name for name, place in moving if len(set(place.tolist())) > 1)
    name = ', '.join(re.sub(r'\{[^}]*\}', '', shape) for shape in shapes)
    return Collective(kind, axes, len(groups[0]), name, sum(map(_size_anywhere, shapes)), 0)

  def _bytes(self, instruction):
    op = instruction.opcode
    if op in FREE or op.endswith('-done'):
      return 0
    home = self._homes[id(instruction)]
    size = lambda name: _size(home[name].shape)
    if op in ('dynamic-slice', 'gather', 'slice'):
      return 2 * _size(instruction.shape)
    if op == 'dynamic-update-slice':
      return 2 * size(instruction.operands[1])
    if op != 'fusion':
      return _size(instruction.shape) + sum(map(size, instruction.operands))
    fused = self._computations[_called(instruction)['calls'][0]]
    inside = [i for i in fused.values() if i.opcode == 'parameter']
    inside.sort(key=lambda i: int(i.rest.split(')')[0]))
    read = sum(map(functools.partial(_read, fused), inside))
    return read + _written(fused)

  @functools.cached_property
  def _started(self) -> set[str]:
    """Channels of collectives that are known to start in one of the fusions."""
    texts = [i.rest for c in self._computations.values() if _starts(c) for i in c.values()]
    return {found for text in texts for found in re.findall(r'channel_id=(\d+)', text)}

  @functools.cached_property
  def _homes(self):
    return {id(i): home for home in self._computations.values() for i in home.values()}


def _starts(fused):
  return any('"AsyncCollectiveStart"' in i.rest for i in fused.values())


def _read(fused, parameter):
  """Bytes that a fusion reads of a parameter: of one that it only slices, the slices."""
  uses = [i for i in fused.values() if parameter.name in i.operands]
  if len(uses) == 1 and uses[0].opcode == 'bitcast':
    return _read(fused, uses[0])
  if uses and all(i.opcode in ('dynamic-slice', 'slice', 'gather') for i in uses):
    return sum(_size(i.shape) for i in uses)
  updated = [i for i in uses if i.opcode == 'dynamic-update-slice']
  if uses and len(updated) == len(uses) and all(i.operands[0] == parameter.name for i in uses):
    return 0  # in place
  return _size(parameter.shape)


def _written(fused):
  """Bytes that a fusion writes: of something updated in place, the update."""
  (root,) = (i for i in fused.values() if i.root)
  made = [fused[name] for name in root.operands] if root.opcode == 'tuple' else [root]
  return sum(_made(fused, each) for each in made)


def _made(fused, instruction):
  while instruction.opcode == 'bitcast':
    instruction = fused[instruction.operands[0]]
  if instruction.opcode == 'dynamic-update-slice':
    return _size(fused[instruction.operands[1]].shape)
  return _size(instruction.shape)


def _parsed(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
  """The computations, by name the instructions by name, and the name of the first to run."""
  computations, entry, lines = {}, '', {}
  for line in text.splitlines():
    head = re.match(r'(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$', line)
    if head:
      lines = computations[head[2]] = {}
      entry = head[2] if head[1] else entry
      continue
    made = re.match(r'\s+(ROOT )?%?([\w.\-]+) = (.*)$', line)
    if made:
      shape, rest = _shape(made[3])
      opcode, _, rest = rest.partition('(')
      operands = tuple(re.findall(r'%([\w.\-]+)', rest[: _closing(rest)]))
      lines[made[2]] = Instruction(made[2], shape, opcode, operands, rest, bool(made[1]))
  return computations, entry


def _closing(text: str) -> int:
  """Where the parenthesis that is open at the start is closed."""
  depth = 1
  for place, character in enumerate(text):
    depth += {'(': 1, ')': -1}.get(character, 0)
    if not depth:
      return place
  return len(text)


def _shape(text: str) -> tuple[str, str]:
  """The shape at the start of a line, and the rest."""
  end = 2 + _closing(text[1:]) if text.startswith('(') else text.index(' ')
  return text[:end], text[end:].lstrip()


def _arrays(shape: str) -> list[tuple[str, int, bool]]:
  """The arrays of a shape: text, bytes, and whether they are in the large memory."""
  found = []
  for match in re.finditer(r'(\w+)\[([\d,]*)\](\{[^}]*\})?', re.sub(r'/\*.*?\*/', '', shape)):
    count = math.prod(map(int, match[2].split(','))) if match[2] else 1
    found.append((match[0], count * SIZES.get(match[1], 1), 'S(' not in (match[3] or '')))
  return found


def _size(shape: str) -> int:
  return sum(size for _, size, large in _arrays(shape) if large)


def _size_anywhere(shape: str) -> int:
  return sum(size for _, size, _ in _arrays(shape))


def _called(instruction: Instruction) -> dict[str, list[str]]:
  """The computations that an instruction names."""
  found = {}
  for key in ('calls', 'body', 'condition', 'to_apply'):
    if match := re.search(rf'\b{key}=%?([\w.\-]+)', instruction.rest):
      found[key] = [match[1]]
  if match := re.search(r'branch_computations=\{([^}]*)\}', instruction.rest):
    found['branches'] = re.findall(r'%?([\w.\-]+)', match[1])
  elif match := re.search(r'true_computation=%?([\w.\-]+)', instruction.rest):
    found['branches'] = [match[1]]
  return found


def _groups(rest: str, devices: int) -> list[list[int]]:
  """The devices, by their place in the mesh, that a collective is among, group by group."""
  if match := re.search(r'source_target_pairs=\{\{([\d,{}]*)\}\}', rest):
    pairs = [_numbers(pair) for pair in match[1].split('},{')]
    return [pair for pair in pairs if pair[0] != pair[1]] or [[0]]
  if match := re.search(r'replica_groups=\{\{([\d,{}]*)\}\}', rest):
    return [list(map(int, group.split(','))) for group in match[1].split('},{')]
  if match := re.search(r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', rest):
    shape, tiles = _numbers(match[1]), _numbers(match[2])
    order = _numbers(match[3]) if match[3] else range(len(tiles))
    return np.arange(math.prod(tiles)).reshape(tiles).transpose(order).reshape(shape).tolist()
  if match := re.search(r'replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}', rest):
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
    inner = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", match[2])]
    order = [i for i in range(len(sizes)) if i not in inner] + inner
    all_places = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    width = math.prod(list(sizes.values())[i] for i in inner)
    return all_places.transpose(order).reshape(-1, width).tolist()
  return [list(range(devices))]


def _numbers(text: str) -> list[int]:
  return list(map(int, text.split(',')))


def flops(jaxpr: core.Jaxpr) -> float:
  """Of all matrix products of a program, a multiply-add as two; what is computed again too.

  Of a choice the most expensive, of a loop without a known end one turn.
  """
  total = 0.0
  for equation in jaxpr.eqns:
    name = equation.primitive.name
    inside = [flops(each) for each in core.jaxprs_in_params(equation.params)]
    if name == 'dot_general':
      (contracted, _), _ = equation.params['dimension_numbers']
      left = equation.invars[0].aval.shape
      summed = math.prod(left[axis] for axis in contracted)
      total += 2.0 * math.prod(equation.outvars[0].aval.shape) * summed
    elif name == 'scan':
      total += equation.params['length'] * sum(inside)
    elif name == 'pallas_call':  # all its blocks, also those that a mask lets it leave out
      total += math.prod(equation.params['grid_mapping'].grid) * sum(inside)
    else:
      total += max(inside, default=0.0) if name == 'cond' else sum(inside)
  return total
