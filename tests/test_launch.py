"""What `launch/` has for several processes, clouds and clusters. Nothing is launched there."""

import ast
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
import types

import pytest
import yaml

from ngrammer_jax import flags, train
from tests import documentation

ROOT = documentation.ROOT
LAUNCH = ROOT / 'launch'
RUNBOOK = ROOT / 'docs' / 'runbook.md'
# Statuses of `train`, and whether the same command can get further.
CAN_RETRY = {0: False, 1: True, 2: False, 134: True, 137: True, 139: True, 143: True}


def local_processes(*arguments):
  command = [sys.executable, LAUNCH / 'local_processes.py', *arguments]
  return subprocess.run(command, capture_output=True, text=True)


def test_local_processes_share_a_coordinator_port():
  code = 'import sys; sys.stdout.write(ascii(sys.argv[1:]) + chr(10))'
  process = local_processes('--processes=2', '--', sys.executable, '-c', code, '--a=b c')
  commands = sorted(map(ast.literal_eval, process.stdout.splitlines()))
  (port,) = {command[1].removeprefix('--coordinator=localhost:') for command in commands}
  assert int(port) > 0
  assert [[argument, *rest] for argument, _, *rest in commands] == [
    ['--a=b c', '--processes=2', f'--process_id={index}'] for index in range(2)
  ]


def test_processes_end_if_another_one_cannot_start(monkeypatch):
  started, ended = [], []

  def start(command, **options):
    if started:
      raise OSError(11, 'Resource temporarily unavailable')
    started.append(command)
    return types.SimpleNamespace(kill=lambda: ended.append(command))

  monkeypatch.setattr(sys, 'argv', ['', '--processes=3', '--', 'program'])
  main = runpy.run_path(str(LAUNCH / 'local_processes.py'))['main']
  monkeypatch.setattr(subprocess, 'Popen', start)
  with pytest.raises(SystemExit, match='error: program: Resource temporarily unavailable'):
    main()
  assert len(started) == 1 and ended == started


@pytest.mark.full
@pytest.mark.parametrize('code, status', [('0', 0), ('2', 2), ('143', 143)])
def test_status_is_that_of_the_first_process_that_fails(code, status):
  script = f'import sys; sys.exit({code} if sys.argv[-1] == "--process_id=1" else 0)'
  process = local_processes('--', sys.executable, '-c', script)
  assert process.returncode == status
  assert re.search(r'^process 0 has PID \d+\nprocess 1 has PID \d+$', process.stderr, re.MULTILINE)


def test_a_local_process_has_cpu_devices():
  """Their number does not depend on that of the environment, which is 8."""
  code = 'import jax; print(jax.device_count(), jax.default_backend())'
  process = local_processes('--processes=1', '--devices=3', '--', sys.executable, '-c', code)
  assert process.stdout.split() == ['3', 'cpu']


def write_program(path, text):
  """Writes a shell script that is found by the name of its file."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f'#!/bin/bash\n{text}\n')
  path.chmod(0o755)


@pytest.fixture
def parse(monkeypatch):
  """Parses the arguments of `train`, and returns its options."""

  class Parsed(Exception):
    pass

  def start_training(options):
    raise Parsed(options)

  def parse(arguments):
    with pytest.raises(Parsed) as caught:
      train.main(arguments)
    return caught.value.args[0]

  monkeypatch.setattr(flags, 'start_training', start_training)
  monkeypatch.chdir(ROOT)
  return parse


def load_task():
  return yaml.safe_load((LAUNCH / 'sky.yaml').read_text())


@pytest.fixture
def run_task(tmp_path):
  """Runs the command of the task on a host whose training ends with a status.

  Returns the status of the host and the arguments of the training.
  """

  def run(status, **variables):
    record = f'printf "%s\\n" "$@" >{tmp_path}/arguments; exit {status}'
    write_program(tmp_path / 'trainer' / 'bin' / 'python', record)
    env = load_task()['envs'] | {'HOME': str(tmp_path), 'PATH': os.environ['PATH']} | variables
    process = subprocess.run(['bash', '-c', load_task()['run']], env=env, capture_output=True)
    return process.returncode, (tmp_path / 'arguments').read_text().splitlines()

  return run


def test_the_task_of_skypilot_trains(run_task, parse):
  status, arguments = run_task(0, BUCKET='b', FLAGS='--config.training.steps=7 --watchdog=3')
  assert status == 0 and arguments[:2] == ['-m', 'ngrammer_jax.train']
  options = parse(arguments[2:])
  assert options.distributed and options.watchdog == 3
  assert str(options.workdir) == 'gs://b/runs/quickstart'


def test_the_task_of_skypilot_restarts_what_can_be_retried(run_task):
  recovery = load_task()['resources']['job_recovery']
  # It counts every status that is not listed, 2 included.
  assert recovery['max_restarts_on_errors'] == 0
  for status, can_retry in CAN_RETRY.items():
    reported = run_task(status, BUCKET='b')[0]
    # SkyPilot ends the other hosts, and reports 137 for them.
    restarts = bool({reported, 137} & {*recovery['recover_on_exit_codes']})
    assert restarts == can_retry, status
    assert (reported == 0) == (status == 0)


def test_the_runbook_sets_variables_of_the_task():
  commands = documentation.all_commands(RUNBOOK, 'sky')
  launched = [argv for argv in commands if argv[:3] == ['sky', 'jobs', 'launch']]
  assert len(launched) == 2
  for argv in launched:
    assert argv[3] == 'launch/sky.yaml'
    variables = load_task()['envs']
    pairs = zip(argv, argv[1:], strict=False)
    names = {word.partition('=')[0] for flag, word in pairs if flag == '--env'}
    assert names <= set(variables)
    assert {name for name, value in variables.items() if value is None} <= names


@pytest.fixture
def run_batch(tmp_path):
  """Runs train.sbatch in bash. Returns its process and whether the job was requeued."""

  def run(srun, *arguments, starts=0, **variables):
    write_program(tmp_path / 'bin' / 'srun', srun)
    write_program(tmp_path / 'bin' / 'scontrol', f'echo "$@" >{tmp_path}/requeued')
    path = os.pathsep.join([str(tmp_path / 'bin'), str(pathlib.Path(sys.executable).parent)])
    env = os.environ | {'PATH': f'{path}:/usr/bin:/bin', 'SLURM_JOB_ID': '7'} | variables
    env |= {'SLURM_RESTART_COUNT': str(starts)} if starts else {}
    command = ['bash', LAUNCH / 'train.sbatch', *arguments]
    process = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    requeued = tmp_path / 'requeued'
    is_requeued = requeued.exists() and requeued.read_text() == 'requeue 7\n'
    requeued.unlink(missing_ok=True)
    return process, is_requeued

  return run


def test_a_slurm_job_trains(run_batch, parse):
  arguments = ['--config=configs/quickstart.py', '--workdir=runs/a b', '--config.training.steps=7']
  process, is_requeued = run_batch('printf "%s\\n" "$@"', *arguments)
  assert process.returncode == 0 and not is_requeued
  words = process.stdout.splitlines()
  assert words[:4] == ['--kill-on-bad-exit=0', 'python', '-m', 'ngrammer_jax.train']
  assert words[4:-1] == arguments and str(parse(arguments).workdir) == 'runs/a b'
  assert words[-1] == 'the training ended with status 0'


def test_a_slurm_job_is_requeued_if_it_can_be_retried(run_batch):
  for status, can_retry in CAN_RETRY.items():
    process, is_requeued = run_batch(f'exit {status}')
    assert process.returncode == status and is_requeued == can_retry
  assert [run_batch('exit 1', starts=starts)[1] for starts in (99, 100)] == [True, False]


def test_a_slurm_job_that_fails_without_a_new_checkpoint_ends(run_batch, tmp_path):
  workdir = tmp_path / 'a run'

  def requeues(status, *statuses, place=workdir):
    ended = [run_batch(f'exit {each}', f'--workdir={place}') for each in (status, *statuses)]
    assert [process.returncode for process, _ in ended] == [status, *statuses]
    is_said = 'three times without a new checkpoint' in ended[-1][0].stdout
    assert is_said == (not ended[-1][1])
    return [is_requeued for _, is_requeued in ended]

  assert requeues(1, 143, 138, 143, 134, 1) == [True] * 5 + [False]  # before the first checkpoint
  for step in ('8', '16'):
    (workdir / 'checkpoints' / step).mkdir(parents=True)
    (workdir / 'checkpoints' / f'{step}.damaged').mkdir()
    assert requeues(137, 1) == [True, True]
  assert requeues(1) == [False]
  assert requeues(*[1] * 4, place='gs://bucket/run') == [True] * 4  # nothing is known of it


# Two tasks on this machine, with the variables of Slurm that JAX reads.
TASKS = """
shift
export SLURM_STEP_NODELIST=localhost SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=2
for SLURM_PROCID in 0 1; do
  export SLURM_PROCID SLURM_LOCALID=$SLURM_PROCID
  "$@" & pids[$SLURM_PROCID]=$!
done
wait ${pids[0]}; first=$?
wait ${pids[1]}; second=$?
exit $((first > second ? first : second))
"""


@pytest.mark.slow
def test_a_slurm_job_trains_in_two_processes(run_batch, tmp_path):
  arguments = ['--config=quickstart', f'--workdir={tmp_path}/run', '--config.training.steps=2']
  arguments += ['--config.optimizer.warmup_steps=1', '--config.evaluation.max_tokens=256']
  variables = {'PYTHONPATH': str(ROOT), 'JAX_NUM_CPU_DEVICES': '1'}
  process, is_requeued = run_batch(TASKS, *arguments, **variables)
  assert process.returncode == 0 and not is_requeued, process.stderr
  assert 'finished: 2 steps' in process.stdout
  assert (tmp_path / 'run' / 'logs' / 'process_1.log').exists()
  process, is_requeued = run_batch(TASKS, *arguments, '--config.training.steps=x', **variables)
  assert process.returncode == 2 and not is_requeued


def instructions(name):
  """Returns the instructions of a Dockerfile as pairs of name and arguments."""
  text = (ROOT / name).read_text().replace('\\\n', ' ')
  lines = [line for line in text.splitlines() if line and not line.startswith('#')]
  return [tuple(line.split(maxsplit=1)) for line in lines]


def test_the_container_has_what_a_training_needs():
  found = instructions('launch/Dockerfile')
  assert found[0][0] == 'FROM' and re.fullmatch(r'python:3\.1[123]-slim', found[0][1])
  assert ('ARG', 'EXTRAS=tpu,gcs') in found
  assert ('RUN', 'pip install --no-cache-dir --editable ".[${EXTRAS}]"') in found
  copied = [word for name, rest in found if name == 'COPY' for word in rest.split()[:-1]]
  assert all((ROOT / name).exists() for name in copied)
  assert {'setup.py', 'pyproject.toml', 'README.md', 'ngrammer_jax', 'configs'} == set(copied)
  included = [line[1:] for line in (ROOT / '.dockerignore').read_text().split() if line[0] == '!']
  assert included == copied  # all other files are excluded from the build context
  assert {name for name, _ in found} <= {'FROM', 'ARG', 'WORKDIR', 'COPY', 'RUN', 'ENV'}


def test_the_container_and_the_task_of_skypilot_have_the_documented_options_of_libtpu():
  environment = dict(
    rest.split('=', 1) for name, rest in instructions('launch/Dockerfile') if name == 'ENV'
  )
  of_container = shlex.split(environment['LIBTPU_INIT_ARGS'])[0].split()
  of_task = load_task()['envs']['LIBTPU_INIT_ARGS'].split()
  assert of_container == of_task
  exports = documentation.all_commands(RUNBOOK, 'export')
  (by_hand,) = [argv for argv in exports if argv[1].startswith('LIBTPU_INIT_ARGS=')]
  _, _, substitution = by_hand[1].partition('=')
  process = subprocess.run(
    ['bash', '-c', f'echo "{substitution}"'], cwd=ROOT, capture_output=True, text=True
  )
  assert process.stdout.split() == of_task
  page = (ROOT / 'docs' / 'tpu_predictions.md').read_text()
  documented = re.findall(
    r'compiler_options=\"\((.*)\)\"', page.partition('### Options for collectives')[2]
  )[0]
  assert [f'--{option}' for option in ast.literal_eval(f'({documented})')] == of_task


PRIVATE = {
  'a home folder': r'/home/\w|/Users/\w|/root\b',
  'a key': r'BEGIN [A-Z ]*PRIVATE KEY|AIza[\w-]{30}|AKIA[A-Z0-9]{16}|hf_\w{30}|ya29\.',
  'a service account': r'\w+@[\w-]+\.iam\.gserviceaccount\.com',
  'a bucket': r'gs://[a-z0-9]',
  'a project': r'--project=[a-z0-9]|projects/[a-z0-9]|(gcr\.io|pkg\.dev)/[a-z0-9]',
}


def private(text):
  """Returns the kinds of private data in a text."""
  return [kind for kind, pattern in PRIVATE.items() if re.search(pattern, text)]


def test_launch_files_have_nothing_private():
  examples = [
    '/home/ann/x',
    'AKIAABCDEFGHIJKLMNOP',
    'me@a-b.iam.gserviceaccount.com',
    'gs://mine/x',
  ]
  assert [private(text) for text in [*examples, '--project=my-project']] == [
    [kind] for kind in PRIVATE
  ]
  files = [file for file in LAUNCH.iterdir() if file.is_file()]
  files += [RUNBOOK, ROOT / '.dockerignore']
  found = {str(file): private(file.read_text()) for file in files}
  assert not {name: kind for name, kind in found.items() if kind}
