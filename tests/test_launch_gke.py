"""launch/gke.py, and the container that it starts."""

import pathlib
import re
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
LAUNCHER = ROOT / 'launch' / 'gke.py'
FLAGS = ['--name=c4', '--cluster=c', '--zone=z', '--type=v5litepod-16', '--image=registry/image:1']


def launch(*flags, **options):
  command = [sys.executable, LAUNCHER, *FLAGS, *flags]
  return subprocess.run(command, capture_output=True, text=True, **options)


def test_dry_run_prints_the_commands():
  flags = ['--slices=2', '--restarts=7', '--project=p', '--option=--priority=low', '--dry_run']
  process = launch(*flags, '--', 'python', '-m', 'x', '--a=b c', '--workdir=gs://b/c')
  command = "exec python -m x '--a=b c' --workdir=gs://b/c --distributed"
  assert process.stdout.splitlines() == [
    'xpk workload create --workload=c4 --cluster=c --zone=z --project=p --tpu-type=v5litepod-16 '
    '--num-slices=2 --docker-image=registry/image:1 --max-restarts=7 '
    '--restart-on-exit-codes=1,3-126 --termination-grace-period-seconds=120 --priority=low '
    + shlex.quote(f'--command={command}'),
    'xpk workload list --cluster=c --zone=z --project=p --filter-by-job=c4',
    'xpk workload delete --workload=c4 --cluster=c --zone=z --project=p',
  ]


@pytest.mark.parametrize('status', [0, 3])
def test_the_status_is_that_of_xpk(tmp_path, status):
  (tmp_path / 'xpk').write_text(f'#!/bin/bash\necho "$1 $2" >>{tmp_path}/calls\nexit {status}\n')
  (tmp_path / 'xpk').chmod(0o755)
  process = launch('--', 'true', env={'PATH': f'{tmp_path}:/usr/bin:/bin'})
  assert process.returncode == status
  assert (tmp_path / 'calls').read_text() == 'workload create\n'
  assert ('xpk workload delete' in process.stdout) == (status == 0)


@pytest.mark.parametrize(
  'flags, message',
  [
    (['--slices=0', '--', 'x'], '--slices must be at least 1'),
    (['--', 'x', '--workdir=runs/a'], '--workdir=runs/a would be lost with the container'),
  ],
)
def test_invalid_flags_are_reported(flags, message):
  process = launch(*flags)
  assert process.returncode == 2 and message in process.stderr


# What xpk 1.16 runs in the container, according to its --output-manifest-file.
XPK = """
_sigterm() (kill -SIGTERM $! 2>/dev/null;);
trap _sigterm SIGTERM;
(%s) & PID=$!;
while kill -0 $PID 2>/dev/null;
    do sleep 0.2;
done;
wait $PID;
EXIT_CODE=$?;
exit $EXIT_CODE
"""


def test_sigterm_to_a_pod_reaches_the_training():
  """SIGTERM to the shell of xpk reaches the training, and its exit status is passed on."""
  training = (
    'import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); '
    'print("started", flush=True); time.sleep(60)'
  )
  process = launch('--dry_run', '--', sys.executable, '-c', training)
  command = shlex.split(process.stdout.splitlines()[0])[-1].removeprefix('--command=')
  pod = subprocess.Popen(['bash', '-c', XPK % command], stdout=subprocess.PIPE, text=True)
  assert pod.stdout.readline() == 'started\n'
  pod.terminate()
  assert pod.wait(timeout=300) == 143


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


def test_launchers_have_nothing_private():
  examples = [
    '/home/ann/x',
    'AKIAABCDEFGHIJKLMNOP',
    'me@a-b.iam.gserviceaccount.com',
    'gs://mine/x',
  ]
  assert [private(text) for text in [*examples, '--project=my-project']] == [
    [kind] for kind in PRIVATE
  ]
  files = [file for file in (ROOT / 'launch').iterdir() if file.is_file()]
  files += [ROOT / 'docs' / 'runbook.md', ROOT / '.dockerignore']
  found = {str(file): private(file.read_text()) for file in files}
  assert not {name: kind for name, kind in found.items() if kind}
