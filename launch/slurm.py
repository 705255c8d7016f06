"""Submits a training to Slurm, and goes on after time limits and lost nodes until it is finished.

  python launch/slurm.py --nodes=4 --gpus_per_node=8 --hours=24 -- python -m ngrammer_jax.train \\
    --config=configs/ngrammer_c4.py:393k_8k_50 --workdir=/shared/runs/c4

One process a GPU, as JAX has it under Slurm, through which they find each other. Two minutes
before the time limit all are sent SIGTERM and save. Status 0 (finished) and 2 (it cannot work) end
the job; after anything else Slurm queues it again, --restarts times at most, and the same command
goes on.
"""

import argparse
import shlex
import subprocess
import sys

SCRIPT = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={gpus_per_node}
#SBATCH --gpus-per-node={gpus_per_node}
#SBATCH --time={hours}:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={name}-%j.log
{options}
srun --kill-on-bad-exit=0 {command}
status=$?
if [ $status -ne 0 ] && [ $status -ne 2 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
"""


def script(name, nodes, gpus_per_node, hours, restarts, options, command) -> str:
  """What is submitted."""
  lines = '\n'.join(f'#SBATCH {option}' for option in options)
  given = {'name': name, 'nodes': nodes, 'gpus_per_node': gpus_per_node, 'hours': hours}
  given['restarts'] = restarts
  return SCRIPT.format(**given, options=lines, command=shlex.join(command))


def main() -> int:
  """Submits the script, or prints it."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument('--name', default='ngrammer_jax')
  parser.add_argument('--nodes', type=int, default=1)
  parser.add_argument('--gpus_per_node', type=int, default=8)
  parser.add_argument('--hours', type=int, default=24, help='of one start, a whole number')
  parser.add_argument('--restarts', type=int, default=100, help='at most, of one job')
  parser.add_argument(
    '--option', action='append', default=[], help='more for sbatch: --partition=x'
  )
  parser.add_argument('--dry_run', action='store_true', help='print the script and stop')
  parser.add_argument('command', nargs='+', metavar='-- COMMAND')
  o = parser.parse_args()
  for key in ('nodes', 'gpus_per_node', 'hours'):
    if getattr(o, key) < 1:
      parser.error(f'--{key} must be at least 1')
  text = script(o.name, o.nodes, o.gpus_per_node, o.hours, o.restarts, o.option, o.command)
  if o.dry_run:
    print(text, end='')
    return 0
  try:
    return subprocess.run(['sbatch'], input=text, text=True).returncode
  except OSError as error:
    sys.exit(f'error: sbatch: {error.strerror}; --dry_run prints what would be submitted')


if __name__ == '__main__':
  sys.exit(main())
