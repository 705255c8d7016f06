"""Configs of the papers compile for TPU slices without a TPU."""

import importlib.util
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests import test_hlo

ROOT = pathlib.Path(__file__).parents[1]


def run(*arguments, script=(ROOT / 'launch' / 'compile.py',), env=()):
  if importlib.util.find_spec('libtpu') is None:
    pytest.skip('libtpu is not installed')
  command = [sys.executable, *script, *arguments]
  hidden = ('JAX_NUM_CPU_DEVICES', 'XLA_FLAGS')
  environment = {k: v for k, v in os.environ.items() if k not in hidden}
  environment |= {'PYTHONPATH': str(ROOT)} | dict(env)
  return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def report(tmp_path, *arguments, programs=('train',)):
  path = tmp_path / 'report.json'
  process = run(*arguments, f'--json={path}', '--programs', *programs)
  assert process.returncode == 0, process.stdout + process.stderr
  return json.loads(path.read_text())[0], process.stdout


def collectives(result, kind):
  return [
    collective
    for collective in result['programs']['train']['collectives']
    if collective['kind'] == kind
  ]


def assert_sharded_well(result, table_rows=None):
  """No table and no memory is gathered; gradients are exchanged over the batch."""
  train = result['programs']['train']
  assert train['fits'] and 0 < train['mfu'] < 1 and train['flops'] > 0
  lookups, width = train['tokens'] * (table_rows or 0) // 393_216, 32
  if table_rows is not None:
    table_rows = table_rows * width // 128  # packed to 128 lanes
  for gather in collectives(result, 'all-gather'):
    assert gather['size'] * 20 < train['memory_limit'] and table_rows not in dimensions(gather)
  if table_rows is not None:
    rows_per_device = table_rows // (result['mesh']['fsdp'] * result['mesh']['model'])
    # Its gradient is exchanged as looked-up rows, or summed where a device has fewer rows.
    exchanges = [
      collective
      for collective in train['collectives']
      if rows_per_device in dimensions(collective)
      or (dimensions(collective)[-1:] == [width] and size(collective) == lookups * width)
    ]
    assert exchanges and all(set(each['axes']) <= {'data', 'fsdp'} for each in exchanges)
    assert all(
      each['kind'] in ('all-reduce', 'reduce-scatter')
      for each in exchanges
      if rows_per_device in dimensions(each)
    )


def dimensions(collective):
  """Returns the sizes of all axes of all arrays of a collective."""
  return [int(size) for size in re.findall(r'\d+(?=[,\]])', collective['shape'])]


def size(collective):
  return math.prod(dimensions(collective))


@pytest.mark.slow
def test_the_best_n_grammer_of_the_paper_on_a_v3_slice(tmp_path):
  result, output = report(
    tmp_path, '--config=configs/ngrammer_c4.py:393k_8k_50', '--topology=v3:2x2',
    '--config.mesh.model=2', '--config.training.batch_size=32', '--config.model.scan_layers=True',
  )  # fmt: skip
  assert_sharded_well(result, 3145728)
  assert result['mesh'] == {'data': 4, 'fsdp': 1, 'model': 2}
  train = result['programs']['train']
  assert train['parameters'] == 334_876_416 and train['tokens'] == 32 * 1024
  assert re.search(r'train, 32,768 tokens: fits in 16 GiB; model.remat=\w+; compiled in', output)
  assert 'MFU at best' in output
  # The v3 has no published rate of the network.
  assert 0 < train['bound'] < train['cycles'] and train['exposed'] == 0
  assert train['not_counted'] == [
    'the waits for collectives: no network rate of TPU v3 is published'
  ]
  parts = {name: part['bytes'] for name, part in train['parts'].items()}
  assert sum(parts.values()) == pytest.approx(train['bytes'])
  assert parts.pop('other') < 0.02 * train['bytes'] and min(parts.values()) > 0
  assert set(parts) >= {
    'feed-forward',
    'projections',
    'rotary',
    'norms',
    'cross-entropy',
    'optimizer',
    'table',
    'codebook',
    'embedding',
    'saves of the scan',
    'layout changes',
    'collectives',
  }


@pytest.mark.slow
@pytest.mark.parametrize(
  'config, arguments, table_rows',
  [
    ('transformer_xl.py:enwik8_large', ['--vocabulary_size=204'], None),
    ('adaptive_span.py:enwik8_pers', ['--vocabulary_size=204'], None),
    (  # 1.1 billion parameters
      'ngrammer_c4.py:393k_8k_50',
      [
        '--config.model.width=2048',
        '--config.model.layers=20',
        '--config.mesh.fsdp=4',
        '--config.model.feed_forward_width=5632',
        '--config.mesh.model=2',
        '--config.model.heads=16',
        '--config.model.scan_layers=True',
      ],
      16 * 393216,
    ),
  ],
)
def test_large_models_on_v5p(tmp_path, config, arguments, table_rows):
  flags = [f'--config=configs/{config}', '--topology=v5p:4x4x2', *arguments]
  if table_rows is None:
    flags += ['--config.training.batch_size=32', '--config.evaluation.streams=32']
  result, _ = report(tmp_path, *flags)
  assert_sharded_well(result, table_rows)
  assert table_rows is None or result['programs']['train']['parameters'] > 1e9


@pytest.mark.slow
@pytest.mark.parametrize('topology', ['v4:2x2x1', 'v5e:2x2', 'v6e:2x2'])
def test_splash_attention_is_compiled(topology, tmp_path):
  """The program has no array as large as the scores, 2 rows of 8 heads per device."""
  flags = '--config=configs/quickstart.py', '--vocabulary_size=2000', f'--topology={topology}'
  flags += '--config.training.batch_size=8', '--config.training.segment_length=2048'
  memory = {}
  for kernel in ('xla', 'splash'):
    result, _ = report(tmp_path, *flags, f'--config.model.kernel={kernel}')
    memory[kernel] = result['programs']['train']['temporaries']
  assert memory['splash'] < 0.5 * memory['xla']


@pytest.mark.slow
def test_evaluation_and_decoding_are_compiled_too(tmp_path):
  result, output = report(
    tmp_path, '--config=configs/quickstart.py', '--topology=v5e:2x4',
    programs=('evaluate', 'decode'),
  )  # fmt: skip
  assert all(result['programs'][name]['fits'] for name in ('evaluate', 'decode'))
  assert output.count('tokens: fits in 16 GiB') == 2
  size = 'parameters: 2,907,232, 786,432 of them in tables; FLOPs of a token: 4.42 MFLOPs'
  assert output.splitlines()[1] == f'{size} in the forward pass'


# Prints the bytes that isolated programs move on a v5e, and the FLOPs of attention on 4 of them.
ISOLATED = """
import json, runpy, sys
sys.path.insert(0, 'launch')
compile = runpy.run_path('launch/compile.py')
import jax, jax.numpy as jnp
from ngrammer_jax import sharding
from ngrammer_jax.layers.attention import fused
from ngrammer_jax.layers.attention.full import Heads
from ngrammer_jax.layers.context import Keys
devices = compile['slice_devices']('v5e:2x2', 1)

def count(function, *shapes, donate=(), count=1, rows=()):
  mesh = sharding.make_mesh(count, 1, 1, devices[:count])
  place = jax.sharding.NamedSharding(mesh, jax.P(*rows))
  arrays = [jax.ShapeDtypeStruct(*shape, sharding=place) for shape in shapes]
  with sharding.use(mesh):
    traced = jax.jit(function, donate_argnums=donate).trace(*arrays)
    text = traced.lower().compile().as_text()
  kernels = compile['flops'].kernel_flops(traced.jaxpr)
  return compile['count'](text, dict(mesh.shape), 'TPU v5 lite', kernels)

def adam(p, m, v, g):
  m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
  return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v

def attend(q, documents):
  keys = Keys(query_documents_BxT=documents)
  part = fused.attend('splash', 0, Heads(q, q, q), None, keys)
  return part.values_BxTxNxH.astype('float32').sum()

bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32
table, rows = ((3145728, 32), f32), ((131072,), i32)
stacked = lambda x, stack, i: x @ jax.lax.dynamic_index_in_dim(stack, i, 0, False)
programs = {
  'square': (lambda x, w: x @ w, *[((8192, 8192), bf16)] * 2),
  'wide': (lambda x, w: x @ w, ((16384, 1024), bf16), ((1024, 4096), bf16)),
  'stack': (stacked, ((16384, 1024), bf16), ((96, 1024, 2731), bf16), ((), i32)),
  'softmax': (jax.nn.softmax, ((64, 1024, 1024), f32)),
  'gather': (lambda table, rows: table[rows], table, rows),
}
moved = {name: count(*program) for name, program in programs.items()}
moved['adam'] = count(adam, *[((8192, 8192), f32)] * 4, donate=(0, 1, 2))
add = lambda table, rows, updates: table.at[rows].add(updates)
moved['scatter'] = count(add, table, rows, ((131072, 32), f32), donate=0)
moved = {name: (r['bytes'] - r['padding']) / 1e6 for name, r in moved.items()}
shapes = ((16, 1024, 8, 128), bf16), ((16, 1024), i32)
splash = count(jax.grad(attend), *shapes, count=4, rows=('data',))
print(json.dumps([moved, splash['parts']['attention kernels']['flops'], splash['not_counted']]))
"""


@pytest.mark.slow
def test_isolated_programs_move_what_is_counted_by_hand():
  """Megabytes, without padding: what has to be read and written once."""
  process = run('-c', ISOLATED, script=())
  assert process.returncode == 0, process.stderr
  moved, flops, not_counted = json.loads(process.stdout.splitlines()[-1])
  x, w, y = 16384 * 1024 * 2, 1024 * 2731 * 2, 16384 * 2731 * 2
  expected = {
    'square': 402.7, 'wide': 176.2, 'stack': (x + w + y) / 1e6, 'softmax': 537, 'adam': 1879,
    'gather': 34, 'scatter': 51,
  }  # fmt: skip
  assert moved == pytest.approx(expected, rel=0.02)
  # Two products forward and seven backward; three of the four blocks of 512 x 512 scores.
  product = 2 * (16 // 4) * 8 * 1024 * 1024 * 128
  assert flops == 9 * product * 3 / 4 and not not_counted


@pytest.mark.slow
def test_scanned_layers_count_as_unrolled_ones(tmp_path):
  """A scan also saves and loads the activations, and stacks the parameters."""
  moved, cost = {}, {}
  for scan in (True, False):
    result, _ = report(
      tmp_path,
      '--config=configs/ngrammer_c4.py:transformer',
      '--topology=v5e:2x2',
      '--config.model.layers=2',
      '--config.training.batch_size=128',
      '--vocabulary_size=2000',
      '--config.model.width=512',
      '--config.model.heads=4',
      '--config.model.feed_forward_width=1536',
      '--config.model.vocabulary_chunk=None',
      f'--config.model.scan_layers={scan}',
    )
    train = result['programs']['train']
    saves = train['parts'].get('saves of the scan', {'bytes': 0})['bytes']
    moved[scan], cost[scan] = train['bytes'] - saves, train['flops']
    assert (saves > 0) == scan and train['mfu'] < 1
  assert moved[True] == pytest.approx(moved[False], rel=0.15)
  assert cost[True] == pytest.approx(cost[False], rel=0.02)


HOST_TABLE = [
  '--config.model.ngram_memories.0.table_memory=host',
  '--config.model.ngram_memories.0.optimizer=adagrad',
]


@pytest.mark.slow
@pytest.mark.parametrize('width', [128, 64])
def test_tables_in_host_memory_use_no_memory_of_devices(tmp_path, width):
  """All programs; the train state has the table and its accumulator."""
  result, output = report(
    tmp_path, '--config=configs/ngram_memories.py:quickstart_engram', '--topology=v5e:2x2',
    '--config.mesh.data=1', '--config.mesh.fsdp=4', *HOST_TABLE,
    f'--config.model.ngram_memories.0.width={width}',
    '--config.model.ngram_memories.0.rows=(300000,)',
    '--config.model.ngram_memories.0.row_multiple=4',
    programs=('train', 'evaluate', 'decode'),
)  # fmt: skip
  programs, table = result['programs'], 1_200_000 * width * 4
  tables = [program['host'] / table for program in programs.values()]
  assert tables == pytest.approx([2, 1, 1], abs=0.01), tables
  assert all(program['peak'] < table / 2 for program in programs.values())
  assert 'tables in host memory' in output


@pytest.mark.slow
def test_the_tables_of_deepseek_v4_1_are_in_host_memory(tmp_path):
  """One of its two layers, in bfloat16."""
  result, _ = report(
    tmp_path, '--config=configs/ngram_memories.py:v41', '--topology=v6e:4x4', *HOST_TABLE,
    '--config.mesh.data=1', '--config.mesh.fsdp=16', '--config.model.layers=2',
    '--config.training.batch_size=16', '--config.evaluation.streams=16',
    '--config.model.ngram_memories.0.layers=(1,)',
    '--config.model.ngram_memories.0.table_dtype=bfloat16',
    '--config.model.ngram_memories.0.row_multiple=16',
    programs=('decode',),
)  # fmt: skip
  decode = result['programs']['decode']
  assert decode['fits'] and decode['peak'] < 2 * 2**30
  assert decode['host'] == pytest.approx(384_006_176 * 256 * 2, rel=1e-3)


@pytest.mark.slow
def test_a_program_that_does_not_fit_names_remedies(tmp_path):
  process = run(
    '--config=configs/ngrammer_c4.py:393k_8k_50', '--topology=v5e:2x2', '--programs', 'decode',
    '--config.evaluation.segment_length=400000', '--config.training.batch_size=16',
  )  # fmt: skip
  assert process.returncode == 1, process.stdout + process.stderr
  assert 'decode, 4 tokens: DOES NOT FIT in 16 GiB; larger: mesh.fsdp' in process.stdout


INVALID = [
  (['--topology=v9:4x4'], '--topology=v9:4x4: INVALID_ARGUMENT: Invalid TPU external'),
  (['--topology=v3:2x2', '--config.mesh.model=3'], 'does not match the 8 tpu devices'),
  (['--topology=v3:2x2', '--config.training.batch_size=9'], 'training.batch_size=9 is not'),
  (
    [
      '--topology=v3:2x2',
      '--config.data.vocabulary=characters',
      '--config.data.vocabulary_size=None',
    ],
    "the size of data.vocabulary='characters' is that of the text: set --vocabulary_size=N",
  ),
  (['--topology=v3:2x2', '--against=setup.py'], '--against=setup.py is not a report of --json'),
  (['--topology=v3:2x2', '--json=tests'], '--json=tests is a folder: name a file, such as tests/'),
]

# Prints the status or the error of each command line, in one process; then the difference of two
# reports, of a product of 1,024,000 rows and of one of 1,024 rows.
DRIVER = """
import json, runpy, sys
sys.path.insert(0, 'launch')  # as when it runs as a script
import hlo
module = runpy.run_path('launch/compile.py')
main, outcomes = module['main_or_crash'], []
for arguments in json.loads(sys.argv[1]):
  try:
    outcomes.append((main(arguments), ''))
  except Exception as error:
    outcomes.append((type(error).__name__, str(error)))
count = lambda text: module['count'](text, {'data': 1}, 'TPU v5 lite', {})
texts = sys.argv[2].replace('1024', '1024000'), sys.argv[2]
print('\\n'.join(module['format_numbers'](module['difference'](*map(count, texts)), '+')))
print(json.dumps(outcomes))
"""


def test_invalid_flags_are_reported_and_reports_compared():
  flags = [['--config=configs/quickstart.py', *arguments] for arguments, _ in INVALID]
  process = run('-c', DRIVER, json.dumps(flags), test_hlo.NESTED, script=())
  assert process.returncode == 0, process.stderr
  outcomes = json.loads(process.stdout.splitlines()[-1])
  for (kind, output), (_, message) in zip(outcomes, INVALID, strict=True):
    assert kind == 'BadInput' and message in output
  rows = 1_024_000 - 1024
  flops, moved = 2 * rows * 128 * 2731, 2 * rows * (128 + 2816)
  lines = [line.split() for line in process.stdout.splitlines()]
  assert ['computed', f'+{flops / 1e12:.2f}', 'TFLOP'] in lines, process.stdout
  gigabytes, bound = f'+{moved / 1e9:.2f}', f'+{1e3 * moved / 819e9:.2f}'
  # The cycles of both are the same, and stand in the estimate.
  assert ['feed-forward', gigabytes, '+0.00', bound, '+0.00', '+0.00'] in lines, process.stdout


@pytest.mark.slow
def test_invalid_flags_end_with_status_2():
  process = run('--config=configs/quickstart.py', *INVALID[0][0])
  assert process.returncode == 2 and f'error: {INVALID[0][1]}' in process.stderr, process.stderr
