"""Configs of the papers are compiled for TPU slices, on this machine without one."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
TABLE = 'f32[3145728,32]'  # of the best row: 8 heads x 393,216 rows


def run(*arguments, script=(ROOT / 'launch' / 'compile.py',), env=()):
  if importlib.util.find_spec('libtpu') is None:
    pytest.skip('libtpu is not installed')
  command = [sys.executable, *script, *arguments]
  kept = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  kept |= {'PYTHONPATH': str(ROOT)} | dict(env)
  return subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True)


def report(tmp_path, *arguments, programs=('train',)):
  path = tmp_path / 'report.json'
  done = run(*arguments, f'--json={path}', '--programs', *programs)
  assert done.returncode == 0, done.stdout + done.stderr
  return json.loads(path.read_text())[0], done.stdout


def collectives(found, kind):
  return [each for each in found['programs']['train']['collectives'] if each['kind'] == kind]


def assert_sharded_well(found, table_rows=None):
  """Gradients are summed over the batch, and no table or memory is brought together."""
  train = found['programs']['train']
  assert train['fits'] and 0 < train['mfu'] < 1 and train['flops'] > 0
  for gathered in collectives(found, 'all-gather'):
    assert f'[{table_rows},' not in gathered['shape']
    assert gathered['size'] * 20 < train['memory_limit']
  if table_rows is not None:
    of_device = table_rows // (found['mesh']['fsdp'] * found['mesh']['model'])
    of_table = [
      each
      for each in collectives(found, 'all-reduce') + collectives(found, 'reduce-scatter')
      if f'[{of_device},' in each['shape']
    ]
    assert of_table and all(set(each['axes']) <= {'data', 'fsdp'} for each in of_table)


@pytest.mark.slow
def test_the_best_n_grammer_of_the_paper_on_a_v3_slice(tmp_path):
  found, said = report(
    tmp_path, '--config=configs/ngrammer_c4.py:393k_8k_50', '--topology=v3:2x2',
    '--config.mesh.model=2', '--config.training.batch_size=32',
  )  # fmt: skip
  assert_sharded_well(found, 3145728)
  assert found['mesh'] == {'data': 4, 'fsdp': 1, 'model': 2}
  train = found['programs']['train']
  assert train['parameters'] == 334_876_416 and train['tokens'] == 32 * 1024
  assert 'train: fits; compiled in' in said and 'MFU at best' in said
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
  given = [f'--config=configs/{config}', '--topology=v5p:4x4x2', *arguments]
  if table_rows is None:
    given += ['--config.training.batch_size=32', '--config.evaluation.streams=32']
  found, _ = report(tmp_path, *given)
  assert_sharded_well(found, table_rows)
  assert table_rows is None or found['programs']['train']['parameters'] > 1e9


@pytest.mark.slow
@pytest.mark.parametrize('topology', ['v4:2x2x1', 'v5e:2x2', 'v6e:2x2'])
def test_splash_attention_is_compiled(topology, tmp_path):
  """And nothing as large as the scores, 2 rows of 8 heads a device, is left."""
  given = '--config=configs/quickstart.py', '--vocabulary_size=2000', f'--topology={topology}'
  given += '--config.training.batch_size=8', '--config.training.segment_length=2048'
  memory = {}
  for kernel in ('xla', 'splash'):
    found, _ = report(tmp_path, *given, f'--config.model.kernel={kernel}')
    memory[kernel] = found['programs']['train']['temporaries']
  assert memory['splash'] < 0.5 * memory['xla']


@pytest.mark.slow
def test_evaluation_and_decoding_are_compiled_too(tmp_path):
  found, said = report(
    tmp_path, '--config=configs/quickstart.py', '--topology=v5e:2x4',
    programs=('evaluate', 'decode'),
  )  # fmt: skip
  assert all(found['programs'][name]['fits'] for name in ('evaluate', 'decode'))
  assert 'evaluate: fits' in said and 'decode: fits' in said


@pytest.mark.slow
def test_what_does_not_fit_is_said_with_what_to_turn(tmp_path):
  done = run(
    '--config=configs/ngrammer_c4.py:393k_8k_50', '--topology=v5e:2x2', '--programs', 'decode',
    '--config.evaluation.segment_length=400000', '--config.training.batch_size=16',
  )  # fmt: skip
  assert done.returncode == 1, done.stdout + done.stderr
  assert 'decode: DOES NOT FIT: lower ' in done.stdout


WRONG = [
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

# What the script says to each command line, in one process.
DRIVER = """
import json, runpy, sys
sys.path.insert(0, 'launch')  # where a script finds its neighbours
main = runpy.run_path('launch/compile.py')['main_or_crash']
outcomes = []
for arguments in json.loads(sys.argv[1]):
  try:
    outcomes.append((main(arguments), ''))
  except Exception as error:
    outcomes.append((type(error).__name__, str(error)))
print(json.dumps(outcomes))
"""


def test_what_cannot_work_is_said_at_once():
  given = [['--config=configs/quickstart.py', *arguments] for arguments, _ in WRONG]
  done = run('-c', DRIVER, json.dumps(given), script=())
  assert done.returncode == 0, done.stderr
  outcomes = json.loads(done.stdout.splitlines()[-1])
  for (kind, said), (_, message) in zip(outcomes, WRONG, strict=True):
    assert kind == 'BadInput' and message in said


@pytest.mark.slow
def test_what_cannot_work_ends_with_status_2():
  done = run('--config=configs/quickstart.py', *WRONG[0][0])
  assert done.returncode == 2 and f'error: {WRONG[0][1]}' in done.stderr, done.stderr
