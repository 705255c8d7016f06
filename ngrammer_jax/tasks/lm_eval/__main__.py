"""Evaluates a run by lm_eval, the harness of EleutherAI:

python -m ngrammer_jax.tasks.lm_eval --model_args workdir=DIR --tasks NAME

pretrained=NAME instead of workdir=DIR is a model of the package or a published one. All other flags
belong to the harness.
"""

import sys

from ngrammer_jax import errors, flags
from ngrammer_jax.system import compilation_cache

DEFAULTS = {'--model': ('-M', 'ngrammer_jax'), '--batch_size': ('-b', 'auto')}


def main(argv: list[str]) -> None:
  """Registers the model and hands over to the command line of the harness."""
  try:
    import lm_eval.__main__

    from ngrammer_jax.tasks.lm_eval import model  # registers it
  except ImportError as error:
    raise errors.BadInput(
      f'this command needs the harness ({error}): pip install "ngrammer_jax[lm-eval]"'
    ) from error
  names = {argument.partition('=')[0] for argument in argv}
  for flag, (short, value) in DEFAULTS.items():
    if names.isdisjoint((flag, short, 'ls', 'validate', '-h', '--help')):
      argv = [*argv, f'{flag}={value}']
  compilation_cache.enable(compilation_cache.DEFAULT)
  sys.argv = [model.__package__, *argv]
  lm_eval.__main__.cli_evaluate()


if __name__ == '__main__':
  flags.run(main)
