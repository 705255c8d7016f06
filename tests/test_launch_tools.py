"""SkyPilot and xpk read what this repository has for them. They reach no cloud.

Each is installed from a package index into an environment of its own.
"""

import json
import shlex
import string
import subprocess
import sys
import venv

import pytest
import yaml

from tests import documentation
from tests.test_launch import CAN_RETRY, LAUNCH, ROOT, RUNBOOK, load_task, write_program

pytestmark = pytest.mark.slow


def install(folder, requirement):
  """Returns the programs of a new environment with a package, or skips the test."""
  venv.create(folder, with_pip=True)
  programs = folder / 'bin'
  command = [programs / 'python', '-m', 'pip', 'install', '--quiet', requirement]
  process = subprocess.run(command, capture_output=True, text=True)
  if process.returncode:
    pytest.skip(f'pip cannot install {requirement}: {process.stderr.strip().splitlines()[-1]}')
  return programs


def run(command, home):
  """Runs a command whose home is an empty folder, and whose commands are those of the system."""
  env = {'HOME': str(home), 'PATH': '/usr/bin:/bin', 'SKYPILOT_DISABLE_USAGE_COLLECTION': '1'}
  process = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
  assert process.returncode == 0, process.stdout + process.stderr
  return process.stdout


# SkyPilot downloads its catalogues. These have one slice, and one machine, which it requires.
CATALOGUES = {
  'vms': 'InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Price,SpotPrice,'
  'Region,AvailabilityZone\n'
  ',,,tpu-v5litepod-16,1,tpu-v5litepod-16,19.2,9.6,REGION,REGION-a\n'
  'n1-highmem-8,8,52,,,,0.4,0.1,REGION,REGION-a\n',
  'images': 'Tag,Region,OS,OSVersion,ImageId,CreationDate\n',
  'accelerator_quota_mapping': 'Accelerator,OnDemandInstanceCode,SpotInstanceCode\n',
}

# Loads a task, with and without variables, asks which of the statuses of its hosts restart it, and
# parses commands. Its arguments and the result are JSON.
SKYPILOT = """
import json, sys, types
import click, sky, yaml
from sky import clouds
from sky.client.cli import command
from sky.jobs import recovery_strategy

arguments = json.loads(sys.argv[1])
load = lambda variables: sky.Task.from_yaml_config(yaml.safe_load(arguments['task']), variables)
try:
  load([])
except ValueError as error:
  missing = str(error)
task = load(list(arguments['variables'].items()))
task.validate()
(resources,) = task.resources
slices = clouds.GCP()._get_feasible_launchable_resources(resources.copy()).resources_list
executor = types.SimpleNamespace(
  recover_on_exit_codes=resources.job_recovery['recover_on_exit_codes'],
  max_restarts_on_errors=resources.job_recovery['max_restarts_on_errors'],
  restart_cnt_on_failure=0,
)
restarts = [
  recovery_strategy.StrategyExecutor.should_restart_on_failure(executor, statuses)
  for statuses in arguments['statuses']
]
for argv in arguments['commands']:
  program, rest = command.cli, argv[1:]
  while isinstance(program, click.Group):
    program, *rest = program.get_command(click.Context(program), rest[0]), *rest[1:]
  program.make_context(' '.join(argv), rest)
result = {
  'missing': missing,
  'restarts': restarts,
  'strategy': resources.job_recovery['strategy'],
  'slices': [[s.instance_type, s.accelerators, s.accelerator_args, s.use_spot] for s in slices],
  'file_mounts': task.file_mounts,
}
with open(sys.argv[2], 'w') as file:
  json.dump(result, file)
"""


def test_skypilot_loads_the_task_and_restarts_it(tmp_path):
  programs = install(tmp_path / 'environment', 'skypilot==0.14.1')
  catalogues = tmp_path / '.sky' / 'catalogs' / 'v8' / 'gcp'
  catalogues.mkdir(parents=True)
  for name, text in CATALOGUES.items():
    (catalogues / f'{name}.csv').write_text(text.replace('REGION', 'us-west4'))
  text = (LAUNCH / 'sky.yaml').read_text()
  with_corpus = text.replace('# file_mounts:\n#   /', 'file_mounts:\n  /')
  assert with_corpus != text
  commands = documentation.all_commands(RUNBOOK, 'sky')
  assert len(commands) > 6
  arguments = {
    'task': with_corpus.replace('infra: gcp ', 'infra: gcp/us-west4 '),
    'variables': {'BUCKET': 'b'},
    # As launch/sky.yaml reports them: 1 for what can be retried; 137 for the other hosts.
    'statuses': [[1, 137, 137, 137], [137, 1], [2, 137, 137, 137], [2, 2], [137, 2]],
    'commands': commands,
  }
  run([programs / 'python', '-c', SKYPILOT, json.dumps(arguments), tmp_path / 'json'], tmp_path)
  result = json.loads((tmp_path / 'json').read_text())
  assert "Environment variable 'BUCKET' is None" in result['missing']
  assert result['restarts'] == [True, True, False, False, False]
  assert result['strategy'] == 'FAILOVER'
  version = load_task()['resources']['accelerator_args']
  assert result['slices'] == [['TPU-VM', {'tpu-v5litepod-16': 1}, version, True]]
  assert result['file_mounts'] == {'/tmp/c4': 'gs://b/c4'}


# Parses commands.
XPK = """
import argparse, json, sys
from xpk.parser import core
for argv in json.loads(sys.argv[1]):
  parser = argparse.ArgumentParser(prog='xpk')
  core.set_parser(parser)
  parser.parse_args(argv[1:])
"""

# Waits for SIGTERM, as a training does.
TRAINING = f"""exec {sys.executable} -c '
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print(*sys.argv[1:], flush=True)
time.sleep(300)
' "$@"
"""


VARIABLES = {'BUCKET': 'b', 'IMAGE': 'image', 'PROJECT': 'p', 'ZONE': 'us-west4-a'}


def test_xpk_writes_a_job_that_restarts(tmp_path):
  programs = install(tmp_path / 'environment', 'xpk==1.16.0')
  commands = [
    [string.Template(word).substitute(VARIABLES) for word in argv]
    for argv in documentation.all_commands(RUNBOOK, 'xpk')
  ]
  run([programs / 'python', '-c', XPK, json.dumps(commands)], tmp_path)
  (create,) = (argv for argv in commands if argv[1:3] == ['workload', 'create'])
  options = ['--dry-run', '--skip-validation', f'--output-manifest-file={tmp_path}/job.yaml']
  run([programs / 'python', '-m', 'xpk.main', *create[1:], *options], tmp_path)
  job = yaml.safe_load((tmp_path / 'job.yaml').read_text())
  assert job['spec']['failurePolicy']['maxRestarts'] == 100
  (slices,) = job['spec']['replicatedJobs']
  assert slices['replicas'] == 2
  hosts = slices['template']['spec']
  (rule,) = hosts['podFailurePolicy']['rules']
  assert (rule['action'], rule['onExitCodes']['operator']) == ('FailJob', 'NotIn')
  restarted = {*rule['onExitCodes']['values']}
  assert all((status in restarted) == can_retry for status, can_retry in CAN_RETRY.items())
  (container,) = hosts['template']['spec']['containers']
  # SIGTERM to the shell of xpk reaches the training, and its exit status is passed on.
  write_program(tmp_path / 'bin' / 'python', TRAINING)
  env = {'PATH': f'{tmp_path}/bin:/usr/bin:/bin'}
  pod = subprocess.Popen(container['command'], env=env, stdout=subprocess.PIPE, text=True)
  try:
    assert pod.stdout.readline().startswith('XPK Start')
    (command,) = (word for word in create if word.startswith('--command='))
    expected = shlex.split(command.partition(' python ')[2])
    assert pod.stdout.readline().split() == expected
    pod.terminate()
    assert pod.wait(timeout=300) == 143
  finally:
    pod.kill()
