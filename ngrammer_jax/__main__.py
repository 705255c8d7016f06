"""The verbs as one command: ngrammer_jax VERB, or python -m ngrammer_jax VERB.

`ngrammer_jax train ...` is `python -m ngrammer_jax.train ...`.
"""

import argparse
import importlib

from ngrammer_jax import flags
from ngrammer_jax.config import command_line

VERBS = {
  'train': 'train a language model',
  'evaluate': 'score a split with a trained model',
  'finetune': 'fine-tune a trained model',
  'generate': 'continue texts with a trained model',
  'analyze': 'tables and figures of trained models',
  'submit': 'write the SuperGLUE files of the leaderboard',
  'export': 'write a trained model as a folder of safetensors',
}


def main(argv: list[str]) -> int | None:
  """Runs the verb that the first argument names, with the others."""
  verbs = '\n'.join(f'  {verb:10}{text}' for verb, text in VERBS.items())
  parser = argparse.ArgumentParser(
    prog='ngrammer_jax',
    description='Language models with explicit memory.',
    epilog=f'verbs, of which each has its own --help:\n{verbs}',
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  flags.add_version(parser)
  command_line.add_list(parser)
  parser.add_argument('verb', choices=VERBS, metavar='VERB', help='one of the verbs below')
  verb = parser.parse_args(argv[:1]).verb
  return importlib.import_module(f'ngrammer_jax.{verb}').main(argv[1:])


def console_script() -> None:
  """Runs the command `ngrammer_jax`."""
  flags.run(main)


if __name__ == '__main__':
  console_script()
