"""Training steps on a TPU or GPU: measured beside predicted, for whoever has one.

  python -m benchmarks.accelerator --json=accelerator.json
  python -m benchmarks.accelerator --predicted n-grammer=report.json

Each case below is compiled and run in a process of its own, on random tokens and all devices of the
machine, in bfloat16. The time of a step is the median of 20 after 5. The floor is the time of the
FLOPs of the model at the peak of the vendor (MFU is the floor over the time); --predicted adds the
bound and the cycles of a report of launch/compile.py. Kernels are compared with the plain path, and
the deterministic operations of GPUs, which the trainer enables, with the others. Hand in the JSON.
--tiny runs everything in small sizes.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

ENGRAM = {
  'model.ngram_memories.0.preset': 'engram',
  'model.ngram_memories.0.key': 'tokens',  # compressed ids need the texts of tokens
  'model.ngram_memories.0.layers': '(1,8)',
  'model.ngram_memories.0.rows': '(20000,)',
  'model.ngram_memories.0.width': 32,  # 2 orders of 8 heads: 512 values a token
}
C4, XL = 'configs/ngrammer_c4.py', 'configs/transformer_xl.py:wt103_large'
LLAMA = 'configs/transformer.py:llama_c4'
# Config, changes, and rows of a device. The first is the one that the others are compared with.
CASES = {
  'transformer': (f'{C4}:transformer', {}, 16),
  'n-grammer': (f'{C4}:393k_8k_50', {}, 16),
  'engram': (f'{C4}:transformer', ENGRAM, 16),
  'llama': (LLAMA, {}, 16),
  'transformer_xl': (XL, {'data.vocabulary_size': 267_735}, 8),
  'transformer, plain attention': (f'{C4}:transformer', {'model.kernel': 'xla'}, 16),
  'transformer, not deterministic': (f'{C4}:transformer', {}, 16),
  'n-grammer, not deterministic': (f'{C4}:393k_8k_50', {}, 16),
  'llama, not deterministic': (LLAMA, {}, 16),
  'transformer, not deterministic, cudnn': (f'{C4}:transformer', {'model.kernel': 'cudnn'}, 16),
  'llama, not deterministic, cudnn': (LLAMA, {'model.kernel': 'cudnn'}, 16),
}
TINY = {'model.layers': 2, 'model.width': 64, 'model.heads': 4, 'model.feed_forward_width': 96}
TINY |= {'training.segment_length': 32, 'model.vocabulary_chunk': None}
TINY_NGRAMS = {
  'model.ngram.vocabulary_size': 4096,
  'model.ngram.clusters': 16,
  'model.ngram.dim': 8,
}
TINY_ENGRAM = {'model.ngram_memories.0.layers': '(1,)', 'model.ngram_memories.0.rows': '(100,)'}
# Calls of attention kernels in a compiled program.
KERNELS = re.compile(r'custom_call_target="(__cudnn\$\w+|\w*[tT]riton\w*|tpu_custom_call)"')


def measure(case: str, steps: int, warmup: int, is_tiny: bool) -> dict[str, Any]:
  """Compiles the training step of a case, and runs it. Returns seconds, memory and kernels."""
  import jax
  import numpy as np

  from ngrammer_jax import command_line, sharding
  from ngrammer_jax.data.rows import token_batch
  from ngrammer_jax.models import model_variables
  from ngrammer_jax.training import flops, programs

  spec, changes, rows = CASES[case]
  if is_tiny:
    rows = 2
    of_ngrams = TINY_NGRAMS if '393k' in spec else {}
    changes = changes | TINY | of_ngrams | (TINY_ENGRAM if changes is ENGRAM else {})
    if spec == XL:
      changes |= {'model.memory.length': 32}
  rows *= jax.device_count()
  changes = changes | {'training.batch_size': rows, 'training.segments_per_call': 1}
  config = command_line.resolve(spec, [(key, str(value)) for key, value in changes.items()])
  V = config.data.vocabulary_size
  T = config.training.segment_length
  mesh = sharding.make_mesh()
  run = programs.Programs(config, V, mesh)
  start = time.perf_counter()
  compiled = run.trace_program('train')[0].lower().compile()
  compile_seconds = time.perf_counter() - start
  random = np.random.default_rng(0)

  def segments():
    tokens = random.integers(0, V, (1, rows, T), np.int32)
    segment = token_batch.Batch(
      tokens, tokens, np.zeros(tokens.shape, bool), np.ones(tokens.shape, np.float32)
    )
    load = lambda own: token_batch.map_batches(lambda array: array[:, own], segment)
    return sharding.global_rows(mesh, rows, load, axis=1)

  state = run.pack(run.create())
  seconds = []
  for batch in [segments() for _ in range(4)] * -(-(steps + warmup) // 4):
    start = time.perf_counter()
    state, metrics = compiled(state, batch, np.int32(1))
    assert np.isfinite(jax.device_get(metrics['loss'])).all()  # also waits
    seconds.append(time.perf_counter() - start)
  device = jax.devices()[0]
  model_flops = 3 * run.flops.forward() * rows * T / jax.device_count()
  peak = flops.peak_flops(device.device_kind)
  kernels = KERNELS.findall(compiled.as_text())
  return {
    'case': case,
    'device': f'{jax.device_count()} x {device.device_kind}',
    'jax': jax.__version__,
    'flags': os.environ.get('XLA_FLAGS', ''),
    'parameters': model_variables.count_elements(run.abstract.params),
    'tokens': rows * T,
    'compile_seconds': compile_seconds,
    'seconds': float(np.median(seconds[warmup : warmup + steps])),
    'all_seconds': seconds,
    'floor': model_flops / peak if peak else None,
    'peak_bytes': peak_bytes(compiled, device),
    'kernels': {name: kernels.count(name) for name in sorted(set(kernels))},
  }


def peak_bytes(compiled: Any, device: Any) -> int:
  """Returns the peak of the memory of a device: measured, or that of the compiled program."""
  from ngrammer_jax.training import capacity

  return (device.memory_stats() or {}).get('peak_bytes_in_use') or capacity.peak_bytes(compiled)


def format_line(result: dict[str, Any], results: dict[str, Any], predicted: dict) -> str:
  """Formats a result, and how it compares with the case without its suffix, or the first."""
  case = result['case']
  seconds = result['seconds']
  line = f'{case:32} {1e3 * seconds:9.2f} ms'
  if result['floor']:
    line += f'  floor {1e3 * result["floor"]:8.2f} ms  MFU {result["floor"] / seconds:6.1%}'
  line += f'  {result["tokens"] / seconds:11,.0f} tokens/s  {result["peak_bytes"] / 2**30:6.2f} GiB'
  other = case.rpartition(',')[0] if ',' in case else next(iter(CASES))
  if other != case and other in results:
    line += f'  {seconds / results[other]["seconds"]:.3f} of {other}'
  if report := predicted.get(case):
    train = report['train']
    line += f'  predicted {1e3 * train["bound"]:.1f} ms, cycles {1e3 * train["cycles"]:.1f} ms'
  return line + ''.join(f'  {count} {name}' for name, count in result['kernels'].items())


def main() -> int:
  """Prints a line for each case; with --json also writes them. Returns the exit status."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  others = [case for case in CASES if 'cudnn' not in case]
  help_ = 'default: all but those of cudnn, for GPUs alone'
  parser.add_argument(
    '--cases', nargs='*', choices=CASES, default=others, metavar='CASE', help=help_
  )
  parser.add_argument('--steps', type=int, default=20, help='steps that are timed')
  parser.add_argument('--warmup', type=int, default=5, help='steps before them')
  parser.add_argument('--predicted', nargs='*', default=[], metavar='CASE=REPORT')
  parser.add_argument('--json', type=pathlib.Path, help='output file')
  parser.add_argument('--tiny', action='store_true', help='small sizes, to try the script')
  parser.add_argument('--child', action='store_true', help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.child:
    print(json.dumps(measure(*options.cases, options.steps, options.warmup, options.tiny)))
    return 0
  predicted = {}
  for name, path in (item.split('=', 1) for item in options.predicted):
    predicted[name] = json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
  results = {}
  status = 0
  for case in options.cases:
    is_deterministic = 'not deterministic' not in case
    own_flags = f'--xla_gpu_deterministic_ops={is_deterministic} '
    environment = os.environ | {'XLA_FLAGS': own_flags + os.environ.get('XLA_FLAGS', '')}
    command = [sys.executable, '-m', 'benchmarks.accelerator', '--child', '--cases', case]
    command += [f'--steps={options.steps}', f'--warmup={options.warmup}']
    command += ['--tiny'] * options.tiny
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    if child.returncode:
      print(f'{case}: failed\n{child.stderr[-2000:]}', flush=True)
      status = 1
      continue
    results[case] = json.loads(child.stdout.splitlines()[-1])
    print(format_line(results[case], results, predicted), flush=True)
    if options.json:
      options.json.write_text(json.dumps(list(results.values()), indent=2) + '\n', encoding='utf-8')
  return status


if __name__ == '__main__':
  sys.exit(main())
