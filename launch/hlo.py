"""FLOPs, bytes and collectives of one device in a compiled program.

`hlo_text` reads the instructions, `hlo_traffic` has their bytes. Everything is per device, times
the trip counts of the loops. A conditional counts as its longest branch. A loop with an unknown
trip count (decided at run time) counts once, and is named.

Bytes count arrays in main memory with the padding of their tiles; arrays on the chip do not count.
An instruction reads an operand once; Pallas kernels may read theirs several times.

FLOPs count matrix products, a multiply-add as two, and the given Pallas kernels.
"""

from collections.abc import Mapping
import math
import re
from typing import NamedTuple

import hlo_text
from hlo_text import Instruction
import hlo_traffic
import numpy as np

BETWEEN_SLICES = 'between slices'  # a kind of `Collective`
# Aliases, bookkeeping, and calls whose bodies are counted.
NO_TRAFFIC = {
  'parameter',
  'constant',
  'tuple',
  'get-tuple-element',
  'bitcast',
  'after-all',
  'call',
  'while',
  'conditional',
  'async',
  hlo_text.ASYNC_UPDATE,
  'partition-id',
  'replica-id',
  'send',
  'recv',
  'opt-barrier',
  'AllocateBuffer',
  'ConcatBitcast',
}
UNKNOWN_CYCLES = 2**62  # and more: the compiler's numbers for what it cannot estimate
SCOPE_STEPS = 6  # to the instruction whose scope stands for a missing one


class Rates(NamedTuple):
  """Peak rates of a device: FLOP/s, and bytes/s of its memory and to the others of its slice."""

  flops: float = math.inf
  memory: float = math.inf
  network: float = math.inf


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

  def __init__(
    self,
    text: str,
    mesh: dict[str, int],
    rates: Rates | None = None,
    kernels: Mapping[tuple, float] | None = None,
  ):
    self._mesh = mesh
    self._rates = rates or Rates()
    self._kernels = kernels or {}
    self._computations, entry = hlo_text.parse(text)
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
    work: list[Work] = []
    clock = 0.0  # of the device
    network = 0.0  # time at which the network is free
    under_way: dict[str, tuple[int, float]] = {}  # index in work and end of collectives by key
    for i in self._computations[computation]:
      inner, seconds = self._run_called(i)
      work += inner
      clock += seconds
      for key in _async_keys(i, hlo_text.ASYNC_DONE):
        index, end = under_way.pop(key, (0, 0.0))
        if end > clock:
          work[index] = work[index]._replace(exposed=end - clock)
          clock = end
      own = self._work(i)
      if own is None:
        continue
      clock += own.seconds
      if own.collective is not None and own.collective.kind != BETWEEN_SLICES:
        network = max(network, clock) + own.collective.bytes_sent / self._rates.network
        started = _async_keys(i, hlo_text.ASYNC_START)
        if started:
          under_way |= dict.fromkeys(started, (len(work), network))
        else:
          own = own._replace(exposed=network - clock)
          clock = network
      work.append(own)
    return work, clock

  def _run_called(self, i: Instruction) -> tuple[list[Work], float]:
    """Returns the work and the seconds of the computations that an instruction calls."""
    if i.opcode == 'conditional':
      branches = i.called('branch_computations') or i.called('true_computation')
      runs = [self._run(branch) for branch in branches]
      return max(runs, key=lambda run: (run[1], len(run[0])))
    if i.opcode == 'while':
      trips = self._trips(i)
      work, seconds = self._run(*i.called('body'))
      return [each._replace(times=each.times * trips) for each in work], seconds * trips
    role = {'call': 'to_apply', 'async': 'calls'}.get(i.opcode)
    if role is None or not i.called(role):
      return [], 0.0
    return self._run(*i.called(role))

  def _trips(self, loop: Instruction) -> int:
    """Returns the trip count of a loop, whose counter from 0 is compared with a constant."""
    known = loop.find(r'known_trip_count\W+n\W+(\d+)')
    if known:
      return int(known)
    root = next(i for i in self._computations[loop.called('condition')[0]] if i.is_root)
    constants = [i for i in (*root.operands, *root.fused) if i.opcode == 'constant']
    bounds = {i.text.split(')')[0] for i in constants}
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
    size = hlo_traffic.moved_bytes(i, 'size')
    padded = hlo_traffic.moved_bytes(i, 'padded')
    flops = self._flops(i)
    cycles = int(i.find(r'"estimated_cycles":"(\d+)"') or 0)
    if cycles >= UNKNOWN_CYCLES:
      cycles = 0
    if not (padded or flops or cycles or collective):
      return None
    return Work(
      name=i.name,
      opcode=f'{i.opcode}-start' if i.is_start else i.opcode,
      scope=_scope(i),
      bytes=padded,
      padding=padded - size,
      flops=flops,
      seconds=max(flops / self._rates.flops, padded / self._rates.memory),
      cycles=cycles,
      collective=collective,
    )

  def _flops(self, i: Instruction) -> float:
    """Returns the FLOPs of an instruction, with those of its fusion."""
    if i.opcode in hlo_traffic.PRODUCTS:
      return _product_flops(i)
    if i.opcode != 'tpu_custom_call':
      return sum(self._flops(fused) for fused in i.fused)
    kernel = re.sub(r'\.\d+$', '', i.name), *(array.axes for array in i.results)
    if kernel not in self._kernels:
      self.not_counted.append(f'the FLOPs of the kernel {i.name}')
    return self._kernels.get(kernel, 0.0)

  def _collective(self, i: Instruction) -> Collective | None:
    """Returns the collective that an instruction executes or starts."""
    if i.opcode == 'send':
      array = i.operands[0].arrays[0]
      return Collective(BETWEEN_SLICES, (), 1, array.text, array.size)
    found = [each for each in (i, *i.fused) if each.opcode in hlo_text.COLLECTIVES]
    if not found:
      return None
    first = found[0]
    is_scattered = i.find(r'calls=%?(all-reduce-scatter)')
    kind = 'reduce-scatter' if is_scattered else first.opcode
    if kind == 'all-gather':
      arrays = first.results
    else:
      arrays = [array for operand in first.operands for array in operand.results]
    group = hlo_text.device_group(first.text, math.prod(self._mesh.values()))
    if len(group) < 2:
      return None
    coordinates = np.unravel_index(group, tuple(self._mesh.values()))
    axes = tuple(name for name, each in zip(self._mesh, coordinates, strict=True) if np.ptp(each))
    shape = ', '.join(array.text for array in arrays)
    return Collective(kind, axes, len(group), shape, sum(array.size for array in arrays))


def _async_keys(i: Instruction, marker: str) -> list[str]:
  """Returns keys of the asynchronous collectives that an instruction starts or waits for."""
  marked = [value for each in i.fused if each.opcode == marker for value in each.operands]
  if marked:
    return [each.find(r'channel_id=(\d+)') for each in marked if 'channel_id' in each.text]
  if i.opcode.endswith('-done') and marker == hlo_text.ASYNC_DONE:
    return [i.operands[0].name]
  if i.is_start and marker == hlo_text.ASYNC_START:
    return [i.name]
  return []


def _scope(i: Instruction) -> str:
  """Returns the scope of an instruction; without one, that of an instruction that uses it."""
  return _nearest_scope(i, 'users') or _nearest_scope(i, 'operands')


def _nearest_scope(i: Instruction, direction: str) -> str:
  """Returns the scope of an instruction or of the next one in a direction that has one."""
  for _ in range(SCOPE_STEPS):
    for candidate in (i, *reversed(i.fused)):
      scope = candidate.find(r'op_name="([^"]*/[^"]*)"')
      if scope:
        return scope
    neighbors = getattr(i, direction)
    if not neighbors:
      return ''
    i = neighbors[0]
  return ''


def _product_flops(i: Instruction) -> float:
  """Returns the FLOPs of a matrix product, which a TPU has as a convolution."""
  shapes = [each.results[0].axes for each in (*i.operands[:2], i)]
  if i.opcode == 'dot':
    return 2.0 * i.elements * math.prod(shapes[0][axis] for axis in hlo_text.contracting_axes(i))
  labels = re.split('_|->', i.find(r'dim_labels=([\w>\-]+)'))
  lhs, rhs, out = (dict(zip(*pair, strict=True)) for pair in zip(labels, shapes, strict=True))
  dilations = i.find(r'lhs_dilate=([\dx]+)').split('x')
  pairs = out['b'] * out['f'] * rhs['i']
  for axis in filter(str.isdecimal, out):
    # A batch axis of a product is dilated so that each result has one tap inside of the operand.
    is_batch = len(dilations) > int(axis) and dilations[int(axis)] not in ('', '1')
    pairs *= out[axis] if is_batch else rhs[axis] * min(lhs[axis], out[axis])
  return 2.0 * pairs
