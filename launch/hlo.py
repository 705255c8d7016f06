"""What one device computes, moves and sends in a compiled program, read from its HLO text.

Everything is per device, times the trip counts of the loops. A conditional counts as its longest
branch. A loop whose trip count is only known at run time counts once, and is named.

Bytes are those of arrays in main memory with the padding of their tiles, not those of arrays that
the compiler keeps on the chip. An operand that an instruction only slices, also inside of nested
fusions, counts as its slices; one that is updated in place counts as its updates. An instruction
reads an operand once; Pallas kernels may read theirs several times.

FLOPs are those of matrix products, a multiply-add as two, and of the given Pallas kernels.
"""

import dataclasses
import math
import re
from typing import NamedTuple

import numpy as np

COLLECTIVES = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute')
BETWEEN_SLICES = 'between slices'  # a kind of `Collective`
SLICES = ('slice', 'dynamic-slice', 'gather')
UPDATES = {'dynamic-update-slice': 1, 'scatter': 2}  # the operand that has the updates
PRODUCTS = ('dot', 'convolution')
ASYNC_START, ASYNC_DONE = 'AsyncCollectiveStart', 'AsyncCollectiveDone'  # markers in fusions
ASYNC_FUSION = 'async_collective_fusion'  # its collectives may continue in the next fusion
ASYNC_UPDATE = 'async-update'  # a collective that was started in another fusion
ASYNC = (ASYNC_START, ASYNC_UPDATE, ASYNC_DONE)
# Aliases, bookkeeping, and calls whose bodies are counted.
NO_TRAFFIC = {'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'after-all', 'call'}
NO_TRAFFIC |= {'while', 'conditional', 'async', ASYNC_UPDATE, 'partition-id', 'replica-id'}
NO_TRAFFIC |= {'send', 'recv', 'opt-barrier', 'AllocateBuffer', 'ConcatBitcast'}
UNKNOWN_CYCLES = 2**62  # and more: the compiler's numbers for what it cannot estimate
SCOPE_STEPS = 6  # to the instruction whose scope stands for a missing one


class Rates(NamedTuple):
  """Peak rates of a device: FLOP/s, and bytes/s of its memory and to the others of its slice."""

  flops: float = math.inf
  memory: float = math.inf
  network: float = math.inf


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
    return self.arrays[:1] if self.opcode == 'copy' else self.arrays[operands:]

  @property
  def elements(self) -> int:
    """Number of elements of its first result."""
    return math.prod(self.results[0].axes)

  def find(self, pattern: str) -> str:
    """Returns the first group of a pattern in the text, '' without a match."""
    match = re.search(pattern, self.text)
    return match[1] if match else ''

  def called(self, role: str) -> list[str]:
    """Returns the names of the computations that it calls in a role."""
    return re.findall(r'[\w.\-]+', self.find(rf'\b{role}=(\{{[^}}]*\}}|%?[\w.\-]+)'))


class Collective(NamedTuple):
  """One or several equal collective operations.

  Attributes:
    kind: one of COLLECTIVES, or BETWEEN_SLICES: what goes to the network between slices.
    axes: mesh axes over which the devices of a group are distributed.
    devices: number of devices in a group.
    shape: shape of the full array that is reduced or gathered, or of the block that is permuted.
    size: bytes of this shape.
    times: number of executions in one call of the program.
    exposed: seconds in which the device waits, in all executions.
  """

  kind: str
  axes: tuple[str, ...]
  devices: int
  shape: str
  size: int
  times: int = 1
  exposed: float = 0.0

  @property
  def bytes_sent(self) -> float:
    """Bytes that a device sends in all executions, for a ring algorithm."""
    share = (self.devices - 1) / self.devices
    factors = {'all-reduce': 2 * share, 'collective-permute': 1, BETWEEN_SLICES: 1}
    return self.times * factors.get(self.kind, share) * self.size


class Work(NamedTuple):
  """What an instruction does in each of its executions.

  Attributes:
    name, opcode: of the instruction.
    scope: where it comes from in the Python program.
    bytes: bytes moved.
    padding: how many of them are padding.
    flops: FLOPs.
    seconds: max(flops / peak, bytes / rate).
    cycles: the compiler's estimate. 0: it has none.
    collective: what it sends. None: nothing.
    times: number of executions in one call of the program.
    exposed: seconds in which the device waits for the collective.
  """

  name: str
  opcode: str
  scope: str
  bytes: float
  padding: float
  flops: float
  seconds: float
  cycles: int
  collective: Collective | None
  times: int = 1
  exposed: float = 0.0


class Program:
  """A compiled program, parsed from its HLO text.

  Args:
    text: HLO text of the program.
    mesh: sizes of the mesh axes in one slice by name, in order.
    rates: of a device. None: infinite.
    kernels: FLOPs of one execution of Pallas kernels, by name and axes of their results.

  Attributes:
    work: what its instructions do.
    not_counted: what cannot be counted.
  """

  def __init__(self, text: str, mesh: dict[str, int], rates=None, kernels=None):
    self._mesh, self._rates, self._kernels = mesh, rates or Rates(), kernels or {}
    self._computations, entry = _parse(text)
    self.not_counted: list[str] = []
    self.work, _ = self._run(entry)

  def bytes_moved(self) -> float:
    """Returns the bytes that one device reads from and writes to its main memory."""
    return sum(each.times * each.bytes for each in self.work)

  def collectives(self) -> list[Collective]:
    """Returns all collectives that are executed, sorted by descending `bytes_sent`."""
    merged: dict[Collective, tuple[int, float]] = {}
    for each in self.work:
      if each.collective is not None:
        times, exposed = merged.get(each.collective, (0, 0.0))
        merged[each.collective] = times + each.times, exposed + each.times * each.exposed
    found = [c._replace(times=times, exposed=exposed) for c, (times, exposed) in merged.items()]
    return sorted(found, key=lambda collective: -collective.bytes_sent)

  def _run(self, computation: str) -> tuple[list[Work], float]:
    """Returns the work of one execution of a computation, and its seconds.

    Its instructions are in the order of execution. Collectives share the network one by one.
    """
    work, clock, network, under_way = [], 0.0, 0.0, {}
    for i in self._computations[computation]:
      inner, seconds = self._run_called(i)
      work, clock = work + inner, clock + seconds
      for key in _async_keys(i, ASYNC_DONE):
        index, end = under_way.pop(key, (0, 0.0))
        if end > clock:
          work[index], clock = work[index]._replace(exposed=end - clock), end
      if (own := self._work(i)) is None:
        continue
      clock += own.seconds
      if own.collective is not None and own.collective.kind != BETWEEN_SLICES:
        network = max(network, clock) + own.collective.bytes_sent / self._rates.network
        if keys := _async_keys(i, ASYNC_START):
          under_way |= dict.fromkeys(keys, (len(work), network))
        else:
          own, clock = own._replace(exposed=network - clock), network
      work.append(own)
    return work, clock

  def _run_called(self, i: Instruction) -> tuple[list[Work], float]:
    """Returns the work and the seconds of the computations that an instruction calls."""
    if i.opcode == 'conditional':
      branches = i.called('branch_computations') or i.called('true_computation')
      return max(map(self._run, branches), key=lambda run: (run[1], len(run[0])))
    if i.opcode != 'while':
      role = {'call': 'to_apply', 'async': 'calls'}.get(i.opcode)
      return self._run(*i.called(role)) if role and i.called(role) else ([], 0.0)
    trips, (work, seconds) = self._trips(i), self._run(*i.called('body'))
    return [each._replace(times=each.times * trips) for each in work], seconds * trips

  def _trips(self, loop: Instruction) -> int:
    """Returns the trip count of a loop, whose counter from 0 is compared with a constant."""
    root = next(i for i in self._computations[loop.called('condition')[0]] if i.is_root)
    bounds = {i.text.split(')')[0] for i in (*root.operands, *root.fused) if i.opcode == 'constant'}
    bounds = {loop.find(r'known_trip_count\W+n\W+(\d+)')} - {''} or bounds
    if len(bounds) == 1:
      return int(*bounds)
    # By scope, since layers in a row have many such loops.
    loops = _scope(loop) or loop.name
    self.not_counted.append(f'the trips of the loops of {loops}, which count once')
    return 1

  def _work(self, i: Instruction) -> Work | None:
    """Returns the work of an instruction itself, None if it has none."""
    collective = self._collective(i)
    if collective is None and (i.opcode in NO_TRAFFIC or i.opcode.endswith('-done')):
      return None
    size, padded = _moved(i, 'size'), _moved(i, 'padded')
    flops, cycles = self._flops(i), int(i.find(r'"estimated_cycles":"(\d+)"') or 0)
    cycles = cycles if cycles < UNKNOWN_CYCLES else 0
    if not (padded or flops or cycles or collective):
      return None
    seconds = max(flops / self._rates.flops, padded / self._rates.memory)
    costs = padded, padded - size, flops, seconds, cycles
    return Work(i.name, i.opcode + '-start' * i.is_start, _scope(i), *costs, collective)

  def _flops(self, i: Instruction) -> float:
    """Returns the FLOPs of an instruction, with those of its fusion."""
    if i.opcode != 'tpu_custom_call':
      return _product_flops(i) if i.opcode in PRODUCTS else sum(map(self._flops, i.fused))
    kernel = re.sub(r'\.\d+$', '', i.name), *(array.axes for array in i.results)
    if kernel not in self._kernels:
      self.not_counted.append(f'the FLOPs of the kernel {i.name}')
    return self._kernels.get(kernel, 0.0)

  def _collective(self, i: Instruction) -> Collective | None:
    """Returns the collective that an instruction executes or starts."""
    if i.opcode == 'send':
      array = i.operands[0].arrays[0]
      return Collective(BETWEEN_SLICES, (), 1, array.text, array.size)
    found = [each for each in (i, *i.fused) if each.opcode in COLLECTIVES]
    if not found:
      return None
    is_scattered = i.find(r'calls=%?(all-reduce-scatter)')
    kind = 'reduce-scatter' if is_scattered else found[0].opcode
    arrays = [array for operand in found[0].operands for array in operand.results]
    arrays = found[0].results if kind == 'all-gather' else arrays
    group = _device_group(found[0].text, math.prod(self._mesh.values()))
    coordinates = np.unravel_index(group, tuple(self._mesh.values()))
    axes = tuple(name for name, each in zip(self._mesh, coordinates, strict=True) if np.ptp(each))
    shape, size = ', '.join(array.text for array in arrays), sum(array.size for array in arrays)
    return Collective(kind, axes, len(group), shape, size) if len(group) > 1 else None


def _async_keys(i: Instruction, marker: str) -> list[str]:
  """Returns keys of the asynchronous collectives that an instruction starts or waits for."""
  marked = [value for each in i.fused if each.opcode == marker for value in each.operands]
  if marked:
    return [each.find(r'channel_id=(\d+)') for each in marked if 'channel_id' in each.text]
  if i.opcode.endswith('-done'):
    return [i.operands[0].name] if marker == ASYNC_DONE else []
  return [i.name] if i.is_start and marker == ASYNC_START else []


def _scope(i: Instruction) -> str:
  """Returns the scope of an instruction; without one, that of an instruction that uses it."""
  for direction in ('users', 'operands'):
    nearby = [i]
    for _ in range(SCOPE_STEPS):
      candidates = [each for near in nearby[:1] for each in (near, *reversed(near.fused))]
      scopes = [each.find(r'op_name="([^"]*/[^"]*)"') for each in candidates]
      if any(scopes):
        return next(filter(None, scopes))
      nearby = getattr(nearby[0], direction) if nearby else []
  return ''


def _moved(i: Instruction, measure: str) -> float:
  """Returns the bytes that an instruction reads and writes."""
  bytes_of = lambda array: 0 if array.on_chip else getattr(array, measure)
  read = {operand: sum(map(bytes_of, operand.results)) for operand in i.operands}
  written = zip(_makers(i), i.results, strict=True)
  return sum(_demand(i, operand) * size for operand, size in read.items()) + sum(
    _written(maker) * bytes_of(array) for maker, array in written
  )


def _makers(i: Instruction) -> list[Instruction]:
  """Returns the instruction that makes each array: of a fusion, one in it."""
  i = _source(i)
  if not i.fused:
    return [i] * len(i.results)
  root = next(each for each in i.fused if each.is_root)
  made = root.operands if root.opcode == 'tuple' else [root]
  return [maker for each in made for maker in _makers(each)]


def _source(i: Instruction) -> Instruction:
  """Returns the value that a bitcast is an alias of."""
  return _source(i.operands[0]) if i.opcode == 'bitcast' else i


def _written(maker: Instruction) -> float:
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


def _demand(user: Instruction, value: Instruction) -> float:
  """Returns the share of a value that a user reads."""
  positions = [str(number) for number, operand in enumerate(user.operands) if operand is value]
  if user.fused:
    read = [i for i in user.fused if i.opcode == 'parameter' and i.text.split(')')[0] in positions]
    return min(1.0, sum(map(_total_demand, read)))
  if user.opcode in ASYNC or (user.opcode == 'tuple' and value.opcode == 'parameter'):
    return 0.0
  if positions == ['0'] and _is_in_place(user):
    return 0.0 if user.opcode == 'dynamic-update-slice' else _written(user)
  if user.opcode in SLICES and '0' in positions:
    return min(1.0, user.elements / value.elements) * _total_demand(user)
  is_elementwise = user.opcode not in PRODUCTS and len(user.arrays) == 1
  return _total_demand(user) if is_elementwise and user.elements == value.elements else 1.0


def _total_demand(value: Instruction) -> float:
  """Returns the share of a value that all its users read; 1 for a value that is a result."""
  if value.is_root or not value.in_fusion:
    return 1.0
  return min(1.0, sum(_demand(user, value) for user in dict.fromkeys(value.users)))


def _is_result(i: Instruction) -> bool:
  """Whether a value is the result of its fusion, or of an instruction outside of fusions."""
  aliases = (user for user in i.users if user.opcode in ('bitcast', 'tuple'))
  return i.is_root or not i.in_fusion or any(map(_is_result, aliases))


def _product_flops(i: Instruction) -> float:
  """Returns the FLOPs of a matrix product, which a TPU has as a convolution."""
  shapes = [each.results[0].axes for each in (*i.operands[:2], i)]
  if i.opcode == 'dot':
    summed = _integers(i.find(r'lhs_contracting_dims=\{([\d,]*)\}'))
    return 2.0 * i.elements * math.prod(shapes[0][axis] for axis in summed)
  labels = re.split('_|->', i.find(r'dim_labels=([\w>\-]+)'))
  lhs, rhs, out = (dict(zip(*pair, strict=True)) for pair in zip(labels, shapes, strict=True))
  dilations = i.find(r'lhs_dilate=([\dx]+)').split('x')
  pairs = out['b'] * out['f'] * rhs['i']
  for axis in filter(str.isdecimal, out):
    # A batch axis of a product is dilated so that each result has one tap inside of the operand.
    is_batch = len(dilations) > int(axis) and dilations[int(axis)] not in ('', '1')
    pairs *= out[axis] if is_batch else rhs[axis] * min(lhs[axis], out[axis])
  return 2.0 * pairs


def _parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
  """Returns the instructions of each computation by name, and the name of the entry."""
  computations, entry, body, names = {}, '', [], {}
  for line in re.sub(r'/\*.*?\*/', '', text).splitlines():
    if header := re.match(r'(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$', line):
      names, body = {}, computations.setdefault(header[2], [])
      entry = header[2] if header[1] else entry
    elif match := re.match(r'\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$', line):
      root, name, shape, opcode, rest = match.groups()
      operands = [names[each] for each in re.findall(r'%([\w.\-]+)', rest.partition('), ')[0])]
      is_start = opcode.endswith('-start') or opcode == 'send'
      target = re.search(r'custom_call_target="([^"]*)"', rest)
      opcode = target[1] if opcode == 'custom-call' else opcode.removesuffix('-start')
      names[name] = i = Instruction(
        name, opcode, _arrays(shape), operands, rest, bool(root), is_start
      )
      body.append(i)
      for operand in operands:
        operand.users.append(i)
    elif body and line != '}':  # attributes of several lines
      body[-1].text += line
  for fusion in (i for body in computations.values() for i in body if i.opcode == 'fusion'):
    fusion.fused = computations[fusion.called('calls')[0]]
    is_async = fusion.called('calls')[0].startswith(ASYNC_FUSION)
    is_async |= any(i.opcode in (ASYNC_START, ASYNC_DONE) for i in fusion.fused)
    for i in fusion.fused:
      i.in_fusion = True
      is_started = any(user.opcode == ASYNC_START for user in i.users)
      if is_async and i.opcode in COLLECTIVES and not is_started:
        i.opcode = ASYNC_UPDATE
  return computations, entry


def _arrays(shape: str) -> list[Array]:
  """Returns the arrays of a shape, such as `bf16[16,2731]{1,0:T(8,128)(2,1)S(1)}`."""
  arrays = []
  for match in re.finditer(r'(\w+)\[([\d,]*)\](?:\{([\d,]*):?([^}]*)\})?', shape):
    axes, layout = _integers(match[2]), match[4] or ''
    padded, digits = [*axes], re.search(r'\d+', match[1])
    tile = _integers(layout.partition('T(')[2].partition(')')[0])
    for axis, size in zip(_integers(match[3] or ''), reversed(tile), strict=False):
      padded[axis] = -(-padded[axis] // size) * size
    bits = int(digits[0]) if digits else 8 * (match[1] == 'pred')
    sizes = (math.prod(each) * bits // 8 for each in (axes, padded))
    arrays.append(Array(f'{match[1]}[{match[2]}]', tuple(axes), *sizes, 'S(' in layout))
  return arrays


def _device_group(text: str, devices: int) -> list[int]:
  """Returns a group of devices of a collective, as flat indices into the mesh."""
  if match := re.search(r'(?:source_target_pairs|replica_groups)=\{\{([\d,{}]*)\}\}', text):
    groups = map(_integers, match[1].split('},{'))
    return next((group for group in groups if len(set(group)) > 1), [0])
  iota = r'\[([\d,]+)\](?:T\(([\d,]+)\))?'
  if match := re.search(rf'replica_groups=\[([\d,]+)\]<={iota}', text):
    shape, *order = map(_integers, match.groups(''))
    return _transposed_iota(*order).reshape(shape)[0].tolist()
  if match := re.search(r'replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}', text):
    sizes = re.findall(r"('\w+')=(\d+)", match[1])
    index = tuple(slice(None) if name in match[2] else 0 for name, _ in sizes)
    order = re.search(rf'device_ids=\({iota}\)', text)
    ids = _transposed_iota(*map(_integers, order.groups(''))) if order else np.arange(devices)
    return ids.reshape([int(size) for _, size in sizes])[index].ravel().tolist()
  return list(range(devices))


def _transposed_iota(shape: list[int], axes: list[int]) -> np.ndarray:
  return np.arange(math.prod(shape)).reshape(shape).transpose(axes or None)


def _integers(text: str) -> list[int]:
  return [int(part) for part in text.split(',') if part]
