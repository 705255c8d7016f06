"""Measures how long a checkpoint blocks training, and how long it takes to reach the disk.

  python benchmarks/checkpoint_stall.py --folder=/tmp/stall --megabytes 10 100 1000

The state consists of float32 matrices of 4 MB, sharded over all devices. Each size is saved three
times. The table shows the best time of the second and third; the first one compiles.
"""

import argparse
import pathlib
import shutil
import time

import jax

from ngrammer_jax import sharding
from ngrammer_jax.checkpoints import writer as checkpoint_writer


def main() -> None:
  """Prints a table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--folder', type=pathlib.Path, required=True, help='folder on the disk to measure'
  )
  parser.add_argument('--megabytes', type=int, nargs='+', default=[10, 100, 1000])
  options = parser.parse_args()
  mesh = sharding.make_mesh()
  print(f'{jax.device_count()} {jax.devices()[0].device_kind}')
  print(f'{"MB":>6}{"waits (s)":>12}{"on disk (s)":>13}')
  for megabytes in options.megabytes:
    row_sharding = sharding.rows_sharding(mesh)
    state = {
      str(i): jax.device_put(jax.random.normal(jax.random.key(i), (1024, 1024)), row_sharding)
      for i in range(max(megabytes // 4, 1))
    }
    waits = []
    totals = []
    shutil.rmtree(options.folder, ignore_errors=True)
    for step in range(3):
      start = time.monotonic()
      with checkpoint_writer.CheckpointWriter(options.folder, keep=1) as writer:
        save_start = time.monotonic()
        writer.save(step, state)
        waits.append(time.monotonic() - save_start)
      totals.append(time.monotonic() - start)
    print(f'{megabytes:>6}{min(waits[1:]):>12.2f}{min(totals[1:]):>13.2f}')
  shutil.rmtree(options.folder)


if __name__ == '__main__':
  main()
