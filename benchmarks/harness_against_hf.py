"""A published model in lm_eval, through `ngrammer_jax` and through the harness's own model `hf`.

  pip install torch transformers accelerate 'ngrammer_jax[lm-eval]'
  python -m benchmarks.harness_against_hf --model=FOLDER --text=FILE

FOLDER holds a published model, such as SmolLM2-135M written by
`python -m ngrammer_jax.export --pretrained=smollm2_135m_instruct --format=huggingface`. Contexts
and continuations are pieces of the text, cut between any two characters; a part of the contexts is
written as a conversation, with special tokens, and some are longer than --max_length. `hf` answers
one request at a time.

Prints the differences of the log-likelihoods, the number of equal greedy flags and answers, and how
far the best logit of `hf` was ahead of the second.
"""

import argparse
from collections.abc import Sequence
import functools
import pathlib
import types
from typing import Any

import jax
from lm_eval.models import huggingface
import numpy as np
import torch
import transformers

from ngrammer_jax import runs
from ngrammer_jax.tasks.lm_eval import model as harness

STOPS = ('\n', '.', ' the', ', ', '\n\n', 'and')


class Margins(transformers.LogitsProcessor):
  """Records how far the best logit is ahead of the second, for each new token of one row."""

  def __init__(self):
    self.values: list[float] = []

  def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    best, second = scores[0].topk(2).values.tolist()
    self.values.append(best - second)
    return scores


def instances(arguments: Sequence[tuple[Any, ...]]) -> list[types.SimpleNamespace]:
  """Returns requests of the harness with these arguments."""
  return [types.SimpleNamespace(args=args, task_name=None) for args in arguments]


def piece(rng: np.random.Generator, text: str, least: int, most: int) -> str:
  """Returns a piece of a text with a number of characters between two."""
  length = int(rng.integers(least, most + 1))
  start = int(rng.integers(0, len(text) - length))
  return text[start : start + length]


def contexts(rng: np.random.Generator, text: str, special: Sequence[str], count: int) -> list[str]:
  """Returns contexts: pieces of a text, every third as a turn between special tokens."""
  result = []
  for i in range(count):
    context = piece(rng, text, 1, 1200 if i % 5 == 4 else 300)
    if special and i % 3 == 2:
      first, second, third = rng.choice(special, 3).tolist()
      context = f'{first}user\n{context}{second}\n{third}assistant\n'
    result.append(context)
  return result


def options(rng: np.random.Generator, special: Sequence[str], tokens: int) -> dict[str, Any]:
  """Returns the options of a generation with up to two stops."""
  stops = rng.choice([*STOPS, *special], int(rng.integers(0, 3)), replace=False).tolist()
  return {'until': stops, 'max_gen_toks': tokens, 'do_sample': False}


def compare_scores(ours: Any, theirs: Any, pairs: Sequence[tuple[str, str]]) -> None:
  """Prints how the log-likelihoods and greedy flags differ."""
  scores = ours.loglikelihood(instances(pairs))
  expected = theirs.loglikelihood(instances(pairs), disable_tqdm=True)
  differences = [abs(a - b) for (a, _), (b, _) in zip(scores, expected, strict=True)]
  equal = sum(a == b for (_, a), (_, b) in zip(scores, expected, strict=True))
  worst = int(np.argmax(differences))
  print(f'log-likelihoods: {len(pairs)}, {sum(d > 1e-4 for d in differences)} differ by over 1e-4')
  print(f'  largest difference: {differences[worst]:.2g}, of {expected[worst][0]:.1f} nats')
  print(f'  equal greedy flags: {equal}, of which greedy: {sum(flag for _, flag in expected)}')


def compare_answers(ours: Any, theirs: Any, requests: Sequence[tuple[str, dict]]) -> None:
  """Prints how many generated answers are equal, and the margins where others part."""
  answers = ours.generate_until(instances(requests))
  margins = Margins()
  processors = transformers.LogitsProcessorList([margins])
  theirs.model.generate = functools.partial(theirs.model.generate, logits_processor=processors)
  equal = 0
  smallest = []
  for request, answer in zip(requests, answers, strict=True):
    margins.values.clear()
    (expected,) = theirs.generate_until(instances([request]), disable_tqdm=True)
    smallest.append(min(margins.values))
    if answer == expected:
      equal += 1
    else:
      print(f'  {answer!r} instead of {expected!r}; smallest margin {smallest[-1]:.2g}')
  print(f'answers: {len(requests)}, equal: {equal}, empty: {answers.count("")}')
  print(f'  smallest margin: {min(smallest):.2g}')


def main() -> None:
  """Compares the two models on drawn requests."""
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--model', required=True, help='folder of a published model')
  parser.add_argument('--text', required=True, help='file of UTF-8 text')
  parser.add_argument('--scores', type=int, default=100, help='number of log-likelihoods')
  parser.add_argument('--tokens', type=int, default=32, help='maximum length of an answer')
  parser.add_argument('--max_length', type=int, default=256, help='context length of both models')
  parser.add_argument('--answers', type=int, default=100, help='number of generated answers')
  parser.add_argument('--dtype', default='float32', help='of both: float32 or float64')
  parser.add_argument('--batch_size', type=int, default=8, help='of ngrammer_jax')
  parser.add_argument('--seed', type=int, default=77)
  args = parser.parse_args()
  text = pathlib.Path(args.text).read_text(encoding='utf-8')
  rng = np.random.default_rng(args.seed)
  ours = harness.HarnessModel(
    pretrained=args.model, batch_size=args.batch_size, max_length=args.max_length
  )
  theirs = huggingface.HFLM(
    pretrained=args.model,
    device='cpu',
    dtype=args.dtype,
    batch_size=1,
    max_length=args.max_length,
    logits_cache=False,
  )
  if args.dtype != 'float32':
    jax.config.update('jax_enable_x64', True)
    overrides = {'model.dtype': args.dtype, 'evaluation.segment_length': args.max_length}
    ours.run = runs.load_pretrained(args.model, args.dtype, overrides=overrides)
  special = ours.run.vocabulary.special_tokens
  pairs = []
  for context in contexts(rng, text, special, args.scores):
    pairs.append((context, piece(rng, text, 1, 60)))
  if pairs:
    compare_scores(ours, theirs, pairs)
  requests = []
  for context in contexts(rng, text, special, args.answers):
    requests.append((context, options(rng, special, args.tokens)))
  if requests:
    compare_answers(ours, theirs, requests)


if __name__ == '__main__':
  main()
