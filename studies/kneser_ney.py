"""A model that just counts: interpolated Kneser-Ney, with the discounts of Chen and Goodman (1999).

A control of the n-gram memories in program.md: a mixture of counts and a Transformer.

  python -m studies.kneser_ney --folder=runs/studies

mixes each finished run of `untied` in the folder with a model of order 5 of its training tokens,
and appends a line to program.jsonl. The first 2^18 validation tokens select the share of counts;
the loss covers the whole test split.

    p_n(w | h) = max(c(h w) - D(c(h w)), 0) / c(h) + gamma(h) p_{n-1}(w | h')

with c the count for the highest order and the number of different tokens before h w for the others,
h' without its first token; gamma(h) makes the sum over w equal to 1. p_0 is uniform.

T training tokens, S scored tokens, U different n-grams.
"""

import argparse
import dataclasses
import logging
import pathlib

import numpy as np

from ngrammer_jax import flags, runs
from ngrammer_jax.analysis import token_losses
from studies import results

MODEL = 'untied'
MIXTURE = 'untied_kneser_ney'
ORDER = 5
VALIDATION_TOKENS = 2**18


@dataclasses.dataclass(frozen=True)
class _Order:
  """The n-grams of one order. Their ids are positions in `keys`.

  Attributes:
    keys: id of the first n - 1 tokens times V plus the last token, rising, int64 [U].
    counts: count or continuation count of each n-gram, int64 [U].
    context_counts: sum of the counts of the n-grams with the same first n - 1 tokens, by their id.
    discounted: sum of the discounts of these n-grams, by their id.
    discounts: discount of counts 0, 1, 2, and 3 or more.
  """

  keys: np.ndarray
  counts: np.ndarray
  context_counts: np.ndarray
  discounted: np.ndarray
  discounts: np.ndarray

  def find(self, keys: np.ndarray) -> np.ndarray:
    """Returns the id of each key, -1 for unknown ones."""
    ids = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
    return np.where(self.keys[ids] == keys, ids, -1)


class KneserNey:
  """Probabilities of tokens by counts.

  Args:
    tokens_T: training tokens, int [T].
    vocabulary_size: V.
    order: length of the longest n-grams.
  """

  def __init__(self, tokens_T: np.ndarray, vocabulary_size: int, order: int = ORDER):
    self._vocabulary_size = vocabulary_size
    tokens_T = tokens_T.astype(np.int64)
    # ids[n][t]: id of the n-gram that ends at t + n - 1.
    prefix_ids = np.zeros(len(tokens_T), np.int64)
    keys, ids, firsts, counts = [], [], [], []
    for n in range(1, order + 1):
      keys_T = prefix_ids[: len(tokens_T) - n + 1] * vocabulary_size + tokens_T[n - 1 :]
      unique, first, inverse, count = np.unique(
        keys_T, return_index=True, return_inverse=True, return_counts=True
      )
      prefix_ids = inverse
      keys.append(unique)
      ids.append(inverse)
      firsts.append(first)
      counts.append(count)
    for n in range(order - 1):
      # An n-gram follows as many different tokens as there are (n + 1)-grams that end with it.
      suffixes = ids[n][firsts[n + 1] + 1]
      counts[n] = np.bincount(suffixes, minlength=len(keys[n]))
    self._orders = []
    for n in range(order):
      contexts = keys[n] // vocabulary_size
      size = len(keys[n - 1]) if n else 1
      self._orders.append(_order(keys[n], counts[n], contexts, size))

  def probabilities(self, tokens_S: np.ndarray) -> np.ndarray:
    """Returns the probability of each token after those before it, float64 [S].

    The first tokens have shorter contexts.
    """
    tokens_S = tokens_S.astype(np.int64)
    result_S = np.full(len(tokens_S), 1 / self._vocabulary_size)
    # Id of the n - 1 tokens before each token; -1 if training has not seen them.
    context_ids = [np.zeros(len(tokens_S), np.int64)]
    for n, order in enumerate(self._orders):
      context_S = context_ids[n]
      known_S = context_S >= 0
      gram_S = np.where(known_S, order.find(context_S * self._vocabulary_size + tokens_S), -1)
      count_S = np.where(gram_S >= 0, order.counts[gram_S], 0)
      total_S = np.where(known_S, order.context_counts[context_S], 0)
      has_counts_S = total_S > 0
      total_S = np.maximum(total_S, 1)
      kept_S = np.maximum(count_S - order.discounts[np.minimum(count_S, 3)], 0) / total_S
      backed_off_S = order.discounted[context_S] / total_S * result_S
      result_S = np.where(has_counts_S, kept_S + backed_off_S, result_S)
      # The n-gram that ends at s - 1 is the context of s in the next order.
      context_ids.append(np.concatenate([[-1], gram_S[:-1]]))
    return result_S


def _order(keys: np.ndarray, counts: np.ndarray, contexts: np.ndarray, size: int) -> _Order:
  """Returns an order with the discounts of its counts of counts."""
  n1, n2, n3, n4 = (max(int((counts == c).sum()), 1) for c in (1, 2, 3, 4))
  y = n1 / (n1 + 2 * n2)
  discounts = np.array([0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
  discounts = np.clip(discounts, 0, np.arange(4))
  return _Order(
    keys=keys,
    counts=counts,
    context_counts=np.bincount(contexts, weights=counts, minlength=size),
    discounted=np.bincount(contexts, weights=discounts[np.minimum(counts, 3)], minlength=size),
    discounts=discounts,
  )


def mixture_nats(model_S: np.ndarray, counts_S: np.ndarray, weight: float) -> float:
  """Returns the mean loss in nats of a mixture of two probabilities of each token.

  Args:
    model_S: probabilities of the model.
    counts_S: probabilities by counts.
    weight: share of the counts.
  """
  return float(-np.mean(np.log((1 - weight) * model_S + weight * counts_S)))


def best_weight(model_S: np.ndarray, counts_S: np.ndarray) -> float:
  """Returns the share of the counts with the lowest loss, in steps of 0.01."""
  weights = np.arange(100) / 100
  losses = [mixture_nats(model_S, counts_S, weight) for weight in weights]
  return float(weights[int(np.argmin(losses))])


def training_tokens(run: runs.Run) -> np.ndarray:
  """Returns the tokens that a run was trained on, row after row.

  The rows are joined: at each of the seams, four n-grams have no counterpart in the text.
  """
  training = run.config.training
  tokens = run.split('train').tokens
  stride = len(tokens) // training.batch_size
  length = min(training.steps * training.segment_length, stride)
  starts = range(0, training.batch_size * stride, stride)
  return np.concatenate([tokens[start : start + length] for start in starts])


def mix(run: runs.Run) -> dict[str, float]:
  """Returns the loss of a run on the test split, mixed with counts, and the share of the counts."""
  counts = KneserNey(training_tokens(run), run.vocabulary_size)

  def probabilities(name: str, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    split = run.split(name)
    tokens = split.tokens[:limit]
    nats_S = token_losses.token_losses(run, split, len(tokens), name=f'{run.workdir.name}, {name}')
    return np.exp(-nats_S), counts.probabilities(tokens)

  weight = best_weight(*probabilities('validation', VALIDATION_TOKENS))
  model_S, counts_S = probabilities('test', None)
  nats = mixture_nats(model_S, counts_S, weight)
  alone = mixture_nats(model_S, counts_S, 0.0)
  return {
    'weight': weight,
    'nll_nats_per_token': nats,
    'nll_nats_per_token_of_counts': mixture_nats(model_S, counts_S, 1.0),
    'ratio': nats / alone,
  }


def main(argv: list[str]) -> int:
  """Mixes the runs that have no line yet."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--folder', type=pathlib.Path, default='runs/studies', help='workdirs')
  folder = parser.parse_args(argv).folder
  lines = results.read(results.PROGRAM)
  done = {line['cell'] for line in lines}
  for line in lines:
    cell = f'counts.{line["cell"]}'
    is_run = (line['table'], line['model']) == ('runs', MODEL)
    if not is_run or cell in done or not (folder / line['cell']).is_dir():
      continue
    mixed = mix(runs.load_run(folder / line['cell']))
    # Bits per byte of the mixture: those of the run, times the ratio of the losses per token.
    bits = line['test']['bits_per_byte'] * mixed.pop('ratio')
    test = {'bits_per_byte': bits, 'nll_nats_per_token': mixed.pop('nll_nats_per_token')}
    names = {key: line[key] for key in ('seed', 'parameters', 'flops_per_token', 'tokens')}
    own = {'cell': cell, 'table': 'counts', 'model': MIXTURE}
    results.append(results.PROGRAM, own | names | mixed | {'test': test})
    logging.info('%s: %s', cell, mixed)
  return 0


if __name__ == '__main__':
  flags.run(main)
