"""The script `ngrammer_jax`: runs a command of the package.

`ngrammer_jax train ...` is `python -m ngrammer_jax.train ...`.
"""

import argparse
import importlib
import sys

from ngrammer_jax import command_line, flags

COMMANDS = {
  'train': 'train a language model',
  'evaluate': 'score a split with a trained model',
  'finetune': 'fine-tune a trained model',
  'generate': 'continue texts with a trained model',
  'analyze': 'tables and figures of trained models',
  'submit': 'write the SuperGLUE files of the leaderboard',
  'export': 'write a trained model as a folder of safetensors',
}

EXAMPLES = """\
examples:
  ngrammer_jax train --config=quickstart --workdir=runs/quickstart
  ngrammer_jax generate --workdir=runs/quickstart --prompt="My fellow citizens"
  ngrammer_jax analyze clusters --workdir=runs/quickstart"""


def main(argv: list[str]) -> int | None:
  """Runs the command of the first argument with the other arguments; without, its help."""
  listed = '\n'.join(f'  {command:10}{text}' for command, text in COMMANDS.items())
  parser = argparse.ArgumentParser(
    prog='ngrammer_jax',
    description='Language models with explicit memory.',
    epilog=f'commands, each with its own --help:\n{listed}\n\n{EXAMPLES}',
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  flags.add_version(parser)
  command_line.add_list(parser)
  parser.add_argument('command', choices=COMMANDS, metavar='COMMAND', help='one of these')
  if not argv:
    parser.print_help()
    return 0
  command = parser.parse_args(argv[:1]).command
  return importlib.import_module(f'ngrammer_jax.{command}').main(argv[1:])


def console_script() -> None:
  """Runs the command `ngrammer_jax`."""
  sys.path.insert(0, '')  # configs import others of the checkout in the working folder
  flags.run(main)


if __name__ == '__main__':
  console_script()
