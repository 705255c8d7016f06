"""Submits a training to the TPU slices of a GKE cluster with xpk; restarts it until it is finished.

  python launch/gke.py --name=c4 --cluster=CLUSTER --zone=ZONE --type=v5litepod-16 \\
    --image=IMAGE -- python -m ngrammer_jax.train --config=configs/ngrammer_c4.py:393k_8k_50 \\
    --workdir=gs://BUCKET/c4

Build the image from launch/Dockerfile. Every host runs the command with --distributed; GKE sets the
variables through which hosts and slices connect. The job ends with status 0 (finished) or 2 (bad
input); after any other status or a lost node all hosts restart, at most --restarts times.
"""

import argparse
import re
import shlex
import subprocess
import sys

RESTART_STATUSES = '1,3-126'  # all but 0 and 2; xpk adds 42 and 127-255
GRACE = 120  # seconds between SIGTERM and SIGKILL, for saving a checkpoint


def commands(args: argparse.Namespace) -> list[list[str]]:
  """Returns the commands that create, list and delete the workload."""
  location = [f'--cluster={args.cluster}', f'--zone={args.zone}']
  location += [f'--project={args.project}'] if args.project else []
  command = args.command + ['--distributed'] * ('--distributed' not in args.command)
  create = [
    f'--workload={args.name}',
    *location,
    f'--tpu-type={args.type}',
    f'--num-slices={args.slices}',
    f'--docker-image={args.image}',
    f'--max-restarts={args.restarts}',
    f'--restart-on-exit-codes={RESTART_STATUSES}',
    f'--termination-grace-period-seconds={GRACE}',
    *args.option,
    f'--command=exec {shlex.join(command)}',  # exec: xpk's shell sends SIGTERM to its child
  ]
  return [
    ['xpk', 'workload', 'create', *create],
    ['xpk', 'workload', 'list', *location, f'--filter-by-job={args.name}'],
    ['xpk', 'workload', 'delete', f'--workload={args.name}', *location],
  ]


def main() -> int:
  """Submits the workload, or prints the commands."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument('--name', required=True, help='name of the workload')
  parser.add_argument('--cluster', required=True)
  parser.add_argument('--zone', required=True)
  parser.add_argument('--project', help='default: the project of gcloud')
  parser.add_argument('--type', required=True, help='type of a slice: v5litepod-16, v5p-32, v6e-64')
  parser.add_argument('--slices', type=int, default=1, help='number of slices')
  parser.add_argument('--image', required=True, help='image in a registry of the cluster')
  parser.add_argument('--restarts', type=int, default=100, help='maximum number of restarts')
  parser.add_argument(
    '--option', action='append', default=[], help='option for xpk, such as --priority=low'
  )
  parser.add_argument('--dry_run', action='store_true', help='print the commands and stop')
  parser.add_argument('command', nargs='+', metavar='-- COMMAND')
  args = parser.parse_args()
  if args.slices < 1:
    parser.error('--slices must be at least 1')
  if not re.fullmatch(r'v\d+[a-z]*-\d+', args.type):
    parser.error(
      f'--type={args.type}: expected for example v5litepod-16 (which is v5e:4x4), v5p-32 or v6e-64'
    )
  workdir = re.search(r'--workdir[= ]([^/\s]\S*)', ' '.join(args.command))
  if workdir and '://' not in workdir[1]:
    parser.error(
      f'{workdir[0]} would be lost with the container: use gs://BUCKET/FOLDER, or a mount'
    )
  create, *list_and_delete = commands(args)
  if args.dry_run:
    print('\n'.join(map(shlex.join, [create, *list_and_delete])))
    return 0
  try:
    status = subprocess.run(create).returncode
  except OSError as error:
    sys.exit(f'error: xpk: {error.strerror}; --dry_run prints the commands')
  if status == 0:
    print('\n'.join(['submitted; to list and to delete it:', *map(shlex.join, list_and_delete)]))
  return status


if __name__ == '__main__':
  sys.exit(main())
