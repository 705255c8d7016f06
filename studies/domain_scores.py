"""Scores a run of studies.domain, and removes its memory to see whether the base is unchanged.

  python -m studies.domain_scores --workdir=DIR --data=/path/to/corpora --texts=c_source,enwik8

writes domain_scores.json into the run directory. T tokens.
"""

import argparse
from collections.abc import Iterator
import dataclasses
import json
import lzma
import pathlib
from typing import Any

import flax.traverse_util
import numpy as np

from ngrammer_jax import flags, runs
from ngrammer_jax.analysis import retention, token_losses
from ngrammer_jax.checkpoints import frozen
from ngrammer_jax.config.ngram import memory as ngram_memory
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.inference import language_modeling
from ngrammer_jax.optimizers import partition
from ngrammer_jax.system import compilation_cache, files
from studies import first_tokens, longer, pretrained

FILE = 'domain_scores.json'
VALIDATION = 'c_source_validation'
C_SOURCE = 'c_source'
ENWIK8 = 'enwik8'
TOKENS = {VALIDATION: 65_536, C_SOURCE: 262_144, ENWIK8: 262_144}  # the first ones of the split
SPLITS = {VALIDATION: 'validation', C_SOURCE: 'test'}
BASE_TOKENS = 8192  # of the validation split, for the comparison with the base


def read_text(run: runs.Run, data: pathlib.Path, name: str, count: int) -> token_split.TokenSplit:
  """Returns the first tokens of a text.

  Args:
    run: the run, for its vocabulary.
    data: folder of the corpora.
    name: one of TOKENS.
    count: number of tokens.
  """
  if name == ENWIK8:
    file, first, _ = longer.TEXTS[ENWIK8]
    documents = iter([first_tokens.read(data / file, first, count)])
  else:
    documents = _read_lines(data / 'c_source' / f'{SPLITS[name]}.jsonl.xz')
  return first_tokens.encode(documents, run.vocabulary, count)


def _read_lines(path: pathlib.Path) -> Iterator[bytes]:
  with lzma.open(path) as lines:
    for line in lines:
      yield json.loads(line)['text'].encode()


def score(run: runs.Run, text: token_split.TokenSplit) -> dict[str, Any]:
  """Returns the loss of a whole text."""
  evaluation = dataclasses.replace(run.config.evaluation, max_tokens=None)
  config = dataclasses.replace(run.config, evaluation=evaluation)
  result = language_modeling.evaluate(run.engine, run.variables, text, config)
  names = 'nll_nats_per_token', 'bits_per_byte', 'tokens'
  return {name: result[name] for name in names}


def is_base_restored(run: runs.Run, base: runs.Run, text: token_split.TokenSplit) -> bool | None:
  """Returns whether a run without its memory has exactly the losses of its base at each token.

  None if the run has no memory, or trains the base.

  Args:
    run: the run.
    base: the model that it started from.
    text: the text.
  """
  memories = run.config.model.ngram_memories
  if not memories or run.config.optimizer.train != ('new',):
    return None
  without, variables = retention.remove(run, ngram_memory.table_module(0, memories[0]))
  base = dataclasses.replace(base, config=without.config)
  tokens = len(text.tokens)
  restored_T = token_losses.token_losses(without, text, tokens, variables)
  expected_T = token_losses.token_losses(base, text, tokens)
  return bool(np.array_equal(restored_T, expected_T))


def count_trained(run: runs.Run) -> int:
  """Returns the number of parameters that are not frozen, as the base or as a table."""
  frozen_names = set(frozen.dtypes(run.workdir))
  params = flax.traverse_util.flatten_dict(run.restored.params, sep='/')
  optimizers = {memory.optimizer for memory in run.config.model.ngram_memories}
  if partition.FROZEN in optimizers:
    frozen_names |= {name for name in params if name.endswith('/table')}
  return sum(leaf.size for name, leaf in params.items() if name not in frozen_names)


def main(argv: list[str]) -> int:
  """Scores a run."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--workdir', type=pathlib.Path, required=True, help='run directory')
  parser.add_argument('--data', type=pathlib.Path, required=True, help='folder of the corpora')
  parser.add_argument('--texts', required=True, help=f'some of {", ".join(TOKENS)}')
  options = parser.parse_args(argv)
  compilation_cache.enable(compilation_cache.DEFAULT)
  run = runs.load_run(options.workdir)
  base = runs.load_pretrained(pretrained.MODEL)
  result: dict[str, Any] = {'trained_parameters': count_trained(run)}
  text = read_text(run, options.data, VALIDATION, BASE_TOKENS)
  result['base_restored'] = is_base_restored(run, base, text)
  for name in options.texts.split(','):
    result[name] = score(run, read_text(run, options.data, name, TOKENS[name]))
  files.write(options.workdir / FILE, json.dumps(result))
  return 0


if __name__ == '__main__':
  flags.run(main)
