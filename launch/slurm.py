"""Submits a training to Slurm, which requeues it after time limits and lost nodes.

  python launch/slurm.py --nodes=4 --gpus_per_node=8 --hours=24 -- python -m ngrammer_jax.train \\
    --config=configs/ngrammer_c4.py:393k_8k_50 --workdir=/shared/runs/c4

Each GPU has one process, which JAX requires under Slurm; JAX finds the processes through Slurm. Two
minutes before the time limit, all processes receive SIGTERM and save a checkpoint. The job ends
with status 0 (finished) or 2 (bad input); after any other status Slurm requeues it, at most
--restarts times, and the same command resumes.
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


def format_script(args: argparse.Namespace) -> str:
  """Returns the batch script."""
  options = '\n'.join(f'#SBATCH {option}' for option in args.option)
  return SCRIPT.format(**vars(args) | {'options': options, 'command': shlex.join(args.command)})


def main() -> int:
  """Submits the script, or prints it."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument('--name', default='ngrammer_jax')
  parser.add_argument('--nodes', type=int, default=1)
  parser.add_argument('--gpus_per_node', type=int, default=8)
  parser.add_argument('--hours', type=int, default=24, help='time limit in hours, for each start')
  parser.add_argument('--restarts', type=int, default=100, help='maximum number of restarts')
  parser.add_argument(
    '--option', action='append', default=[], help='option for sbatch, such as --partition=x'
  )
  parser.add_argument('--dry_run', action='store_true', help='print the script and stop')
  parser.add_argument('command', nargs='+', metavar='-- COMMAND')
  args = parser.parse_args()
  for key in ('nodes', 'gpus_per_node', 'hours'):
    if getattr(args, key) < 1:
      parser.error(f'--{key} must be at least 1')
  text = format_script(args)
  if args.dry_run:
    print(text, end='')
    return 0
  try:
    return subprocess.run(['sbatch'], input=text, text=True).returncode
  except OSError as error:
    sys.exit(f'error: sbatch: {error.strerror}; --dry_run prints the script')


if __name__ == '__main__':
  sys.exit(main())
