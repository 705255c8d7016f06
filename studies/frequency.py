"""Loss by the frequency of the last bigram in the training split.

  python -m studies.frequency --folder=runs/studies

scores the first 2^18 tokens of the test split with the runs of `main` and `long_controls` in the
folder, and writes frequency.jsonl. A memory looks up the last bigram: the two tokens before the
predicted one. Runs with a line in the file are skipped.

T tokens.
"""

import argparse
import logging
import pathlib

import numpy as np

from ngrammer_jax import flags, runs
from ngrammer_jax.analysis import lookups, token_losses
from ngrammer_jax.data.tokens import token_split
from studies import results

TABLES = ('main', 'long_controls')
# Classes of bigrams: those that occur never, 1 to 9 times, 10 to 99 times, ...
BOUNDS = (1, 10, 100, 1000, 10_000)
TOKENS = 2**18


def classify(
  train: token_split.TokenSplit, test: token_split.TokenSplit, tokens: int
) -> np.ndarray:
  """Returns the class of the bigram before each of the first tokens that are predicted.

  Args:
    train: the training split.
    test: the test split.
    tokens: T.

  Returns:
    The number of BOUNDS that the count of the bigram in the training split reaches, int [T].
  """
  bigrams_2xT = lookups.token_ngrams(test, tokens, 2)
  train_2xS = lookups.token_ngrams(train, len(train.tokens), 2)
  return np.searchsorted(BOUNDS, lookups.count_ngrams(bigrams_2xT, train_2xS), side='right')


def mean_losses(class_T: np.ndarray, nats_T: np.ndarray) -> dict[str, list]:
  """Returns the number of tokens of each class, and their mean loss in nats."""
  sizes = np.bincount(class_T, minlength=len(BOUNDS) + 1)
  nats = np.bincount(class_T, weights=nats_T, minlength=len(sizes))
  return {'targets': sizes.tolist(), 'nats': (nats / np.maximum(sizes, 1)).tolist()}


def main(argv: list[str]) -> int:
  """Measures the runs that have no line yet."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--folder', type=pathlib.Path, default='runs/studies', help='workdirs')
  folder = parser.parse_args(argv).folder
  done = {result['cell'] for result in results.read(results.FREQUENCY)}
  todo = [r for r in results.read(results.RUNS) if r['table'] in TABLES and r['cell'] not in done]
  present = [result for result in todo if (folder / result['cell']).is_dir()]
  if len(present) < len(todo):
    logging.warning('%s lacks %d of %d runs', folder, len(todo) - len(present), len(todo))
  if not present:
    return 0
  all_runs = [runs.load_run(folder / result['cell']) for result in present]
  texts = [run.split('test') for run in all_runs]
  token_losses.check_same_text(all_runs, texts, 'this table')
  tokens = min(TOKENS, len(texts[0].tokens))
  class_T = classify(all_runs[0].split('train'), texts[0], tokens)
  for result, run, text in zip(present, all_runs, texts, strict=True):
    names = {name: result[name] for name in ('cell', 'table', 'model', 'seed')}
    losses = mean_losses(class_T, token_losses.token_losses(run, text, tokens))
    results.append(results.FREQUENCY, names | losses)
    logging.info('%s: %s', result['cell'], losses)
  return 0


if __name__ == '__main__':
  flags.run(main)
