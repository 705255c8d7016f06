"""launch/tpu_vm.py with a fake gcloud, whose workers are folders of this machine.

Some tests run the commands of the workers there, except for the installation.
"""

import contextlib
import importlib.util
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
import types

import pytest

from tests import fake_gcloud

LAUNCHER = pathlib.Path(__file__).resolve().parents[1] / 'launch' / 'tpu_vm.py'
FLAGS = ['--name=run', '--type=v5litepod-16', '--zone=z', '--poll=0.01']

GCLOUD = f"""#!/bin/bash
FAKE_GCLOUD="$(dirname "$0")" exec {sys.executable} -SE {pathlib.Path(fake_gcloud.__file__)} "$@"
"""

# Instead of pip and uv: a python that prints its folder and arguments.
PYTHON = """#!/bin/bash
case "$*" in
  *'pip install --user'*) exit $(cat FOLDER/pip 2>/dev/null || echo 0);;
  *'uv venv'*)
    mkdir -p .venv/bin
    printf '#!/bin/bash\\necho "trains $PWD $*"; exit $STATUS\\n' >.venv/bin/python
    chmod +x .venv/bin/python;;
esac
"""


COMMAND = ['--', 'python', '-m', 'ngrammer_jax.train', '--workdir=gs://b/a b']


def calls(folder):
  """Returns the calls of gcloud, without `describe`."""
  return [call for call in (folder / 'calls').read_text().splitlines() if call != 'describe']


@pytest.fixture
def in_bash(tmp_path):
  """Runs the launcher and the commands of its workers, which end as planned.

  Returns the finished process and the calls of gcloud.
  """
  for name, text in (('gcloud', GCLOUD), ('python3', PYTHON.replace('FOLDER', str(tmp_path)))):
    (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(0o755)
  # Tests run in parallel: each has its own name for the packed checkout.
  name = re.sub('[^a-z0-9]+', '-', f'{tmp_path.name}-{tmp_path.parent.name}')
  flags = [f'--name={name}', *FLAGS[1:]]

  def launch(*plan, more=()):
    (tmp_path / 'plan').write_text(' '.join(plan))
    (tmp_path / 'calls').write_text('')
    result = subprocess.run(
      [sys.executable, LAUNCHER, *flags, *more, *COMMAND],
      env={'PATH': f'{tmp_path}:/usr/bin:/bin'},
      capture_output=True,
      text=True,
      timeout=600,
    )
    pathlib.Path('/tmp', f'{flags[0][7:]}.tgz').unlink(missing_ok=True)
    return result, calls(tmp_path)

  launch.folder, launch.flags = tmp_path, flags
  return launch


@pytest.fixture
def in_process(tmp_path, monkeypatch):
  """The same in this process: workers only print their exit status."""

  def remote(here, worker, script, status):
    if 'uv' in script:
      return int((here / 'pip').read_text()) if (here / 'pip').exists() else 0
    if 'tail' in script:
      output.append(f'<ended with status {status}>\n')
      return int(status)
    return 0

  output = []

  def run(command, check=False, **_):
    if command[0] == 'tar':
      (tmp_path / 'packed').touch()
      return types.SimpleNamespace(returncode=0)
    output.clear()
    words = [str(tmp_path / 'packed') if word.startswith('/tmp/') else word for word in command[4:]]
    status = fake_gcloud.answer(tmp_path, words, remote, output.append)
    code, error = (1, status) if isinstance(status, str) else (status, '')
    return types.SimpleNamespace(returncode=code, stdout=''.join(output), stderr=error)

  @contextlib.contextmanager
  def popen(command, **_):
    result = run(command)
    yield types.SimpleNamespace(stdout=result.stdout.splitlines(True), returncode=result.returncode)

  spec = importlib.util.spec_from_file_location('tpu_vm', LAUNCHER)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  fakes = {'PIPE': None, 'CalledProcessError': subprocess.CalledProcessError}
  monkeypatch.setattr(module, 'subprocess', types.SimpleNamespace(run=run, Popen=popen, **fakes))
  clock = {'monotonic': time.monotonic, 'sleep': lambda seconds: None}
  monkeypatch.setattr(module, 'time', types.SimpleNamespace(**clock))

  def launch(*plan, more=()):
    (tmp_path / 'plan').write_text(' '.join(plan))
    (tmp_path / 'calls').write_text('')
    monkeypatch.setattr(sys, 'argv', ['tpu_vm.py', *FLAGS, *more, *COMMAND])
    errors = []
    monkeypatch.setattr(module, 'log', errors.append)
    try:
      status = module.main()
    except SystemExit as stop:
      errors.append(stop.code)
      status = 1
    result = types.SimpleNamespace(returncode=status, stderr=''.join(f'{e}\n' for e in errors))
    return result, calls(tmp_path)

  launch.folder = tmp_path
  return launch


@pytest.fixture(params=['in_process', pytest.param('in_bash', marks=pytest.mark.slow)])
def cloud(request):
  return request.getfixturevalue(request.param)


def dry(*flags, more=()):
  command = [sys.executable, LAUNCHER, *flags, '--dry_run', '--', 'python', '-m', 'x', '--a=b c']
  command += more
  result = subprocess.run(command, capture_output=True, text=True, check=True)
  return result.stdout.splitlines()


def test_dry_run_prints_the_commands():
  root = LAUNCHER.parents[1]
  flags = dry(*FLAGS, '--spot', '--project=p')
  pack, create, state, describe, copy, install, start, follow, delete = flags
  what = 'setup.py pyproject.toml README.md ngrammer_jax configs'
  assert pack == f'tar --exclude=__pycache__ -czf /tmp/run.tgz -C {shlex.quote(str(root))} {what}'
  gcloud = 'gcloud compute tpus queued-resources'
  assert create == (
    f'{gcloud} create run --accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite '
    '--zone=z --project=p --node-id=run --spot'
  )
  assert state == f"{gcloud} describe run --zone=z --project=p '--format=value(state.state)'"
  assert describe == f'{gcloud} describe run --zone=z --project=p'
  where = '--node=all --worker=all --zone=z --project=p'
  assert copy == f'{gcloud} scp /tmp/run.tgz run:ngrammer_jax.tgz {where}'
  ssh = f"{gcloud} ssh run {where} '--ssh-flag=-o ServerAliveInterval=30' "
  for each in (install, start, follow):
    assert each.startswith(ssh)
  install, start, follow = (
    shlex.split(each)[-1].removeprefix('--command=') for each in (install, start, follow)
  )
  assert install == (
    'test -e /tmp/ngrammer_jax/pid || { rm -rf ngrammer_jax /tmp/ngrammer_jax; '
    'mkdir ngrammer_jax /tmp/ngrammer_jax && tar -xzf ngrammer_jax.tgz -C ngrammer_jax && '
    'cd ngrammer_jax && python3 -m pip install --user uv && '
    'python3 -m uv venv --python=3.12 .venv && '
    "python3 -m uv pip install --python=.venv/bin/python --editable '.[tpu,gcs]'; }"
  )
  command = "python -m x '--a=b c' --distributed; echo $? >/tmp/ngrammer_jax/status"
  assert start == (
    'test -e /tmp/ngrammer_jax/pid || { cd ngrammer_jax; export PATH="$PWD/.venv/bin:$PATH"; '
    f'setsid bash -c {shlex.quote(command)} >/tmp/ngrammer_jax/log 2>&1 </dev/null & '
    'echo $! >/tmp/ngrammer_jax/pid; }'
  )
  assert follow == (
    'cd /tmp/ngrammer_jax && tail -n 50 -f --pid=$(cat pid) log; '
    'status=$(cat /tmp/ngrammer_jax/status || echo 1); '
    'echo "<ended with status $status>"; exit $status'
  )
  assert delete == f'{gcloud} delete run --zone=z --project=p --force --quiet'


@pytest.mark.parametrize(
  'type_, runtime',
  [('v5p-32', 'v2-alpha-tpuv5'), ('v6e-64', 'v2-alpha-tpuv6e'), ('v4-32', 'tpu-ubuntu2204-base')],
)
def test_several_slices_are_one_queued_resource(type_, runtime):
  create = dry(FLAGS[0], '--zone=z', f'--type={type_}', '--slices=3', '--option=--reserved')[1]
  assert create.endswith(
    f'create run --accelerator-type={type_} --runtime-version={runtime} --zone=z '
    '--node-count=3 --node-prefix=run --reserved'
  )


def test_finished_at_once(in_bash):
  result, calls = in_bash('0,0')
  assert result.returncode == 0, result.stderr
  assert calls == ['create', 'scp', 'ssh', 'ssh', 'ssh', 'delete']
  trained = re.findall(r'^trains (\S+) (.*)$', result.stdout, re.MULTILINE)
  assert trained == [
    (
      f'{in_bash.folder}/worker{n}/ngrammer_jax',
      '-m ngrammer_jax.train --workdir=gs://b/a b --distributed',
    )
    for n in (0, 1)
  ]
  assert not (in_bash.folder / 'state').exists()


LIFE = ['create', 'scp', 'ssh', 'ssh', 'ssh', 'delete']


@pytest.mark.parametrize('lost', [['preempted'] * 2, ['143,143'], ['0,137']])
def test_again_after_a_loss_until_finished(cloud, lost):
  result, calls = cloud(*lost, '0,0')
  assert result.returncode == 0, result.stderr
  assert calls == (len(lost) + 1) * LIFE
  left = re.findall(r'deleted; (\d+) restarts left', result.stderr)
  assert left == ['100', '99'][: len(lost)]


def test_no_worker_that_speaks_is_a_loss(cloud):
  result, calls = cloud('nobody', '0,0')
  assert result.returncode == 0 and calls == 2 * LIFE


def test_what_was_taken_away_before_is_deleted_first(cloud):
  (cloud.folder / 'state').write_text('SUSPENDED')
  result, calls = cloud('0,0')
  assert result.returncode == 0 and calls == ['delete', *LIFE]


def test_slices_that_cannot_be_had_are_asked_for_again(cloud):
  result, calls = cloud('failed', '0,0')
  assert result.returncode == 0 and calls == ['create', 'delete', *LIFE]


@pytest.mark.parametrize('statuses', ['2,2', '134,2', '2,0'])
def test_what_cannot_work_is_not_tried_again(cloud, statuses):
  result, calls = cloud(statuses)
  assert result.returncode == 2 and calls == LIFE


def test_restarts_end(cloud):
  result, calls = cloud('1,1', more=['--restarts=1'])
  assert result.returncode == 1 and calls == 2 * LIFE
  assert result.stderr.rstrip().endswith('lost or stopped, and deleted; 0 restarts left')


@pytest.mark.parametrize('ended', ['1,1', 'failed'])
def test_what_ends_at_once_again_and_again_is_given_up(cloud, ended):
  result, calls = cloud(ended)
  assert result.returncode == 1 and calls.count('create') == 3 and calls[-1] == 'delete'
  assert 'crashed 3 times within minutes' in result.stderr
  assert not (cloud.folder / 'state').exists()


def test_what_is_taken_away_is_not_given_up(cloud):
  result, calls = cloud(*['preempted'] * 4, '0,0')
  assert result.returncode == 0 and calls == 5 * LIFE


def test_what_gcloud_cannot_tell_is_said_at_once(cloud):
  result, calls = cloud('untold')
  assert result.returncode == 1 and not calls
  assert result.stderr.endswith(
    'gcloud failed to describe the queued resource; nothing was requested\n'
  )


def test_the_packages_of_the_store_are_installed():
  result = dry(*FLAGS, more=['--workdir=gs://b/a'])
  assert any('.[tpu,gcs]' in line for line in result)


def test_a_broken_connection_is_no_loss(cloud):
  result, calls = cloud('broken')
  assert result.returncode == 0 and calls == ['create', 'scp', *4 * ['ssh'], 'delete']


def test_what_cannot_be_created_leaves_nothing(cloud):
  result, calls = cloud('refused')
  assert result.returncode == 1 and set(calls) == {'create'}


def test_what_cannot_be_installed_is_not_tried_on_another_slice(cloud):
  (cloud.folder / 'pip').write_text('7')
  result, calls = cloud('0,0')
  assert result.returncode == 1 and calls == ['create', 'scp', *5 * ['ssh'], 'delete']


def test_ctrl_c_leaves_the_training_and_says_so(in_bash):
  (in_bash.folder / 'plan').write_text('endless')
  env = {'PATH': f'{in_bash.folder}:/usr/bin:/bin'}
  pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
  process = subprocess.Popen(
    [sys.executable, LAUNCHER, *in_bash.flags, '--', 'true'],
    env=env,
    start_new_session=True,
    **pipes,
  )
  for line in process.stdout:
    if line == 'training\n':
      break
  os.killpg(process.pid, signal.SIGINT)
  output = process.communicate(timeout=300)[1]
  pathlib.Path('/tmp', f'{in_bash.flags[0][7:]}.tgz').unlink()
  assert process.returncode == 130
  assert 'the training continues, and costs' in output and 'queued-resources delete' in output
  assert (in_bash.folder / 'state').read_text() == 'ACTIVE'


def test_the_same_command_follows_what_runs(in_bash):
  """After a killed launcher, the running training is not started a second time."""
  for number in (0, 1):
    state = in_bash.folder / f'worker{number}' / 'state'
    (state.parent / 'ngrammer_jax').mkdir(parents=True)
    state.mkdir()
    (state / 'log').write_text('step 10\n')
    (state / 'status').write_text('0\n')
    (state / 'pid').write_text('4194305\n')  # larger than any pid: the process has ended
  (in_bash.folder / 'state').write_text('ACTIVE')
  result, calls = in_bash('0,0')
  assert result.returncode == 0 and calls == LIFE[1:]
  assert 'trains' not in result.stdout and result.stdout.count('step 10') == 2


@pytest.mark.parametrize(
  'flags, output',
  [
    (['--slices=0', '--', 'x'], '--slices must be at least 1'),
    (['--restarts=-1', '--', 'x'], '--restarts and --poll must be at least 0'),
    (['--name=Try_1', '--', 'x'], '--name=Try_1 must be lower-case letters, digits and hyphens'),
    (['--type=v5e:4x4', '--', 'x'], '--type=v5e:4x4: expected for example v5litepod-16'),
    (['--type=v5e-16', '--', 'x'], '--type=v5e-16: expected for example v5litepod-16'),
    (['--', 'x', '--workdir=s3://b/a'], '--workdir=s3://b/a would be deleted with the slice'),
    (['--', 'x', '--workdir=runs/a'], '--workdir=runs/a would be deleted with the slice'),
    (['--', 'x', '--workdir', '/data/a'], '--workdir /data/a would be deleted with the slice'),
  ],
)
def test_invalid_flags_are_reported_before_any_request(flags, output):
  result = subprocess.run(
    [sys.executable, LAUNCHER, *FLAGS, *flags], capture_output=True, text=True
  )
  assert result.returncode == 2 and output in result.stderr
