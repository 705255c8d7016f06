"""Compiles a config for a TPU slice, on a machine without a TPU: does it fit, what will it cost?

  python launch/compile.py --config=configs/ngrammer_c4.py:393k_8k_50 --topology=v3:4x4

The real programs are compiled: a training step, the scoring of a segment, a token of a
continuation. Needs `pip install libtpu`. What is printed is read from the compiled programs;
times and utilisation are predictions, at best: as if computation, memory and network never
waited for each other. Exit status 1: it does not fit; 2: it cannot work at all; 3: a crash.
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

# Read when JAX and libtpu start: no device of this machine is touched, and no metadata asked for.
os.environ |= {'JAX_PLATFORMS': 'cpu', 'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'}
os.environ |= {'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_ACCELERATOR_TYPE': 'v5litepod-4'}

import flops
import hlo
import jax
from jax.experimental import topologies
import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, flags, progress, sharding
from ngrammer_jax.config import command_line
from ngrammer_jax.data import streams
from ngrammer_jax.data import vocabulary as vocabularies
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.models import heads, language_model
from ngrammer_jax.training import programs, throughput
from ngrammer_jax.training import state as train_state

SHOWN = 1e5  # bytes that a collective sends at least
PROGRAMS = ('train', 'evaluate', 'decode')


@dataclasses.dataclass(frozen=True)
class Chip:
  """What one JAX device has, from the vendor's pages (cloud.google.com/tpu/docs).

  Attributes:
    memory: GiB.
    memory_rate: GB/s.
    network_rate: GB/s that a device sends to others of its slice. None: not published so.
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


def devices_of(topology: str, slices: int) -> list[jax.Device]:
  """The devices of a slice, or of several. Raises BadInput for one that libtpu does not know."""
  more = {'num_slices': slices} if slices > 1 else {}
  if topology.startswith('v4'):  # whose two cores make one device; of v3 they are two
    more['chip_config_name'] = 'megacore'
  try:
    found = topologies.get_topology_desc(platform='tpu', topology_name=topology, **more)
  except Exception as error:
    if 'not installed' in str(error):
      raise errors.BadInput('libtpu is not installed: pip install libtpu') from error
    raise errors.BadInput(
      f'--topology={topology}: {str(error).splitlines()[0]}; expected as in v3:4x4, v4:2x2x4, '
      f'v5e:4x8, v5p:4x4x8 or v6e:8x8'
    ) from error
  kind = found.devices[0].device_kind
  if kind not in CHIPS:
    raise errors.BadInput(f'--topology={topology}: {kind} is none of {", ".join(CHIPS)}')
  return found.devices


def vocabulary_size(config: experiment.Config, given: int | None) -> int:
  """How many tokens there are. Raises BadInput where only the text would tell."""
  d = config.data
  if given is not None:
    if given < 2:
      raise errors.BadInput(f'--vocabulary_size={given} must be at least 2')
    return given
  if d.vocabulary == 'bytes':
    return vocabularies.ByteVocabulary.size
  if d.vocabulary_size is None:
    raise errors.BadInput(
      f'how many tokens data.vocabulary={d.vocabulary!r} has is known when the text is read: '
      f'say it, --vocabulary_size=N'
    )
  return d.vocabulary_size


def traced(config: experiment.Config, V: int, mesh: jax.sharding.Mesh, name: str):
  """One of PROGRAMS, its state and the tokens that it takes."""
  t = config.training
  run = programs.Programs(config, V, mesh)
  state = run.abstract()
  if name == 'train':
    shape = 1, t.batch_size, t.segment_length
    dtypes = np.int32, np.int32, bool, np.float32
    like = streams.Segment(*(jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes))
    segments = sharding.abstract(like, sharding.rows_sharding(mesh, 1))
    return run.trace(state, segments), state, t.batch_size * t.segment_length
  model = language_model.build(config.evaluation_model(), V)
  codebook = state.codebook
  with sharding.use(mesh):
    served = jax.eval_shape(
      lambda *of: heads.for_serving(model.config, *of), state.params, codebook
    )
  if served is not codebook:
    codebook = sharding.abstract(served, sharding.replicated(mesh))
  variables, engine = {'params': state.params, 'codebook': codebook}, inference.Engine(model, mesh)
  if name == 'evaluate':
    length = config.evaluation_length()
    rows = engine.round_rows(min(t.batch_size, config.evaluation.streams))
    return engine.trace_score(variables, rows, length), state, rows * length
  rows = sharding.batch_shards(mesh)
  return engine.trace_generate(variables, rows, config.evaluation_context()), state, rows


def report(config: experiment.Config, V: int, mesh: jax.sharding.Mesh, name: str) -> dict:
  """What is known of a program once it is compiled; of one that does not fit, why not."""
  kind = mesh.devices.flat[0].device_kind
  chip, began = CHIPS[kind], time.monotonic()
  trace, state, tokens = traced(config, V, mesh, name)
  found = {'parameters': train_state.count_elements(state.params), 'tokens': tokens}
  found['memory_limit'] = chip.memory * 2**30
  found['flops'] = flops.matrix_flops(trace.jaxpr.jaxpr) / mesh.size
  try:
    with sharding.use(mesh):
      compiled = trace.lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    # "... required for ... (21.61G) exceeds available HBM (15.75G)", or "Used 17.2G of 15.5G hbm"
    used = re.search(r'(?:\(|[Uu]sed )([\d.]+)([MG])', str(error))
    found['peak'] = float(used[1]) * {'M': 2**20, 'G': 2**30}[used[2]] if used else None
    found['reason'] = str(error).splitlines()[0]
    return found | {'fits': False, 'compile_seconds': time.monotonic() - began}
  found['compile_seconds'] = time.monotonic() - began
  m = compiled.memory_analysis()
  found |= {'arguments': m.argument_size_in_bytes, 'temporaries': m.temp_size_in_bytes}
  outputs = m.output_size_in_bytes - m.alias_size_in_bytes
  found['peak'] = found['arguments'] + found['temporaries'] + outputs
  found['fits'] = found['peak'] <= found['memory_limit']
  program = hlo.Program(compiled.as_text(), dict(mesh.shape))
  found['bytes'] = program.bytes_moved()
  found['collectives'] = [
    dataclasses.asdict(each) | {'sent': each.bytes_sent} for each in program.collectives()
  ]
  estimate = compiled.cost_analysis().get('optimal_seconds', 0)
  found['compiler_seconds'] = estimate if estimate > 0 else None  # of every loop one turn
  return found | predicted(config, V, found, kind, mesh.size, name)


def predicted(config, V: int, found: dict, kind: str, devices: int, name: str) -> dict:
  """The least time of a run of the program, what bounds it, and the utilisation at best."""
  chip, peak = CHIPS[kind], throughput.peak_flops(kind)
  seconds = {'compute': found['flops'] / peak, 'memory': found['bytes'] / chip.memory_rate / 1e9}
  if chip.network_rate is not None:
    sent = sum(each['sent'] for each in found['collectives'])
    seconds['network'] = sent / chip.network_rate / 1e9
  bound = max(seconds, key=seconds.get)
  made = {'seconds': seconds, 'roofline_seconds': seconds[bound], 'bound': bound}
  if name == 'train':
    of_token = throughput.train_flops(config.model, V, config.training.segment_length)
    made['mfu'] = of_token * found['tokens'] / devices / peak / seconds[bound]
  return made


def knob(config: experiment.Config, name: str) -> str:
  """What to turn where a program does not fit."""
  if name != 'train':
    return 'lower training.batch_size or evaluation.streams, or raise mesh.model'
  turns = []
  if config.model.remat != 'full':
    turns.append('model.remat="full"')
  if config.model.vocabulary_chunk is None:
    turns.append('model.vocabulary_chunk=8192')
  turns += ['a larger mesh.fsdp (parameters and optimizer state)']
  turns.append(f'training.accumulation.parts={2 * config.training.parts}')
  return ', '.join([*turns, 'a larger mesh.model', 'a smaller training.batch_size'])


def said(name: str, r: dict, config: experiment.Config) -> str:
  """A report to read."""
  gib = lambda size: '?' if size is None else f'{size / 2**30:.2f} GiB'
  fits = 'fits' if r['fits'] else f'DOES NOT FIT: {knob(config, name)}'
  lines = [f'{name}: {fits}; compiled in {progress.format_duration(r["compile_seconds"])}']
  memory = f'  memory of a device  peak {gib(r["peak"])} of {gib(r["memory_limit"])}'
  if 'arguments' in r:
    memory += f': arguments {gib(r["arguments"])}, temporaries {gib(r["temporaries"])}'
  lines.append(memory)
  lines.append(f'  tokens {r["tokens"]:,}, {r["flops"] / 1e12:.3f} TFLOP of a device')
  if not r['fits'] and 'reason' in r:
    lines.append(f'  {r["reason"]}')
  if 'bytes' not in r:
    return '\n'.join(lines)
  parts = ', '.join(f'{part} {1000 * s:.2f} ms' for part, s in r['seconds'].items())
  lines[-1] += f', {r["bytes"] / 1e9:.2f} GB moved'
  if 'network' not in r['seconds']:
    parts += ', network: no published rate'
  utilisation = f', MFU at best {r["mfu"]:.1%}' if 'mfu' in r else ''
  lines.append(f'  at least {1000 * r["roofline_seconds"]:.2f} ms ({parts}){utilisation}')
  if r['compiler_seconds']:
    lines.append(f"  the compiler's estimate, loops once: {1000 * r['compiler_seconds']:.2f} ms")
  if not any(c['sent'] >= SHOWN for c in r['collectives']):
    return '\n'.join(lines)
  lines.append(f'  {"collective":<20}{"axes":<14}{"devices":>8}{"times":>7}{"MB sent":>10}  of')
  for c in r['collectives']:
    if c['sent'] >= SHOWN:
      axes = ','.join(c['axes'])
      row = f'  {c["kind"]:<20}{axes:<14}{c["devices"]:>8}{c["times"]:>7}{c["sent"] / 1e6:>10.1f}'
      lines.append(f'{row}  {c["shape"][:60]}')
  return '\n'.join(lines)


def table(known: list[dict]) -> str:
  """Training on some slices, in a table of Markdown."""
  lines = ['| slice | devices | memory, GiB | sent, MB | at least, ms | bound by | MFU at best |']
  lines.append('|---|---|---|---|---|---|---|')
  for each in known:
    r, devices = each['programs']['train'], math.prod(each['mesh'].values())
    slices = f'{each["slices"]} x ' if each['slices'] > 1 else ''
    row = [slices + each['topology'], str(devices)]
    if 'bytes' not in r:
      lines.append(f'| {" | ".join(row)} | does not fit | | | | |')
      continue
    sent = sum(c['sent'] for c in r['collectives']) / 1e6
    row += [f'{r["peak"] / 2**30:.1f}', f'{sent:,.0f}', f'{1000 * r["roofline_seconds"]:.1f}']
    row += [r['bound'], f'{r["mfu"]:.1%}']
    lines.append(f'| {" | ".join(row)} |')
  return '\n'.join(lines)


def main(argv: list[str]) -> int:
  """Prints what is known of each program. Returns 1 where one does not fit."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--topology', required=True, nargs='+', help='one or more of v3:4x4, v5e:4x8, v5p:4x4x8, ...'
  )
  parser.add_argument('--slices', type=int, default=1, help='so many of these, over a network')
  parser.add_argument('--programs', nargs='+', choices=PROGRAMS, default=PROGRAMS)
  parser.add_argument('--vocabulary_size', type=int, help='where the config does not say')
  parser.add_argument('--json', type=pathlib.Path, help='where to write the report')
  options, config = command_line.parse(parser, argv)
  if config.model.dtype == 'auto':  # this machine would choose float32
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype='bfloat16'))
  t = dataclasses.replace(config.training, segments_per_call=1)
  config = dataclasses.replace(config, training=t)
  V = vocabulary_size(config, options.vocabulary_size)
  if options.slices < 1:
    raise errors.BadInput(f'--slices={options.slices} must be at least 1')
  if options.json is not None:
    options.json.parent.mkdir(parents=True, exist_ok=True)
  meshes, m = {}, config.mesh
  for topology in options.topology:  # all of them before the first is compiled
    devices = devices_of(topology, options.slices)
    meshes[topology] = sharding.make_mesh(m.data, m.fsdp, m.model, devices)
    sharding.check_batch('training.batch_size', t.batch_size, meshes[topology], t.parts)
  known = []
  for topology, mesh in meshes.items():
    axes = ' x '.join(f'{name} {size}' for name, size in mesh.shape.items())
    kind = mesh.devices.flat[0].device_kind
    slices = f'{options.slices} slices of ' if options.slices > 1 else ''
    print(f'{slices}{topology}: {mesh.size} devices ({kind}), mesh {axes}', flush=True)
    if slices:
      print('  what goes from slice to slice is not counted: the compiled text does not show it')
    found = {}
    for name in options.programs:
      found[name] = report(config, V, mesh, name)
      print(said(name, found[name], config), flush=True)
    known.append({'topology': topology, 'slices': options.slices, 'mesh': dict(mesh.shape)})
    known[-1]['programs'] = found
    if options.json is not None:
      options.json.write_text(json.dumps(known, indent=2) + '\n')
  reports = [r for each in known for r in each['programs'].values()]
  print(f'{reports[0]["parameters"]:,} parameters')
  if len(known) > 1 and 'train' in options.programs:
    print(table(known))
  return 0 if all(r['fits'] for r in reports) else 1


def guarded(argv: list[str]) -> int:
  """The same, and 3 where something else went wrong: 1 has a meaning of its own."""
  try:
    return main(argv)
  except errors.BadInput:
    raise
  except Exception:
    traceback.print_exc()
    return 3


if __name__ == '__main__':
  logging.getLogger('absl').setLevel(logging.ERROR)
  flags.run(guarded)
