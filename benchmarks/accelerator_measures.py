"""The measurements of `benchmarks.accelerator`: each measures one case in this process."""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.accelerator_cases import CASES, TINY, changes_of, resolve
from launch import model_parts

WORDS = 32_000  # of a random text
# Calls of attention kernels in a compiled program.
KERNELS = re.compile(r'custom_call_target="(__cudnn\$\w+|\w*[tT]riton\w*|tpu_custom_call)"')
CONTAINERS = ('while', 'cond', 'conditional', 'call')  # of operations that are counted themselves
SCOPE_OF = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name="([^"]*)"', re.MULTILINE)


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

    def load(own: slice) -> token_batch.Batch:
      return token_batch.map_batches(lambda array: array[:, own], segment)

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
