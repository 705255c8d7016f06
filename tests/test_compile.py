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
  for gather in collectives(result, 'all-gather'):
    assert gather['size'] * 20 < train['memory_limit'] and table_rows not in dimensions(gather)
  if table_rows is not None:
    rows_per_device = table_rows // (result['mesh']['fsdp'] * result['mesh']['model'])
    lookups, width = train['tokens'] * table_rows // 393_216, 32
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
    '--config.mesh.model=2', '--config.training.batch_size=32',
  )  # fmt: skip
  assert_sharded_well(result, 3145728)
  assert result['mesh'] == {'data': 4, 'fsdp': 1, 'model': 2}
  train = result['programs']['train']
  assert train['parameters'] == 334_876_416 and train['tokens'] == 32 * 1024
  assert 'train: fits; compiled in' in output and 'MFU at best' in output
  assert train['compiler_seconds'] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
  'config, arguments, table_rows',
  [
    ('transformer_xl.py:enwik8_large', ['--vocabulary_size=204'], None),
    ('adaptive_span.py:enwik8_pers', ['--vocabulary_size=204'], None),
    (  # 1.1 billion parameters
      'ngrammer_c4.py:393k_8k_50',
      [
        *('--config.model.width=2048', '--config.model.layers=20', '--config.mesh.fsdp=4'),
        *('--config.model.feed_forward_width=5632', '--config.mesh.model=2'),
        '--config.model.heads=16',
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
@pytest.mark.parametrize('topology', ['v5e:2x2', 'v6e:2x2'])
def test_pallas_attention_is_compiled(topology, tmp_path):
  """With a memory and relative positions; the program has no array as large as the scores."""
  flags = '--config=configs/transformer_xl.py:text8_small', '--vocabulary_size=27'
  flags += f'--topology={topology}', '--config.model.layers=1', '--config.training.batch_size=4'
  # The scores of fewer tokens fit in the vector memory of a device.
  flags += '--config.training.segment_length=2048', '--config.model.memory.length=2048'
  memory = {}
  for kernel in ('xla', 'pallas'):
    result, _ = report(tmp_path, *flags, f'--config.model.kernel={kernel}')
    memory[kernel] = result['programs']['train']['temporaries']
  assert memory['pallas'] < 0.1 * memory['xla'], memory


@pytest.mark.slow
def test_evaluation_and_decoding_are_compiled_too(tmp_path):
  result, output = report(
    tmp_path, '--config=configs/quickstart.py', '--topology=v5e:2x4',
    programs=('evaluate', 'decode'),
  )  # fmt: skip
  assert all(result['programs'][name]['fits'] for name in ('evaluate', 'decode'))
  assert 'evaluate: fits' in output and 'decode: fits' in output


HOST_TABLE = [
  '--config.model.ngram_memories.0.table_memory=host',
  '--config.model.ngram_memories.0.optimizer=adagrad',
]


@pytest.mark.slow
@pytest.mark.parametrize('width, padded', [(128, 128), (64, 128)])
def test_tables_in_host_memory_use_no_memory_of_devices(tmp_path, width, padded):
  """All programs; XLA:TPU pads narrow rows to 128 values, and transposes no table."""
  result, output = report(
    *(tmp_path, '--config=configs/ngram_memories.py:quickstart_engram', '--topology=v5e:2x2'),
    *('--config.mesh.data=1', '--config.mesh.fsdp=4', *HOST_TABLE),
    f'--config.model.ngram_memories.0.width={width}',
    '--config.model.ngram_memories.0.rows=(300000,)',
    '--config.model.ngram_memories.0.row_multiple=4',
    programs=('train', 'evaluate', 'decode', 'look_up'),
  )  # fmt: skip
  ((name, sizes),) = result['tables'].items()
  rows = sizes['shape'][0]
  assert name == 'layer_1/ngram_memory_0/table' and rows > 1_200_000
  assert sizes['device'] == 0 and sizes['host'] == 2 * rows // 4 * width * 4
  table = rows // 4 * padded * 4
  programs = result['programs']
  assert [programs[name]['host'] // table for name in programs] == [2, 0, 1, 1]
  assert all(program['peak'] < table / 2 for program in programs.values())
  assert 'GiB on its host' in output and 'look_up: fits' in output


@pytest.mark.slow
def test_the_tables_of_deepseek_v4_1_are_in_host_memory(tmp_path):
  """One of its two layers, in bfloat16."""
  result, _ = report(
    *(tmp_path, '--config=configs/ngram_memories.py:v41', '--topology=v6e:4x4', *HOST_TABLE),
    *('--config.mesh.data=1', '--config.mesh.fsdp=16', '--config.model.layers=2'),
    *('--config.training.batch_size=16', '--config.evaluation.streams=16'),
    '--config.model.ngram_memories.0.layers=(1,)',
    '--config.model.ngram_memories.0.table_dtype=bfloat16',
    '--config.model.ngram_memories.0.row_multiple=16',
    programs=('decode',),
  )  # fmt: skip
  sizes = result['tables']['layer_1/ngram_memory_0/table']
  assert sizes['shape'] == [384_006_176, 256] and sizes['device'] == 0
  decode = result['programs']['decode']
  assert decode['fits'] and decode['peak'] < 2 * 2**30
  assert decode['host'] // 2**20 == 384_006_176 * 256 * 2 // 16 // 2**20


@pytest.mark.slow
def test_a_program_that_does_not_fit_names_remedies(tmp_path):
  process = run(
    '--config=configs/ngrammer_c4.py:393k_8k_50', '--topology=v5e:2x2', '--programs', 'decode',
    '--config.evaluation.segment_length=400000', '--config.training.batch_size=16',
  )  # fmt: skip
  assert process.returncode == 1, process.stdout + process.stderr
  assert 'decode: DOES NOT FIT: lower ' in process.stdout


@pytest.mark.slow
def test_a_state_that_does_not_fit_is_to_be_sharded():
  process = run(
    '--config=configs/quickstart.py', '--topology=v5e:2x2', '--programs', 'train',
    '--config.model.width=4096', '--config.model.heads=32', '--config.model.layers=30',
    '--config.model.scan_layers=True',
  )  # fmt: skip
  assert process.returncode == 1, process.stdout + process.stderr
  message = 'train: DOES NOT FIT: parameters and optimizer state alone need '
  assert message in process.stdout and 'per device: shard them over more' in process.stdout


INVALID = [
  (['--topology=v9:4x4'], '--topology=v9:4x4: INVALID_ARGUMENT: Invalid TPU external'),
  (['--topology=v3:2x2', '--config.mesh.model=3'], 'does not match the 8 tpu devices'),
  (['--topology=v3:2x2', '--config.training.batch_size=9'], 'training.batch_size=9 is not'),
  (
    [
      *('--topology=v3:2x2', '--config.data.vocabulary=characters'),
      '--config.data.vocabulary_size=None',
    ],
    "the size of data.vocabulary='characters' depends on the text: set --vocabulary_size=N",
  ),
]

# Prints the status or the error of each command line, in one process.
DRIVER = """
import json, runpy, sys
sys.path.insert(0, 'launch')  # as when it runs as a script
main = runpy.run_path('launch/compile.py')['main_or_crash']
outcomes = []
for arguments in json.loads(sys.argv[1]):
  try:
    outcomes.append((main(arguments), ''))
  except Exception as error:
    outcomes.append((type(error).__name__, str(error)))
print(json.dumps(outcomes))
"""


def test_invalid_flags_are_reported():
  flags = [['--config=configs/quickstart.py', *arguments] for arguments, _ in INVALID]
  process = run('-c', DRIVER, json.dumps(flags), script=())
  assert process.returncode == 0, process.stderr
  outcomes = json.loads(process.stdout.splitlines()[-1])
  for (kind, output), (_, message) in zip(outcomes, INVALID, strict=True):
    assert kind == 'BadInput' and message in output


@pytest.mark.slow
def test_invalid_flags_end_with_status_2():
  process = run('--config=configs/quickstart.py', *INVALID[0][0])
  assert process.returncode == 2 and f'error: {INVALID[0][1]}' in process.stderr, process.stderr
