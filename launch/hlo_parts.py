"""The work of a compiled training step by part of the model, and an estimate of its time.

  estimate = cycles, else roofline, plus waits

An instruction takes the compiler's cycles; without cycles, the longer of the times of its FLOPs and
its bytes. For a Pallas kernel without cycles, this time is multiplied by a ratio: cycles to time of
the other instructions of its part (with matrix products if the kernel has them) and their
asynchronous copies. So code gains nothing by moving into a kernel with the same traffic.
Asynchronous copies themselves run beside other instructions. A collective takes the time of the
device's wait.
"""

import collections
import re

import hlo
import model_parts

LAYOUT_CHANGES = 'copy', 'transpose', 'reshape'  # opcodes of synchronous instructions
KERNEL = 'tpu_custom_call'  # opcode of a Pallas kernel

ALL_PARTS = 'all parts'  # stands for a part that has no such instructions


def count(all_work: list[hlo.Work], clock: float) -> dict[str, collections.Counter]:
  """Returns what all executions compute, move and take, by part of the model.

  Args:
    all_work: the work of a program.
    clock: cycles of a second.
  """
  ratios = _cycle_ratios(all_work, clock)
  parts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
  for work in all_work:
    numbers = {
      'bytes': work.bytes,
      'padding': work.padding,
      'flops': work.flops,
      'exposed': work.exposed,
      'bound': work.seconds + work.exposed,
      'cycles': work.cycles / clock,
      'estimate': _busy_seconds(work, clock, ratios) + work.exposed,
    }
    for name, value in numbers.items():
      parts[part_of(work)][name] += work.times * value
  return parts


def _cycle_ratios(all_work: list[hlo.Work], clock: float) -> dict[tuple[str, bool], float]:
  """Returns the ratio of cycles to roofline by part and by whether instructions have products.

  At least 1. An asynchronous copy brings the operand of another instruction, which then moves less.
  """
  cycles: collections.Counter = collections.Counter()
  roofline: collections.Counter = collections.Counter()
  for work in all_work:
    if work.cycles or _is_copy(work):
      for part in (part_of(work), ALL_PARTS):
        kind = part, work.flops > 0
        cycles[kind] += work.times * work.cycles / clock
        roofline[kind] += work.times * work.seconds
  return {kind: max(1.0, cycles[kind] / roofline[kind]) for kind in cycles if roofline[kind]}


def _is_copy(work: hlo.Work) -> bool:
  """Whether it starts an asynchronous copy or slice."""
  return work.collective is None and work.opcode.endswith('-start')


def _busy_seconds(work: hlo.Work, clock: float, ratios: dict[tuple[str, bool], float]) -> float:
  """Returns the seconds of an execution without the wait for a collective."""
  if work.cycles:
    return work.cycles / clock
  if work.collective is not None or _is_copy(work):
    return 0.0
  if work.opcode == KERNEL:
    has_products = work.flops > 0
    ratio_of_all = ratios.get((ALL_PARTS, has_products), 1.0)
    return work.seconds * ratios.get((part_of(work), has_products), ratio_of_all)
  return work.seconds


def bytes_without_cycles(all_work: list[hlo.Work]) -> collections.Counter:
  """Returns the bytes of instructions for which the compiler estimates no cycles, by name."""
  without_cycles: collections.Counter = collections.Counter()
  for work in all_work:
    if not work.cycles:
      name = work.name if work.opcode in ('fusion', KERNEL) else work.opcode
      without_cycles[re.sub(r'[.\d]+$', '', name)] += work.times * work.bytes
  return without_cycles


def part_of(work: hlo.Work) -> str:
  """Returns the part of the model that an instruction belongs to."""
  if work.collective is not None:
    return 'collectives'
  if work.opcode in LAYOUT_CHANGES or work.scope.endswith('/transpose'):
    return 'layout changes'
  return model_parts.part_of(work.scope)
