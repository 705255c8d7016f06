"""Submits a training to TPU slices of a GKE cluster through xpk, restarted until it is finished.

  python launch/gke.py --name=c4 --cluster=CLUSTER --zone=ZONE --type=v5litepod-16 \\
    --image=IMAGE -- python -m ngrammer_jax.train --config=configs/ngrammer_c4.py:393k_8k_50 \\
    --workdir=gs://BUCKET/c4

The image is that of launch/Dockerfile. Every host runs the command with --distributed; what hosts
and slices need to find each other is set by GKE. Status 0 (finished) and 2 (it cannot work) end the
job; after anything else, and after a lost node, all hosts start again, --restarts times at most.
"""

import argparse
import re
import shlex
import subprocess
import sys

AGAIN = '1,3-126'  # statuses that start again, beside xpk's own 42 and 127-255: all but 0 and 2
GRACE = 120  # seconds between SIGTERM and SIGKILL, to save in


def commands(o: argparse.Namespace) -> list[list[str]]:
  """What submits it, and what shows how it stands and deletes it."""
  where = [f'--cluster={o.cluster}', f'--zone={o.zone}']
  where += [f'--project={o.project}'] if o.project else []
  command = o.command + ['--distributed'] * ('--distributed' not in o.command)
  create = [
    f'--workload={o.name}',
    *where,
    f'--tpu-type={o.type}',
    f'--num-slices={o.slices}',
    f'--docker-image={o.image}',
    f'--max-restarts={o.restarts}',
    f'--restart-on-exit-codes={AGAIN}',
    f'--termination-grace-period-seconds={GRACE}',
    *o.option,
    f'--command=exec {shlex.join(command)}',  # exec: xpk's shell sends SIGTERM to its child
  ]
  return [
    ['xpk', 'workload', 'create', *create],
    ['xpk', 'workload', 'list', *where, f'--filter-by-job={o.name}'],
    ['xpk', 'workload', 'delete', f'--workload={o.name}', *where],
  ]


def main() -> int:
  """Submits it, or prints the commands."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument('--name', required=True, help='of the workload')
  parser.add_argument('--cluster', required=True)
  parser.add_argument('--zone', required=True)
  parser.add_argument('--project', help='that of gcloud')
  parser.add_argument('--type', required=True, help='of a slice: v5litepod-16, v5p-32, v6e-64')
  parser.add_argument('--slices', type=int, default=1)
  parser.add_argument('--image', required=True, help='in a registry that the cluster reads')
  parser.add_argument('--restarts', type=int, default=100, help='at most')
  parser.add_argument('--option', action='append', default=[], help='more for xpk: --priority=low')
  parser.add_argument('--dry_run', action='store_true', help='print the commands and stop')
  parser.add_argument('command', nargs='+', metavar='-- COMMAND')
  o = parser.parse_args()
  if o.slices < 1:
    parser.error('--slices must be at least 1')
  if not re.fullmatch(r'v\d+[a-z]*-\d+', o.type):
    parser.error(
      f'--type={o.type}: expected as in v5litepod-16, which is v5e:4x4, v5p-32 or v6e-64'
    )
  workdir = re.search(r'--workdir[= ]([^/\s]\S*)', ' '.join(o.command))
  if workdir and '://' not in workdir[1]:
    parser.error(f'{workdir[0]} would be lost with the container: gs://BUCKET/FOLDER, or a mount')
  create, *later = commands(o)
  if o.dry_run:
    print('\n'.join(map(shlex.join, [create, *later])))
    return 0
  try:
    status = subprocess.run(create).returncode
  except OSError as error:
    sys.exit(f'error: xpk: {error.strerror}; --dry_run prints what would be run')
  if status == 0:
    print('\n'.join(['submitted; how it stands, and to delete it:', *map(shlex.join, later)]))
  return status


if __name__ == '__main__':
  sys.exit(main())
