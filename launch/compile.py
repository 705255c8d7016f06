"""Compiles a config for TPU slices without a TPU: memory, collectives and predicted times.

  python launch/compile.py --config=configs/ngrammer_c4.py:393k_8k_50 --topology=v3:4x4

It compiles the programs of a run: a training step, the scoring of a segment, and the generation of
a token; for a model with tables in host memory also the look-up of the rows of a segment, which
runs ahead of its scoring. Needs `pip install libtpu`. All numbers are read from the compiled
programs. Times and utilisation are bounds: they assume that computation, memory and network fully
overlap; they do not count transfers to and from the host.

Exit status 1: a program does not fit; 2: bad input; 3: any other error.
"""

import argparse
import dataclasses
import json
import logging
import math
import os
import pathlib
import re
import time
import traceback

# JAX and libtpu read these when they start; then they use no device and query no metadata server.
os.environ |= {'JAX_PLATFORMS': 'cpu', 'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'}
os.environ |= {'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_ACCELERATOR_TYPE': 'v5litepod-4'}

import hlo
import jax
from jax.experimental import topologies
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, flags, sharding
from ngrammer_jax.checkpoints import checksums
from ngrammer_jax.config import command_line
from ngrammer_jax.data import streams, vocabularies
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.models import heads, host_tables, language_model
from ngrammer_jax.system import progress, text_tables
from ngrammer_jax.training import capacity, flops, programs
from ngrammer_jax.training import state as train_state

MIN_BYTES_SENT = 1e5  # smaller collectives are not listed
MIN_MILLISECONDS = 0.01  # a smaller estimate of the compiler is not shown
VOCABULARY_CHUNK = 8192  # of the remedy for logits that do not fit
PROGRAMS = ('train', 'evaluate', 'decode', 'look_up')


@dataclasses.dataclass(frozen=True)
class Chip:
  """Specifications of one JAX device, from cloud.google.com/tpu/docs.

  Attributes:
    memory: GiB.
    memory_rate: GB/s.
    network_rate: GB/s that a device sends to others of its slice. None: not published.
  """

  memory: float
  memory_rate: float
  network_rate: float | None


CHIPS = {
  'TPU v3': Chip(16, 450, None),  # one of the two cores of a chip
  'TPU v4': Chip(32, 1200, None),
  'TPU v5 lite': Chip(16, 819, 200),
  'TPU v5': Chip(95, 2765, 600),
  'TPU v6 lite': Chip(32, 1638, 400),
}


def slice_devices(topology: str, slices: int) -> list[jax.Device]:
  """Returns the devices of one or more slices. Raises BadInput if libtpu has no such topology."""
  options = {'num_slices': slices} if slices > 1 else {}
  if topology.startswith(
    'v4'
  ):  # the two cores of a v4 chip are one device, those of a v3 chip are two
    options['chip_config_name'] = 'megacore'
  try:
    devices = topologies.get_topology_desc(
      platform='tpu', topology_name=topology, **options
    ).devices
  except Exception as error:
    if 'not installed' in str(error):
      raise errors.BadInput('libtpu is not installed: pip install libtpu') from error
    raise errors.BadInput(
      f'--topology={topology}: {str(error).splitlines()[0]}; expected for example v3:4x4, '
      f'v4:2x2x4, v5e:4x8, v5p:4x4x8 or v6e:8x8'
    ) from error
  kind = devices[0].device_kind
  if kind not in CHIPS:
    raise errors.BadInput(f'--topology={topology}: {kind} is not one of: {", ".join(CHIPS)}')
  return devices


def vocabulary_size(config: experiment.Config, override: int | None) -> int:
  """Returns the vocabulary size. Raises BadInput if it depends on the text."""
  d = config.data
  if override is not None:
    if override < 2:
      raise errors.BadInput(f'--vocabulary_size={override} must be at least 2')
    return override
  if d.vocabulary == 'bytes':
    return vocabularies.ByteVocabulary.size
  if d.vocabulary_size is None:
    raise errors.BadInput(
      f'the size of data.vocabulary={d.vocabulary!r} depends on the text: set --vocabulary_size=N'
    )
  return d.vocabulary_size


def trace_program(
  run: programs.Programs, config: experiment.Config, V: int, name: str
) -> tuple[jax.stages.Traced, int]:
  """Returns one of PROGRAMS, traced, and the number of tokens that it processes."""
  t, state, mesh = config.training, run.abstract, run.mesh
  if name == 'train':
    shape = 1, t.batch_size, t.segment_length
    dtypes = np.int32, np.int32, bool, np.float32
    segments = streams.Segment(*(jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes))
    segments = sharding.abstract(segments, sharding.rows_sharding(mesh, 1))
    return run.trace(state, segments), t.batch_size * t.segment_length
  model = language_model.build(config.evaluation_model(), V)
  codebook = state.codebook
  with sharding.use(mesh):
    serving = jax.eval_shape(
      lambda *variables: heads.for_serving(model.config, *variables), state.params, codebook
    )
  if serving is not codebook:
    codebook = sharding.abstract(serving, sharding.replicated(mesh))
  variables, engine = {'params': state.params, 'codebook': codebook}, inference.Engine(model, mesh)
  if name in ('evaluate', 'look_up'):
    length = config.evaluation_length()
    rows = engine.round_rows(min(t.batch_size, config.evaluation.streams))
    trace = engine.trace_score if name == 'evaluate' else engine.trace_look_up
    return trace(variables, rows, length), rows * length
  rows = sharding.batch_shards(mesh)
  return engine.trace_generate(variables, rows, config.evaluation_context()), rows


def table_sizes(run: programs.Programs) -> dict[str, dict]:
  """Returns shape, dtype and bytes of each n-gram table, in the memories of a device and its host.

  The bytes of the optimizer state come with them; they are in the same memory.
  """
  sizes = {}
  is_table = jax.tree.map(lambda label: label != 'dense', run.labels)
  leaves = checksums.named_leaves(run.abstract.params)
  for name, selected in checksums.named_leaves(is_table).items():
    if not selected:
      continue
    leaf, bytes_of = leaves[name], {'device': 0, 'host': 0}
    state = checksums.named_leaves(run.abstract.opt_state)
    moments = [state[key] for key in state if key.endswith(f'/{name}')]
    for array in [leaf, *moments]:
      memory = 'host' if sharding.is_on_host(array) else 'device'
      rows, width = array.sharding.shard_shape(array.shape)
      bytes_of[memory] += rows * width * array.dtype.itemsize
    sizes[name] = {'shape': leaf.shape, 'dtype': str(leaf.dtype), **bytes_of}
  return sizes


def format_tables(sizes: dict[str, dict]) -> str:
  """Formats the sizes of n-gram tables."""
  rows = [
    ('table, with its optimizer state', 'shape', 'dtype', 'GiB per device', 'GiB on its host')
  ]
  for name, table in sizes.items():
    shape = ' x '.join(f'{size:,}' for size in table['shape'])
    gib = (f'{table[memory] / 2**30:.2f}' for memory in ('device', 'host'))
    rows.append((name, shape, table['dtype'], *gib))
  return '\n'.join(f'  {line}' for line in text_tables.align_columns(rows, '<>'))


def compile_program(config: experiment.Config, V: int, run: programs.Programs, name: str) -> dict:
  """Compiles one of PROGRAMS; returns its statistics, or why it does not fit."""
  mesh = run.mesh
  kind = mesh.devices.flat[0].device_kind
  chip, start_time = CHIPS[kind], time.monotonic()
  traced, tokens = trace_program(run, config, V, name)
  result = {'parameters': train_state.count_elements(run.abstract.params), 'tokens': tokens}
  result['memory_limit'] = chip.memory * 2**30
  result['flops'] = flops.matrix_flops(traced.jaxpr) / mesh.size
  try:
    with sharding.use(mesh):
      compiled = traced.lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    # "... required for ... (21.61G) exceeds available HBM (15.75G)", or "Used 17.2G of 15.5G hbm"
    used = re.search(r'(?:\(|[Uu]sed )([\d.]+)([MG])', str(error))
    result['peak'] = float(used[1]) * {'M': 2**20, 'G': 2**30}[used[2]] if used else None
    result['reason'] = str(error).splitlines()[0]
    result |= {'fits': False, 'compile_seconds': time.monotonic() - start_time}
    return result | {'remedies': remedies(config, V, run, name)}
  result['compile_seconds'] = time.monotonic() - start_time
  m = compiled.memory_analysis()
  result |= {'arguments': m.argument_size_in_bytes, 'temporaries': m.temp_size_in_bytes}
  result['host'] = m.host_argument_size_in_bytes + m.host_temp_size_in_bytes
  result['peak'] = capacity.peak_bytes(compiled)
  result['fits'] = result['peak'] <= result['memory_limit']
  if not result['fits']:
    result['remedies'] = remedies(config, V, run, name)
  program = hlo.Program(compiled.as_text(), dict(mesh.shape))
  result['bytes'] = program.bytes_moved()
  result['collectives'] = [
    dataclasses.asdict(c) | {'sent': c.bytes_sent} for c in program.collectives()
  ]
  estimate = compiled.cost_analysis().get('optimal_seconds', 0)
  result['compiler_seconds'] = estimate if estimate > 0 else None  # counts loops once
  result |= predict_time(result, kind)
  if name == 'train':
    model_flops = 3 * run.flops.forward() * tokens / mesh.size
    result['mfu'] = model_flops / flops.peak_flops(kind) / result['roofline_seconds']
  return result


def predict_time(result: dict, kind: str) -> dict:
  """Returns lower bounds of the time by computation, memory and network, and the largest."""
  chip = CHIPS[kind]
  seconds = {'compute': result['flops'] / flops.peak_flops(kind)}
  seconds['memory'] = result['bytes'] / chip.memory_rate / 1e9
  if chip.network_rate is not None:
    sent = sum(c['sent'] for c in result['collectives'])
    seconds['network'] = sent / chip.network_rate / 1e9
  bound = max(seconds, key=seconds.get)
  return {'seconds': seconds, 'roofline_seconds': seconds[bound], 'bound': bound}


def device_bytes(arrays: object) -> int:
  """Returns the bytes of a tree of arrays in the memory of a device."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(arrays)
    if not sharding.is_on_host(leaf)
  )


def remedies(config: experiment.Config, V: int, run: programs.Programs, name: str) -> str:
  """Names the options that reduce the memory of a program."""
  limit, state = CHIPS[run.mesh.devices.flat[0].device_kind].memory * 2**30, run.abstract
  fixed, arrays = 'parameters', state.params
  if name == 'train':
    fixed, arrays = 'parameters and optimizer state', (state.params, state.opt_state)
  if (size := device_bytes(arrays)) > limit:
    return (
      f'{fixed} alone need {size / 2**30:.2f} GiB per device: shard them over more devices, with '
      f'a larger mesh.fsdp or mesh.model'
    )
  if name == 'decode':
    return 'lower evaluation.segment_length or the length of the memory, or raise mesh.model'
  if name != 'train':
    return 'lower training.batch_size or evaluation.streams, or raise mesh.model'
  options, t = [], config.training
  if config.model.remat != 'full':
    options.append('model.remat="full"')
  if config.model.vocabulary_chunk is None and V > VOCABULARY_CHUNK:
    options.append(f'model.vocabulary_chunk={VOCABULARY_CHUNK}')
  options.append('a larger mesh.fsdp (parameters and optimizer state)')
  if t.batch_size % (2 * t.parts * sharding.batch_shards(run.mesh)) == 0:
    options.append(f'training.accumulation.parts={2 * t.parts}')
  return ', '.join([*options, 'a larger mesh.model', 'a smaller training.batch_size'])


def format_report(name: str, r: dict) -> str:
  """Formats the statistics of a program."""
  gib = lambda size: '?' if size is None else f'{size / 2**30:.2f} GiB'
  status = 'fits' if r['fits'] else f'DOES NOT FIT: {r["remedies"]}'
  compiled = 'compiled in' if 'bytes' in r else 'the compiler stopped after'
  memory = f'  memory per device  peak {gib(r["peak"])} of {gib(r["memory_limit"])}'
  if 'arguments' in r:
    memory += f': arguments {gib(r["arguments"])}, temporaries {gib(r["temporaries"])}'
    memory += f'; on its host {gib(r["host"])}' if r['host'] else ''
  lines = [
    f'{name}: {status}; {compiled} {progress.format_duration(r["compile_seconds"])}',
    memory,
    f'  tokens {r["tokens"]:,}, {r["flops"] / 1e12:.3f} TFLOP per device',
  ]
  if 'bytes' not in r:
    return '\n'.join([*lines, f'  {r["reason"]}'])
  lines[-1] += f', {r["bytes"] / 1e9:.2f} GB moved'
  parts = ', '.join(f'{part} {1000 * s:.2f} ms' for part, s in r['seconds'].items())
  if 'network' not in r['seconds']:
    parts += ', network: no published rate'
  utilisation = f', MFU at best {r["mfu"]:.1%}' if 'mfu' in r else ''
  lines.append(f'  at least {1000 * r["roofline_seconds"]:.2f} ms ({parts}){utilisation}')
  milliseconds = 1000 * (r['compiler_seconds'] or 0)
  if milliseconds >= MIN_MILLISECONDS:
    lines.append(f"  the compiler's estimate, loops counted once: {milliseconds:.2f} ms")
  collectives = [c for c in r['collectives'] if c['sent'] >= MIN_BYTES_SENT]
  if collectives:
    lines.append(f'  {"collective":<20}{"axes":<14}{"devices":>8}{"times":>7}{"MB sent":>10}  of')
  for c in collectives:
    row = f'  {c["kind"]:<20}{",".join(c["axes"]):<14}{c["devices"]:>8}{c["times"]:>7}'
    lines.append(f'{row}{c["sent"] / 1e6:>10.1f}  {c["shape"][:60]}')
  return '\n'.join(lines)


def format_table(reports: list[dict]) -> str:
  """Formats training on several slices as a table in Markdown."""
  lines = ['| slice | devices | memory, GiB | sent, MB | at least, ms | bound by | MFU at best |']
  lines.append('|---|---|---|---|---|---|---|')
  for report in reports:
    r, devices = report['programs']['train'], math.prod(report['mesh'].values())
    slices = f'{report["slices"]} x ' if report['slices'] > 1 else ''
    row = [slices + report['topology'], str(devices)]
    if 'bytes' not in r:
      lines.append(f'| {" | ".join(row)} | does not fit | | | | |')
      continue
    sent = sum(c['sent'] for c in r['collectives']) / 1e6
    row += [f'{r["peak"] / 2**30:.1f}', f'{sent:,.0f}', f'{1000 * r["roofline_seconds"]:.1f}']
    row += [r['bound'], f'{r["mfu"]:.1%}']
    lines.append(f'| {" | ".join(row)} |')
  return '\n'.join(lines)


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, experiment.Config]:
  """Returns the flags, and the config as on a TPU, with one step per call."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--topology',
    required=True,
    nargs='+',
    help='one or more topologies, such as v3:4x4, v5e:4x8 or v5p:4x4x8',
  )
  parser.add_argument('--slices', type=int, default=1, help='number of slices (default: 1)')
  parser.add_argument(
    '--programs', nargs='+', choices=PROGRAMS, default=PROGRAMS, help='default: all of them'
  )
  parser.add_argument(
    '--vocabulary_size', type=int, help='vocabulary size, if in the config it depends on the text'
  )
  parser.add_argument('--json', type=pathlib.Path, help='file for the report')
  args, config = command_line.parse(parser, argv, flags.complete_memories)
  if args.slices < 1:
    raise errors.BadInput(f'--slices={args.slices} must be at least 1')
  model, training = config.model, dataclasses.replace(config.training, segments_per_call=1)
  if model.dtype == 'auto':  # 'auto' would be float32 on this machine
    model = dataclasses.replace(model, dtype='bfloat16')
  return args, dataclasses.replace(config, model=model, training=training)


def main(argv: list[str]) -> int:
  """Prints the statistics of each program. Returns 1 if one does not fit."""
  args, config = parse_args(argv)
  V, m, t = vocabulary_size(config, args.vocabulary_size), config.mesh, config.training
  config.model.check_vocabulary(V)
  if args.json is not None:
    args.json.parent.mkdir(parents=True, exist_ok=True)
  meshes = {}
  for topology in args.topology:  # errors in any topology are reported before compiling
    devices = slice_devices(topology, args.slices)
    meshes[topology] = sharding.make_mesh(m.data, m.fsdp, m.model, devices)
    sharding.check_batch('training.batch_size', t.batch_size, meshes[topology], t.parts)
  reports = []
  for topology, mesh in meshes.items():
    axes = ' x '.join(f'{name} {size}' for name, size in mesh.shape.items())
    kind = mesh.devices.flat[0].device_kind
    slices = f'{args.slices} slices of ' if args.slices > 1 else ''
    print(f'{slices}{topology}: {mesh.size} devices ({kind}), mesh {axes}', flush=True)
    if slices:
      print('  traffic between slices is not counted: it is not in the compiled text')
    run, results = programs.Programs(config, V, mesh), {}
    device_programs = [name for name in args.programs if name != 'look_up']
    sizes = table_sizes(run)
    if sizes:
      print(format_tables(sizes), flush=True)
    for name in args.programs if host_tables.exist(config.model) else device_programs:
      results[name] = compile_program(config, V, run, name)
      print(format_report(name, results[name]), flush=True)
    report = {'topology': topology, 'slices': args.slices, 'mesh': dict(mesh.shape)}
    reports.append(report | {'tables': sizes, 'programs': results})
    if args.json is not None:
      args.json.write_text(json.dumps(reports, indent=2) + '\n')
  results = [result for report in reports for result in report['programs'].values()]
  print(f'{results[0]["parameters"]:,} parameters')
  if len(reports) > 1 and 'train' in args.programs:
    print(format_table(reports))
  return 0 if all(result['fits'] for result in results) else 1


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
