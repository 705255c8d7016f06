"""Exports a run: python -m ngrammer_jax.export --workdir=DIR --output=FOLDER.

The folder has the config, the vocabulary, and the variables as safetensors. `evaluate`, `generate`,
`analyze` and `load_run` take it in place of a run directory.
"""

from ngrammer_jax import flags
from ngrammer_jax.system import files


def main(argv: list[str]) -> int:
  """Writes the folder."""
  parser = flags.make_parser('export', __doc__)
  parser.add_argument('--workdir', type=files.path, required=True, help='run directory')
  parser.add_argument('--step', default='newest', help="step number, 'newest' or 'best'")
  parser.add_argument('--output', type=files.path, required=True, help='a new or empty folder')
  parser.add_argument(
    '--dtype',
    choices=['float32', 'bfloat16'],
    help='dtype of the parameters in the file; default: their own',
  )
  parser.add_argument(
    '--format',
    choices=['run', 'huggingface'],
    default='run',
    help='run: for this package; huggingface: for other libraries, too',
  )
  options = parser.parse_args(argv)

  from ngrammer_jax import runs

  run = runs.load_run(options.workdir, flags.step(options.step))
  run.export(options.output, options.dtype, options.format)
  print(f'wrote {options.output}')
  return 0


if __name__ == '__main__':
  flags.run(main)
