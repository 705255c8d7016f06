"""How long training waits for a checkpoint, and how long it takes until it is on disk.

  python benchmarks/checkpoint_stall.py --folder=/tmp/stall --megabytes 10 100 1000

The state is made of float32 matrices of 4 MB, sharded over all devices. Each size is saved
three times; the best time of the second and third is told, for the first one compiles.
"""

import argparse
import pathlib
import shutil
import time

import jax

from ngrammer_jax import sharding
from ngrammer_jax.training import checkpoint_writer


def main() -> None:
  """Prints a table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--folder', type=pathlib.Path, required=True, help='on the disk to measure')
  parser.add_argument('--megabytes', type=int, nargs='+', default=[10, 100, 1000])
  options = parser.parse_args()
  mesh = sharding.make_mesh()
  print(f'{jax.device_count()} {jax.devices()[0].device_kind}')
  print(f'{"MB":>6}{"waits (s)":>12}{"on disk (s)":>13}')
  for megabytes in options.megabytes:
    place = sharding.rows_sharding(mesh)
    state = {
      str(i): jax.device_put(jax.random.normal(jax.random.key(i), (1024, 1024)), place)
      for i in range(max(megabytes // 4, 1))
    }
    waits, lasts = [], []
    shutil.rmtree(options.folder, ignore_errors=True)
    for step in range(3):
      began = time.monotonic()
      with checkpoint_writer.CheckpointWriter(options.folder, keep=1) as saved:
        begun = time.monotonic()
        saved.save(step, state)
        waits.append(time.monotonic() - begun)
      lasts.append(time.monotonic() - began)
    print(f'{megabytes:>6}{min(waits[1:]):>12.2f}{min(lasts[1:]):>13.2f}')
  shutil.rmtree(options.folder)


if __name__ == '__main__':
  main()
