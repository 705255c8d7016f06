"""Exports a run or a pretrained model: python -m ngrammer_jax.export --workdir=DIR --output=FOLDER.

The folder has the config, the vocabulary, and the variables as safetensors. `evaluate`, `generate`,
`analyze` and `load_run` take it in place of a run directory.
"""

from ngrammer_jax import flags
from ngrammer_jax.system import storage


def main(argv: list[str]) -> int:
  """Writes the folder."""
  parser = flags.make_parser('export', __doc__)
  flags.add_run(parser)
  parser.add_argument('--output', type=storage.path, required=True, help='a new or empty folder')
  text = 'dtype of the parameters in the file; default: their own'
  parser.add_argument('--dtype', choices=['float32', 'bfloat16'], help=text)
  text = 'run: for this package; huggingface: for other libraries, too'
  parser.add_argument('--format', choices=['run', 'huggingface'], default='run', help=text)
  options = parser.parse_args(argv)
  flags.load_run(options).export(options.output, options.dtype, options.format)
  print(f'wrote {options.output}')
  return 0


if __name__ == '__main__':
  flags.run(main)
