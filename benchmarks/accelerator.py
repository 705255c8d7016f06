"""All measurements on a GPU or a TPU, in one command; the same command resumes it.

  python -m benchmarks.accelerator --minutes=9 --json=accelerator.jsonl
  python -m benchmarks.accelerator --json=accelerator.jsonl --trace
  python -m benchmarks.accelerator --cases n-grammer --predicted n-grammer=report.json

The most informative cases come first. Each runs in a process of its own, without network, and
leaves one line of JSON. Cases with a line in the file are not run again. With --minutes, a case
without enough time left does not start; the same command runs it later.

  attention   calls of cuDNN beside full scores: their errors
  step        training steps on random tokens, in bfloat16, on all devices of the machine: the
              median of 20 after 5. The floor is the time of the FLOPs of the model at the peak of
              the vendor, and MFU the floor over the time; --predicted adds the bound and the cycles
              of a report of launch/compile.py; --trace adds the share of each part of a step
  torch       steps of the same Transformer in PyTorch: torch.compile, bfloat16, flash attention
  run         a training from its command, with its input pipeline: its reported speed. The text
              has words by Zipf's law, see `random_text`

Operations are deterministic, as in the trainer, unless the name of the case says otherwise.
--tiny runs everything in small sizes.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

from launch import model_parts

ENGRAM = {
  'model.ngram_memories.0.preset': 'engram',
  'model.ngram_memories.0.key': 'tokens',  # compressed ids need the texts of tokens
  'model.ngram_memories.0.layers': '(1,8)',
  'model.ngram_memories.0.rows': '(20000,)',
  'model.ngram_memories.0.width': 32,  # 2 orders of 8 heads: 512 values a token
}
# 2 orders of 8 heads of a million rows of 32.
TABLES = ENGRAM | {
  'model.ngram_memories.0.layers': '(1,)',
  'model.ngram_memories.0.rows': '(1000000,)',
  'model.ngram_memories.0.optimizer': 'row_adagrad',
}
HOST = {'model.ngram_memories.0.table_memory': 'host'}
C4, XL = 'configs/ngrammer_c4.py', 'configs/transformer_xl.py:wt103_large'
LLAMA = 'configs/transformer.py:llama_c4'
TRANSFORMER = f'{C4}:transformer'
N_GRAMMER = f'{C4}:393k_8k_50'
XL_WORDS = {'data.vocabulary_size': 267_735}


@dataclasses.dataclass(frozen=True)
class Case:
  """One measurement.

  Attributes:
    config: of the model.
    changes: values of its keys.
    rows: of a device.
    kind: `attention`, `step`, `torch` or `run`, see above.
  """

  config: str = TRANSFORMER
  changes: dict[str, Any] = dataclasses.field(default_factory=dict)
  rows: int = 16
  kind: str = 'step'


FREE = ', not deterministic'
XLA = {'model.kernel': 'xla'}
IN_A_ROW = {'model.scan_layers': False}
# Most others are compared with the first step, or with the case without their last suffix.
CASES = {
  'transformer': Case(),
  f'transformer{FREE}': Case(),
  'attention': Case(kind='attention'),
  f'torch{FREE}': Case(kind='torch'),
  'transformer, layers in a row': Case(changes=IN_A_ROW),
  'n-grammer': Case(N_GRAMMER),
  'llama': Case(LLAMA),
  'engram': Case(changes=ENGRAM),
  'transformer, plain attention': Case(changes=XLA),
  'transformer_xl': Case(XL, XL_WORDS, 8),
  'transformer, loss in bfloat16': Case(changes={'model.loss_dtype': 'bfloat16'}),
  'transformer, remat auto': Case(changes={'model.remat': 'auto'}),
  'transformer, remat full': Case(changes={'model.remat': 'full'}),
  'transformer, windows': Case(
    changes={'model.attention.window': 256, 'model.attention.layer_pattern': "('window',)"}
  ),
  'tables': Case(changes=TABLES, kind='run'),
  'tables, on the host': Case(changes=TABLES | HOST, kind='run'),
  f'n-grammer{FREE}': Case(N_GRAMMER),
  f'llama{FREE}': Case(LLAMA),
  f'engram{FREE}': Case(changes=ENGRAM),
  f'transformer_xl{FREE}': Case(XL, XL_WORDS, 8),
  f'transformer{FREE}, plain attention': Case(changes=XLA),
  f'llama{FREE}, plain attention': Case(LLAMA, XLA),
}
FIRST_LIMIT = 4.0  # minutes of a case, before one has ended
TINY = {'model.layers': 2, 'model.width': 64, 'model.heads': 4, 'model.feed_forward_width': 96}
TINY |= {'training.segment_length': 32, 'model.vocabulary_chunk': None}
TINY_NGRAMS = {
  'model.ngram.vocabulary_size': 4096,
  'model.ngram.clusters': 16,
  'model.ngram.dim': 8,
}
TINY_ENGRAM = {'model.ngram_memories.0.layers': '(1,)', 'model.ngram_memories.0.rows': '(100,)'}
WORDS = 32_000  # of a random text
# Calls of attention kernels in a compiled program.
KERNELS = re.compile(r'custom_call_target="(__cudnn\$\w+|\w*[tT]riton\w*|tpu_custom_call)"')
CONTAINERS = ('while', 'cond', 'conditional', 'call')  # of operations that are counted themselves
SCOPE_OF = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name="([^"]*)"', re.MULTILINE)


def changes_of(case: Case, is_tiny: bool) -> tuple[dict[str, Any], int]:
  """Returns the changes of the config of a case, and its rows; --tiny has more changes."""
  changes = case.changes
  if not is_tiny:
    return changes, case.rows
  changes = changes | TINY
  if case.config == N_GRAMMER:
    changes |= TINY_NGRAMS
  if 'model.ngram_memories.0.preset' in changes:
    changes |= TINY_ENGRAM
  if case.config == XL:
    changes |= {'model.memory.length': 32}
  if 'model.attention.window' in changes:
    changes |= {'model.attention.window': 8}
  return changes, 2


def resolve(name: str, is_tiny: bool) -> tuple[Any, int]:
  """Returns the config of a case, and its rows on all devices."""
  import jax

  from ngrammer_jax import command_line

  case = CASES[name]
  changes, rows = changes_of(case, is_tiny)
  rows *= jax.device_count()
  changes = changes | {'training.batch_size': rows, 'training.segments_per_call': 1}
  config = command_line.resolve(case.config, [(key, str(value)) for key, value in changes.items()])
  return config, rows


def measure_step(name: str, options: argparse.Namespace) -> dict[str, Any]:
  """Compiles the training step of a case, and runs it. Returns seconds, memory and kernels."""
  import jax
  import numpy as np

  from ngrammer_jax import sharding
  from ngrammer_jax.data.rows import token_batch
  from ngrammer_jax.models import model_variables
  from ngrammer_jax.training import flops, preparation, programs

  config, rows = resolve(name, options.tiny)
  V = config.data.vocabulary_size
  T = config.training.segment_length
  mesh = sharding.make_mesh()
  notes = preparation.speed_notes(config, mesh)
  run = programs.Programs(config, V, mesh)
  random = np.random.default_rng(0)

  def segments():
    tokens = random.integers(0, V, (1, rows, T), np.int32)
    segment = token_batch.Batch(
      tokens, tokens, np.zeros(tokens.shape, bool), np.ones(tokens.shape, np.float32)
    )
    load = lambda own: token_batch.map_batches(lambda array: array[:, own], segment)
    return sharding.global_rows(mesh, rows, load, axis=1)

  state = run.pack(run.create())
  batches = [segments() for _ in range(4)]
  start = time.perf_counter()
  run.compile(state, batches[0])
  compile_seconds = time.perf_counter() - start
  compiled = run.compiled
  seconds = []

  def step():
    nonlocal state
    start = time.perf_counter()
    state, metrics = run.call(state, batches[len(seconds) % 4], 1)
    assert np.isfinite(jax.device_get(metrics['loss'])).all()  # also waits
    seconds.append(time.perf_counter() - start)

  for _ in range(options.warmup + options.steps):
    step()
  device = jax.devices()[0]
  model_flops = 3 * run.flops.forward() * rows * T / jax.device_count()
  peak = flops.peak_flops(device.device_kind)
  kernels = KERNELS.findall(compiled.as_text())
  result = {
    'device': f'{jax.device_count()} x {device.device_kind}',
    'jax': jax.__version__,
    'flags': os.environ.get('XLA_FLAGS', ''),
    'notes': notes,
    'parameters': model_variables.count_elements(run.abstract.params),
    'tokens': rows * T,
    'compile_seconds': compile_seconds,
    'remat': run.remat,
    'seconds': float(np.median(seconds[options.warmup :])),
    'all_seconds': list(seconds),
    'floor': model_flops / peak if peak else None,
    'peak_bytes': peak_bytes(compiled, device),
    'kernels': {kernel: kernels.count(kernel) for kernel in sorted(set(kernels))},
  }
  if options.trace:
    result['parts'] = trace(step, compiled.as_text())
  return result


def trace(step: Any, text: str, steps: int = 3) -> dict[str, float]:
  """Returns the seconds of each part of a step on the device, the longest first.

  Args:
    step: runs one step.
    text: the compiled program, whose instructions have the scopes of the model.
    steps: number of steps that are traced.
  """
  import jax

  scopes = dict(SCOPE_OF.findall(text))
  seconds: dict[str, float] = {}
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      for _ in range(steps):
        step()
    (file,) = pathlib.Path(folder).rglob('*.xplane.pb')
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
      for event in (event for line in plane.lines for event in line.events):
        instruction = dict(event.stats).get('hlo_op')
        if instruction is None or str(instruction).split('.')[0] in CONTAINERS:
          continue
        part = model_parts.part_of(scopes.get(str(instruction), ''))
        seconds[part] = seconds.get(part, 0.0) + event.duration_ns / 1e9 / steps
  return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def peak_bytes(compiled: Any, device: Any) -> int:
  """Returns the peak of the memory of a device: measured, or that of the compiled program."""
  from ngrammer_jax.training import capacity

  return (device.memory_stats() or {}).get('peak_bytes_in_use') or capacity.peak_bytes(compiled)


def measure_attention(name: str, options: argparse.Namespace) -> dict[str, Any]:
  """Compares the calls of cuDNN with full scores, for the heads of several models."""
  import jax

  from ngrammer_jax.layers.attention import cudnn, cudnn_support

  del name, options
  found = {}
  for N, C, H in ((8, 8, 128), (16, 4, 64), (16, 16, 64), (4, 1, 256)):
    heads = {}
    for call in cudnn.CALLS:
      for window in (None, cudnn_support.CHECKED_WINDOW):
        label = call if window is None else f'{call}, window'
        heads[label] = cudnn_support.error_or_problem(call, window, (N, C, H), 'bfloat16')
    found[f'{N} heads, {C} key heads of {H}'] = heads
  return {'device': jax.devices()[0].device_kind, 'jax': jax.__version__, 'errors': found}


def measure_torch(name: str, options: argparse.Namespace) -> dict[str, Any]:
  """Runs the Transformer in PyTorch."""
  from benchmarks import torch_transformer
  from ngrammer_jax.training import flops

  config, rows = resolve(name, options.tiny)
  result = torch_transformer.measure(config, rows, options.steps, options.warmup)
  peak = flops.peak_flops(result['device'])
  model_flops = result.pop('model_flops')
  result['floor'] = model_flops / peak if peak else None
  return result


def random_text(count: int) -> str:
  """Returns words by Zipf's law, so that about as many different n-grams occur as in a text.

  Look-ups of a table take the time of the different rows. Of 16,384 words in a row, 67 % of the
  pairs and 96 % of the triples are different; in text8 68 % and 90 %, in enwik8 60 % and 83 %.
  """
  import numpy as np

  shares = (np.arange(1, WORDS + 1) + 2.7) ** -1.3
  ids = np.random.default_rng(0).choice(WORDS, count, p=shares / shares.sum())
  return ' '.join(map(str, ids))


def measure_run(name: str, options: argparse.Namespace) -> dict[str, Any]:
  """Trains on random text by the command of a training; returns the speed that it reports."""
  case = CASES[name]
  changes, rows = changes_of(case, options.tiny)
  steps = options.warmup + options.steps
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'text.txt'
    path.write_text(random_text(2**14 if options.tiny else 2**21), encoding='utf-8')
    changes = changes | {
      'data.corpus': 'text',
      'data.path': path,
      'data.vocabulary': 'words',
      'data.vocabulary_size': WORDS,
      'data.shuffle': None,
      'training.batch_size': rows,
      'training.steps': steps,
      'training.log_every': max(1, options.steps // 2),
      'training.evaluate_every': 0,
      'training.checkpoint_every': steps,
      'evaluation.streams': 2,
      'evaluation.max_tokens': 64,
    }
    command = [sys.executable, '-m', 'ngrammer_jax.train', f'--config={case.config}']
    command += [f'--workdir={folder}/run']
    command += [f'--config.{key}={value}' for key, value in changes.items()]
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode:
      raise RuntimeError(child.stderr[-2000:] or child.stdout[-2000:])
    lines = (pathlib.Path(folder) / 'run' / 'metrics.jsonl').read_text(encoding='utf-8')
  rates = [json.loads(line).get('tokens_per_second') for line in lines.splitlines()]
  rates = [rate for rate in rates if rate]
  tokens = rows * (TINY['training.segment_length'] if options.tiny else 1024)
  return {'tokens': tokens, 'seconds': tokens / rates[-1], 'tokens_per_second': rates}


MEASURES = {
  'attention': measure_attention,
  'step': measure_step,
  'torch': measure_torch,
  'run': measure_run,
}


def format_line(result: dict[str, Any], results: dict[str, Any], predicted: dict) -> str:
  """Formats a result, and how it compares with the case without its suffix, or the first."""
  case = result['case']
  if problem := result.get('failed'):
    return f'{case}: failed\n{problem}'
  if 'errors' in result:
    return f'{case}: {json.dumps(result["errors"])}'
  seconds = result['seconds']
  line = f'{case:32} {1e3 * seconds:9.2f} ms'
  if result.get('floor'):
    line += f'  floor {1e3 * result["floor"]:8.2f} ms  MFU {result["floor"] / seconds:6.1%}'
  line += f'  {result["tokens"] / seconds:11,.0f} tokens/s'
  if 'peak_bytes' in result:
    line += f'  {result["peak_bytes"] / 2**30:6.2f} GiB'
  other = case.rpartition(',')[0] if ',' in case else next(iter(CASES))
  if other not in results:
    other = next(iter(CASES))
  if other != case and 'seconds' in results.get(other, {}):
    line += f'  {seconds / results[other]["seconds"]:.3f} of {other}'
  if report := predicted.get(case):
    train = report['train']
    line += f'  predicted {1e3 * train["bound"]:.1f} ms, cycles {1e3 * train["cycles"]:.1f} ms'
  line += ''.join(f'  {count} {name}' for name, count in result.get('kernels', {}).items())
  parts = result.get('parts', {})
  total = sum(parts.values())
  return line + ''.join(f'\n{seconds / total:8.1%}  {part}' for part, seconds in parts.items())


def read_results(path: pathlib.Path | None) -> dict[str, Any]:
  """Returns the results of a file by case; without the file, none."""
  results = {}
  if path is not None and path.exists():
    for line in path.read_text(encoding='utf-8').splitlines():
      with contextlib.suppress(json.JSONDecodeError):  # of a process that ended while it wrote
        result = json.loads(line)
        results[result['case']] = result
  return results


def append_result(path: pathlib.Path, result: dict[str, Any]) -> None:
  """Appends a line to the file of the results."""
  is_cut = path.exists() and not path.read_bytes().endswith(b'\n')
  with path.open('a', encoding='utf-8') as file:
    file.write('\n' * is_cut + json.dumps(result) + '\n')


def run_case(case: str, options: argparse.Namespace, limit: float) -> dict[str, Any] | None:
  """Runs a case in a process. Returns its result; None: the limit, in seconds, was too short."""
  own_flags = f'--xla_gpu_deterministic_ops={FREE not in case} '
  environment = os.environ | {'XLA_FLAGS': own_flags + os.environ.get('XLA_FLAGS', '')}
  if CASES[case].kind == 'torch':
    environment['JAX_PLATFORMS'] = 'cpu'  # JAX would take most of the memory of the GPU
  command = [sys.executable, '-m', 'benchmarks.accelerator', '--child', '--cases', case]
  command += [f'--steps={options.steps}', f'--warmup={options.warmup}']
  command += ['--tiny'] * options.tiny + ['--trace'] * options.trace
  start = time.monotonic()
  try:
    child = subprocess.run(
      command, env=environment, capture_output=True, text=True, timeout=limit or None
    )
  except subprocess.TimeoutExpired:
    return None
  if child.returncode:
    result = {'failed': child.stderr[-2000:]}
  else:
    result = json.loads(child.stdout.splitlines()[-1])
  return {'case': case, 'minutes': (time.monotonic() - start) / 60} | result


def main() -> int:
  """Prints and writes a line for each case. Returns the exit status: 0 if all have a result."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--cases', nargs='*', choices=CASES, default=[*CASES], metavar='CASE')
  parser.add_argument('--minutes', type=float, default=0.0, help='stop before; 0: no limit')
  parser.add_argument('--steps', type=int, default=20, help='timed steps')
  parser.add_argument('--warmup', type=int, default=5, help='steps before them')
  parser.add_argument('--trace', action='store_true', help='the share of each part of a step')
  parser.add_argument('--predicted', nargs='*', default=[], metavar='CASE=REPORT')
  parser.add_argument('--json', type=pathlib.Path, help='file of the results, a line each')
  parser.add_argument('--tiny', action='store_true', help='small sizes, to try the script')
  parser.add_argument('--child', action='store_true', help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.child:
    (case,) = options.cases
    print(json.dumps(MEASURES[CASES[case].kind](case, options)))
    return 0
  predicted = {}
  for name, path in (item.split('=', 1) for item in options.predicted):
    predicted[name] = json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
  end = time.monotonic() + 60 * options.minutes
  results = read_results(options.json)
  has_run = False
  for case in options.cases:
    if case in results:
      continue
    remaining = 0.0
    if options.minutes:
      remaining = end - time.monotonic()
      took = [result['minutes'] for result in results.values() if 'failed' not in result]
      longest = max(took, default=FIRST_LIMIT)
      if has_run and remaining < 60 * longest:
        break
    result = run_case(case, options, remaining)
    if result is None and has_run:
      break
    has_run = True
    if result is None:  # it had all the minutes
      result = {'case': case, 'minutes': options.minutes, 'failed': 'takes longer than --minutes'}
    results[case] = result
    print(format_line(result, results, predicted), flush=True)
    if options.json:
      append_result(options.json, result)
  left = [case for case in options.cases if case not in results]
  if left:
    print(f'{len(left)} cases are left, from {left[0]!r} on: the same command goes on', flush=True)
  return int(bool(left) or any('failed' in results[case] for case in options.cases))


if __name__ == '__main__':
  sys.exit(main())
