"""Compiles a config for TPU slices without a TPU: memory, traffic, FLOPs and bounds of the time.

  python launch/compile.py --config=configs/ngrammer_c4.py:393k_8k_50 --topology=v5e:4x4

It compiles the programs of a run: a training step, the scoring of a segment, and the generation of
a token. Needs `pip install libtpu`. All numbers are read from the compiled programs, for one device
(see `hlo.py`). `tables in host memory` belong to no program and count for all hosts:

  bound by instruction   for each instruction, the longer of the times of its FLOPs and its bytes;
                         their sum, plus the waits for collectives
  cycles                 the sum of the compiler's estimates, without the named instructions
  estimate               cycles, else the time of the bound, plus waits (see `hlo_parts.py`)

Transfers to and from the host are not counted. --against=OTHER.json prints another report of --json
beside this one.

Exit status 1: a program does not fit; 2: bad input; 3: any other error.
"""

import argparse
import collections
import dataclasses
import json
import logging
import math
import os
import pathlib
import time
import traceback
from typing import Any, NamedTuple

# JAX and libtpu read these when they start; then they use no device and query no metadata server.
os.environ |= {
  'JAX_PLATFORMS': 'cpu',
  'TPU_SKIP_MDS_QUERY': '1',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
}

import hlo
import hlo_parts
import jax
from jax.experimental import topologies

from ngrammer_jax import command_line, errors, flags, sharding
from ngrammer_jax import config as experiment
from ngrammer_jax.data import vocabularies
from ngrammer_jax.models import model_variables
from ngrammer_jax.system import progress, result_files, text_tables
from ngrammer_jax.training import capacity, flops, model_size, programs

REMEDIES = (
  'larger: mesh.fsdp, mesh.model; smaller: training.batch_size, evaluation.streams and '
  'segment_length; in training also model.remat="minimal" or "full", '
  'model.vocabulary_chunk=8192, training.accumulation.parts'
)
MIN_BYTES = 1e5  # collectives that send less are not listed

METRICS = {  # of a program, with the unit to print
  'peak': ('peak of the memory', 2**30, 'GiB'),
  'host': ('tables in host memory', 2**30, 'GiB'),
  'flops': ('computed', 1e12, 'TFLOP'),
  'bytes': ('moved', 1e9, 'GB'),
  'padding': ('of it padding', 1e9, 'GB'),
  'sent': ('sent within the slice', 1e6, 'MB'),
  'sent_between_slices': ('sent to other slices', 1e6, 'MB'),
  'bound': ('bound by instruction', 1e-3, 'ms'),
  'exposed': ('of it waiting for collectives', 1e-3, 'ms'),
  'mfu': ('MFU at best', 1e-2, '%'),
  'cycles': ("the compiler's cycles", 1e-3, 'ms'),
  'estimate': ('estimate', 1e-3, 'ms'),
}
PART_COLUMNS = {
  'GB': ('bytes', 1e9),
  '%': ('share', 1e-2),
  'bound, ms': ('bound', 1e-3),
  'cycles, ms': ('cycles', 1e-3),
  'estimate, ms': ('estimate', 1e-3),
}


class Chip(NamedTuple):
  """Specifications of one JAX device, from cloud.google.com/tpu/docs.

  Attributes:
    memory: GiB.
    memory_rate: GB/s.
    network_rate: GB/s that a device sends to others of its slice. Infinite: not published.
    clock: GHz, at which its matrix units have the published peak.
  """

  memory: float
  memory_rate: float
  network_rate: float
  clock: float


CHIPS = {
  'TPU v3': Chip(16, 450, math.inf, 0.94),  # one of the two cores of a chip
  'TPU v4': Chip(32, 1200, math.inf, 1.05),
  'TPU v5 lite': Chip(16, 819, 200, 1.5),
  'TPU v5': Chip(95, 2765, 600, 1.75),
  'TPU v6 lite': Chip(32, 1638, 400, 1.75),
}


def slice_devices(topology: str, slices: int) -> list[jax.Device]:
  """Returns the devices of one or more slices. Raises BadInput if libtpu has no such topology."""
  options: dict[str, Any] = {}
  if slices > 1:
    options['num_slices'] = slices
  if topology.startswith('v4'):  # the two cores of a v4 chip are one device, not as those of a v3
    options['chip_config_name'] = 'megacore'
  try:
    topology_devices = topologies.get_topology_desc(topology, 'tpu', **options).devices
  except Exception as error:
    if 'not installed' in str(error):
      raise errors.BadInput('libtpu is not installed: pip install libtpu') from error
    raise errors.BadInput(
      f'--topology={topology}: {str(error).splitlines()[0]}; expected for example v3:4x4, '
      f'v4:2x2x4, v5e:4x4 (16 chips, v5litepod-16), v5p:4x4x8 or v6e:8x8'
    ) from error
  kind = topology_devices[0].device_kind
  if kind not in CHIPS:
    raise errors.BadInput(f'--topology={topology}: {kind} is not one of: {", ".join(CHIPS)}')
  return topology_devices


def vocabulary_size(config: experiment.Config, override: int | None) -> int:
  """Returns the vocabulary size. Raises BadInput if it depends on the text."""
  if override is not None:
    size = override
  elif config.data.vocabulary == 'bytes':
    size = vocabularies.ByteVocabulary.size
  else:
    size = config.data.vocabulary_size
  if size is None or size < 2:
    raise errors.BadInput(
      f'the size of data.vocabulary={config.data.vocabulary!r} is {size or "that of the text"}: '
      f'set --vocabulary_size=N, at least 2'
    )
  return size


def compile_program(run_programs: programs.Programs, name: str, slices: int = 1) -> dict[str, Any]:
  """Compiles one of `programs.NAMES`; returns its statistics, or why it does not fit."""
  start_time = time.monotonic()
  mesh = run_programs.mesh
  kind = mesh.devices.flat[0].device_kind
  traced, tokens = run_programs.trace_program(name)
  result = {
    'parameters': model_variables.count_elements(run_programs.abstract.params),
    'tokens': tokens,
    'memory_limit': CHIPS[kind].memory * 2**30,
    'fits': False,
  }
  try:
    with sharding.use(mesh):
      compiled = traced.lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    result['reason'] = str(error).splitlines()[0]
    return result
  memory = compiled.memory_analysis()
  result['compile_seconds'] = time.monotonic() - start_time
  result['peak'] = capacity.peak_bytes(compiled)
  result['arguments'] = memory.argument_size_in_bytes
  result['temporaries'] = memory.temp_size_in_bytes
  result['host'] = run_programs.host_bytes(name)
  result['fits'] = result['peak'] <= result['memory_limit']
  axes = dict(mesh.shape)
  axes['data'] //= slices
  result |= count(compiled.as_text(), axes, kind, flops.kernel_flops(traced.jaxpr))
  if name == 'train':
    model_flops = 3 * run_programs.flops.forward() * tokens / mesh.size
    result['mfu'] = model_flops / flops.peak_flops(kind) / result['bound']
  return result


def compile_training(
  config: experiment.Config, size: int, mesh: jax.sharding.Mesh, slices: int = 1
) -> dict[str, Any]:
  """Compiles the training; with model.remat=auto the first value that fits, as a run does.

  Args:
    config: the experiment.
    size: V.
    mesh: of described devices.
    slices: number of slices of the mesh.
  """
  is_chosen = config.model.remat == 'auto' and config.model.recurrent is None
  for remat in programs.REMATS if is_chosen else (config.model.remat,):
    model = dataclasses.replace(config.model, remat=remat)
    run_programs = programs.Programs(dataclasses.replace(config, model=model), size, mesh)
    result = compile_program(run_programs, 'train', slices) | {'remat': remat}
    if result['fits']:
      break
  return result


def count(text: str, mesh: dict[str, int], kind: str, kernels: dict[tuple, float]) -> dict:
  """Returns what a compiled program computes, moves and sends, in all and by part of the model.

  Args:
    text: HLO text.
    mesh: sizes of the mesh axes in one slice.
    kind: kind of the devices.
    kernels: FLOPs of Pallas kernels, see `hlo.Program`.
  """
  chip = CHIPS[kind]
  rates = hlo.Rates(flops.peak_flops(kind), chip.memory_rate * 1e9, chip.network_rate * 1e9)
  program = hlo.Program(text, mesh, rates, kernels)
  parts = hlo_parts.count(program.work, chip.clock * 1e9)
  total: collections.Counter = collections.Counter()
  for numbers in parts.values():
    total.update(numbers)
    numbers['share'] = numbers['bytes'] / max(program.bytes_moved(), 1)
  collectives = program.collectives()
  between = sum(c.bytes_sent for c in collectives if c.kind == hlo.BETWEEN_SLICES)
  not_counted = [*dict.fromkeys(program.not_counted)]
  if math.isinf(chip.network_rate):
    not_counted.append(f'the waits for collectives: no network rate of {kind} is published')
  if between:
    not_counted.append('the waits for other slices: their network has no published rate')
  by_bytes = sorted(parts, key=lambda name: -parts[name]['bytes'])
  return {
    **total,
    'sent': sum(c.bytes_sent for c in collectives) - between,
    'sent_between_slices': between,
    'parts': {name: dict(parts[name]) for name in by_bytes},
    'collectives': [c._asdict() | {'sent': c.bytes_sent} for c in collectives],
    'without_cycles': dict(hlo_parts.bytes_without_cycles(program.work).most_common()),
    'not_counted': not_counted,
  }


def difference(this: Any, other: Any) -> Any:
  """Returns the difference of two numbers, or of those of nested dictionaries; None is 0.

  It is None for what is neither, such as a text.
  """
  if isinstance(this or other, dict):
    this = this or {}
    other = other or {}
    return {key: difference(this.get(key), other.get(key)) for key in this | other}
  if not isinstance(this or other or 0, int | float):
    return None
  return (this or 0) - (other or 0)


def format_numbers(result: dict, sign: str = '') -> list[str]:
  """Formats the numbers of a program, in all and by part; `sign` as in format specifications."""
  totals = []
  for key, (title, scale, unit) in METRICS.items():
    if result.get(key):
      totals.append((f'  {title}', f'{result[key] / scale:{sign},.2f}', unit))
  rows = [['  part', *PART_COLUMNS]]
  for part, numbers in result['parts'].items():
    cells = [f'  {part}']
    for key, scale in PART_COLUMNS.values():
      cells.append(f'{numbers.get(key, 0) / scale:{sign},.2f}')
    rows.append(cells)
  return text_tables.align_columns(totals, '<><') + text_tables.align_columns(rows, '<>')


def format_model(config: experiment.Config, size: int, run_programs: programs.Programs) -> str:
  """Formats the parameters and the FLOPs of a token."""
  parameters = model_size.count(config.model, size).format()
  token_flops = model_size.format_flops(run_programs.flops, config.model)
  return f'parameters: {parameters}; FLOPs of a token: {token_flops}'


def format_report(name: str, result: dict) -> str:
  """Formats the statistics of a program."""
  limit = f'{result["memory_limit"] / 2**30:,.0f} GiB'
  status = f'DOES NOT FIT in {limit}; {REMEDIES}'
  if result['fits']:
    status = f'fits in {limit}'
  title = f'{name}, {result["tokens"]:,} tokens: {status}'
  if 'remat' in result:
    title += f'; model.remat={result["remat"]}'
  if 'bytes' not in result:
    return f'{title}\n  {result["reason"]}'
  title += f'; compiled in {progress.format_duration(result["compile_seconds"])}'
  lines = [title, *format_numbers(result)]
  for collective in result['collectives']:
    if collective['sent'] >= MIN_BYTES:
      lines.append(_format_collective(collective))
  sizes = []
  for instruction, size in result['without_cycles'].items():
    if size >= 1e7:
      sizes.append(f'{instruction} {size / 1e9:.2f}')
  if sizes:
    lines.append(f'  without cycles, GB: {", ".join(sizes)}')
  lines += [f'  not counted: {what}' for what in result['not_counted']]
  return '\n'.join(lines)


def _format_collective(c: dict[str, Any]) -> str:
  """Formats a collective in one line."""
  return (
    f'  {c["kind"]} over {",".join(c["axes"])} of {c["devices"]}, {c["times"]} times: '
    f'{c["sent"] / 1e6:,.1f} MB sent, {1e3 * c["exposed"]:.2f} ms waited, {c["shape"][:50]}'
  )


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, experiment.Config]:
  """Returns the flags, and the config as on a TPU, with one step per call."""
  form = argparse.RawDescriptionHelpFormatter
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
  add = parser.add_argument
  add('--topology', required=True, nargs='+', help='such as v3:4x4, v5e:4x8 or v5p:4x4x8')
  add('--slices', type=int, default=1, help='number of slices (default: 1)')
  add('--programs', nargs='+', choices=programs.NAMES, default=programs.NAMES, help='default: all')
  add('--vocabulary_size', type=int, help='if the config leaves it to the text')
  add('--json', type=pathlib.Path, help='file for the report')
  add('--against', type=pathlib.Path, help='a report to subtract from this one')
  args, config = command_line.parse(parser, argv)
  if args.slices < 1:
    raise errors.BadInput(f'--slices={args.slices} must be at least 1')
  model, training = config.model, dataclasses.replace(config.training, segments_per_call=1)
  if model.dtype == 'auto':  # 'auto' would be float32 on this machine
    model = dataclasses.replace(model, dtype='bfloat16')
  return args, dataclasses.replace(config, model=model, training=training)


def read_report(path: pathlib.Path | None) -> dict[str, dict]:
  """Returns the programs of the first slice of a report. Raises BadInput if it is none."""
  if path is None:
    return {}
  try:
    return json.loads(path.read_text())[0]['programs']
  except (OSError, ValueError, LookupError, TypeError) as error:
    raise errors.BadInput(f'--against={path} is not a report of --json: {error}') from error


def main(argv: list[str]) -> int:
  """Prints the statistics of each program. Returns 1 if one does not fit."""
  args, config = parse_args(argv)
  V = vocabulary_size(config, args.vocabulary_size)
  config.model.check_vocabulary(V)
  if args.json is not None:
    result_files.check_output_file('--json', args.json, 'report.json')
  other = read_report(args.against)
  # Errors in any topology are reported before compiling.
  meshes = {topology: make_mesh(config, topology, args.slices) for topology in args.topology}
  reports = []
  for topology, mesh in meshes.items():
    axes = ' x '.join(f'{name} {size}' for name, size in mesh.shape.items())
    kind = mesh.devices.flat[0].device_kind
    print(f'{args.slices} x {topology}: {mesh.size} devices ({kind}), mesh {axes}', flush=True)
    run_programs = programs.Programs(config, V, mesh)
    print(format_model(config, V, run_programs), flush=True)
    results = {}
    for name in args.programs:
      if name == 'train':
        results[name] = compile_training(config, V, mesh, args.slices)
      else:
        results[name] = compile_program(run_programs, name, args.slices)
      print(format_report(name, results[name]), flush=True)
      if 'parts' in results[name] and 'parts' in other.get(name, {}):
        print(f'{name}: difference from {args.against}')
        print('\n'.join(format_numbers(difference(results[name], other[name]), '+')))
    reports.append(
      {
        'topology': topology,
        'slices': args.slices,
        'mesh': dict(mesh.shape),
        'programs': results,
      }
    )
    if args.json is not None:
      result_files.write_output(args.json, json.dumps(reports, indent=2) + '\n')
  results = [result for report in reports for result in report['programs'].values()]
  if all(result['fits'] for result in results):
    return 0
  return 1


def make_mesh(config: experiment.Config, topology: str, slices: int) -> jax.sharding.Mesh:
  """Returns the mesh of the config on slices. Raises BadInput if the batch does not fit it."""
  t = config.training
  devices = slice_devices(topology, slices)
  mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.model, devices)
  sharding.check_batch('training.batch_size', t.batch_size, mesh, t.microbatches)
  return mesh


def main_or_crash(argv: list[str]) -> int:
  """Calls `main`; returns 3 for an unexpected error, because 1 means that it does not fit."""
  try:
    return main(argv)
  except errors.BadInput:
    raise
  except Exception:
    traceback.print_exc()
    return 3


if __name__ == '__main__':
  logging.getLogger('absl').setLevel(logging.ERROR)
  flags.run(main_or_crash)
