"""Loss by the frequency of the last bigram in the training split.

  python -m studies.frequency --folder=runs/studies

scores the first 2^18 tokens of the test split with every run of the main table in the folder, and
writes frequency.jsonl. The last bigram is the two tokens before the predicted one, which a memory
looks up. Runs that have a line already are skipped.

B rows, T segment length, P targets.
"""

import argparse
import pathlib

import numpy as np

from ngrammer_jax import progress, runs
from ngrammer_jax.data import streams
from studies import results

# Classes of bigrams: those that occur never, 1 to 9 times, 10 to 99 times, ...
BOUNDS = (1, 10, 100, 1000, 10_000)
TARGETS = 2**18
ROWS = 16


def classify(train: np.ndarray, test: np.ndarray, vocabulary_size: int) -> np.ndarray:
  """Returns the class of the bigram before each token of the test split, from its third token.

  Args:
    train: token ids of the training split.
    test: token ids [P + 2] of the test split.
    vocabulary_size: number of token ids.

  Returns:
    The number of BOUNDS that the count of the bigram in the training split reaches, int [P].
  """
  bigrams, counts = np.unique(_bigrams(train, vocabulary_size), return_counts=True)
  read_P = _bigrams(test[:-1], vocabulary_size)
  index_P = np.minimum(np.searchsorted(bigrams, read_P), len(bigrams) - 1)
  counts_P = np.where(bigrams[index_P] == read_P, counts[index_P], 0)
  return np.searchsorted(BOUNDS, counts_P, side='right')


def _bigrams(tokens, vocabulary_size):
  """Returns one number for each bigram."""
  tokens = np.asarray(tokens).astype(np.int64)
  return tokens[:-1] * vocabulary_size + tokens[1:]


def score(run: runs.Run, text, targets: int) -> np.ndarray:
  """Returns the losses of the tokens from the third on, in ROWS streams, float64 [P]."""
  T, stride, parts = run.config.evaluation_length(), targets // ROWS, []

  def make_segment(index, row_slice):
    rows = range(row_slice.start, row_slice.stop)
    return streams.stack_rows(text.window(2 + row * stride + index * T, T) for row in rows)

  with progress.Progress('scoring', targets, 'tokens') as bar:
    num_segments = -(-stride // T)
    for scores in run.engine.score_segments(run.variables, ROWS, num_segments, make_segment):
      parts.append(scores.nll_BxT)
      bar.advance(scores.nll_BxT.size)
  return np.concatenate(parts, axis=1)[:, :stride].astype(np.float64).reshape(-1)


def measure(run: runs.Run, targets: int = TARGETS) -> dict[str, list]:
  """Returns the number of targets and the mean loss in nats of each class of bigrams."""
  train, test = run.split('train').tokens, run.split('test')
  classes_P = classify(train, test.tokens[: targets + 2], run.vocabulary.size)
  sizes = np.bincount(classes_P, minlength=len(BOUNDS) + 1)
  nats = np.bincount(classes_P, weights=score(run, test, targets), minlength=len(sizes))
  return {'targets': sizes.tolist(), 'nats': (nats / np.maximum(sizes, 1)).tolist()}


def main() -> None:
  """Measures the runs that have no line yet."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--folder', type=pathlib.Path, default='runs/studies', help='workdirs')
  folder = parser.parse_args().folder
  done = {result['cell'] for result in results.read(results.FREQUENCY)}
  for result in results.read(results.RUNS):
    if result['table'] == 'main' and result['cell'] not in done:
      names = {name: result[name] for name in ('cell', 'model', 'seed')}
      run = runs.load_run(folder / result['cell'])
      results.append(results.FREQUENCY, names | measure(run))


if __name__ == '__main__':
  main()
