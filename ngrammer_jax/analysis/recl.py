"""Relative effective context length (RECL) of runs: Dai et al. 2019 (Transformer-XL), Appendix C.

  l_i(c, t)  = -log P_i(x_t | x_{t-1}, ..., x_{t-c})             loss of run i with c tokens
  b(c, t)    = min_i l_i(c, t)                                   best loss of all runs
  f_i(c, c') = mean over t of min(b(c, t), l_i(c', t))           t: the share r of largest b(c, t)
  g_i(c, c') = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)  gain of run i from c' - c more

The RECL of run i is the smallest c, a multiple of D, with g_i(c, c + D) < 0.01. The paper gives
neither D nor the smallest c: both are `context_step` here. Its results are multiples of 100.

N runs, C context lengths, P predicted tokens, W windows, B batch rows, T segment length.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ngrammer_jax import errors, runs
from ngrammer_jax.analysis import token_losses
from ngrammer_jax.analysis.elements import Element
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.system import progress

MIN_GAIN = 0.01
SHARES = (0.1, 0.5, 1.0)  # r
MAX_TARGETS = 1000  # tokens of the split that are predicted, the first ones
FIGURE_SIZE = (2, 11.0)  # panels, and width in inches


def analyze(
  all_runs: Sequence[runs.Run],
  names: Sequence[str],
  split: str = 'validation',
  context_step: int = 100,
  max_context: int = 1000,
) -> dict[str, Any]:
  """Computes the RECL of runs relative to each other, as plain values for JSON.

  Every `context_step`-th token of the split, but at most MAX_TARGETS, is predicted from windows of
  all context lengths. A window starts without memory and is read in segments, as in evaluation. A
  model without memory reads at most one segment: with more context its loss is unchanged. Tokens
  before the document of a token are in its window, but the model ignores them.

  Keys: `split`; `targets`, number of predicted tokens; `contexts` [C]; and `runs`, with for each:

  `name`, `step`: name and step of the run.
  `losses`: mean loss [C] over all predicted tokens, in nats per token.
  `shares`: for each r, `share`; `gains` [C - 1], from each context length to the next; `length`,
    the RECL in tokens; and `is_lower_bound`, True if every gain is large, up to the longest.

  Raises:
    BadInput: a value is out of range, the split is too short, or the runs read different tokens.
  """
  if not 1 <= context_step <= max_context // 2:
    raise errors.BadInput(
      f'--context_step={context_step} must be at least 1, and at most half of '
      f'--max_context={max_context}'
    )
  contexts = list(range(context_step, max_context + 1, context_step))
  texts = [run.split(split) for run in all_runs]
  token_losses.check_same_text(all_runs, texts, 'recl')
  targets = np.arange(contexts[-1] - 1, len(texts[0].tokens), context_step)[:MAX_TARGETS]
  if not len(targets):
    raise errors.BadInput(
      f'--split={split} has {len(texts[0].tokens):,} tokens, fewer than the longest context of '
      f'{contexts[-1]:,}: lower --max_context'
    )
  losses_NxCxP = np.stack(
    [losses(run, text, targets, contexts) for run, text in zip(all_runs, texts, strict=True)]
  )
  results = []
  for i, (name, run) in enumerate(zip(names, all_runs, strict=True)):
    results.append(
      {
        'name': name,
        'step': run.restored.step,
        'losses': losses_NxCxP[i].mean(axis=1).tolist(),
        'shares': [_effective_length(losses_NxCxP, i, contexts, share) for share in SHARES],
      }
    )
  return {'split': split, 'targets': len(targets), 'contexts': contexts, 'runs': results}


def losses(
  run: runs.Run, text: token_split.TokenSplit, targets: np.ndarray, contexts: Sequence[int]
) -> np.ndarray:
  """Returns the loss of the target tokens with each context length, float64 [C, P].

  Args:
    run: the run.
    text: the split.
    targets: indices [P] of the tokens, at distances of the first context length.
    contexts: multiples [C] of the first one.
  """
  has_memory = run.config.evaluation_context() > run.config.evaluation_length()
  longest = contexts[-1] if has_memory else min(contexts[-1], run.config.evaluation_length())
  by_context = {}
  if longest >= contexts[0]:
    # A window has the loss of one target with each context length: windows are shared.
    firsts_W = np.arange(targets[0] + 1 - contexts[-1], targets[-1] + 1, contexts[0])
    nll_WxT = _score_windows(run, text, firsts_W, longest)
    for c in contexts:
      if c <= longest:
        window_P = (targets + 1 - c - firsts_W[0]) // contexts[0]
        by_context[c] = nll_WxT[window_P, c - 1]
  if longest < contexts[-1] and longest not in by_context:
    by_context[longest] = _score_windows(run, text, targets + 1 - longest, longest)[:, -1]
  return np.stack([by_context[min(c, longest)] for c in contexts])


def _score_windows(
  run: runs.Run, text: token_split.TokenSplit, firsts_W: np.ndarray, length: int
) -> np.ndarray:
  """Returns the losses of windows of targets, each read without memory, float64 [W, length]."""
  T = run.config.evaluation_length()
  variables = run.variables
  batches = []
  rows = min(run.config.training.batch_size, len(firsts_W))
  with progress.Progress('scoring', len(firsts_W), 'windows') as bar:
    for begin in range(0, len(firsts_W), rows):
      firsts_B = firsts_W[begin : begin + rows]

      def make_segment(
        index: int, row_slice: slice, firsts_B: np.ndarray = firsts_B
      ) -> token_batch.Batch:
        row_indices = np.minimum(np.arange(row_slice.start, row_slice.stop), len(firsts_B) - 1)
        return token_batch.stack_rows(
          token_split.Row(*text.window(firsts_B[row] + index * T, T)) for row in row_indices
        )

      scores = run.engine.score_segments(variables, rows, -(-length // T), make_segment)
      nll_BxT = np.concatenate([segment.nll_BxT for segment in scores], axis=1)
      batches.append(nll_BxT[: len(firsts_B), :length].astype(np.float64))
      bar.advance(len(firsts_B))
  return np.concatenate(batches)


def _effective_length(
  losses_NxCxP: np.ndarray, i: int, contexts: Sequence[int], share: float
) -> dict[str, Any]:
  """Returns the RECL of run i on the share of the tokens with the largest best loss."""
  gains = []
  for best_P, next_P in zip(losses_NxCxP[:, :-1].min(axis=0), losses_NxCxP[i, 1:], strict=True):
    hardest = np.argsort(-best_P, kind='stable')[: max(1, round(share * len(best_P)))]
    before = best_P[hardest].mean()
    after = np.minimum(best_P, next_P)[hardest].mean()
    gains.append(float(-np.expm1(after - before)))
  small = [c for c, gain in zip(contexts, gains, strict=False) if gain < MIN_GAIN]
  length = small[0] if small else contexts[-1]
  return {'share': share, 'gains': gains, 'length': length, 'is_lower_bound': not small}


def elements(result: dict[str, Any]) -> list[Element]:
  """Returns the table of the RECL of every run."""
  contexts = result['contexts']
  title = (
    f'{result["targets"]:,} tokens of {result["split"]}, contexts in steps of {contexts[0]:,}; r: '
    f'share of the tokens, those with the largest loss'
  )
  columns = ['run', 'step', f'nats/token with {contexts[0]:,}', f'nats/token with {contexts[-1]:,}']
  rows = [columns + [f'RECL, r={share:g}' for share in SHARES]]
  for run in result['runs']:
    cells = [run['name'], f'{run["step"]:,}']
    cells += [f'{run["losses"][0]:.4f}', f'{run["losses"][-1]:.4f}']
    for each in run['shares']:
      bound = '>= ' if each['is_lower_bound'] else ''
      cells.append(f'{bound}{each["length"]:,}')
    rows.append(cells)
  return [Element(title, rows)]


def plot(result: dict[str, Any], axes: Any) -> None:
  """Plots the mean loss by context length, and the gain of each further step."""
  losses_axes, gains_axes = axes
  contexts = result['contexts']
  for run in result['runs']:
    (line,) = losses_axes.plot(contexts, run['losses'], 'o-', markersize=3, label=run['name'])
    for each, style in zip(run['shares'], ('-', '--', ':'), strict=True):
      percent = [100 * gain for gain in each['gains']]
      label = f'{run["name"]}, r={each["share"]:g}'
      gains_axes.plot(contexts[:-1], percent, style, color=line.get_color(), label=label)
  gains_axes.axhline(100 * MIN_GAIN, color='black', linewidth=0.5)
  losses_axes.set(xlabel='context (tokens)', ylabel='loss (nats per token)')
  step = contexts[0]
  gains_axes.set(xlabel='context (tokens)', ylabel=f'gain from {step:,} more tokens (%)')
  for panel in axes:
    panel.grid(alpha=0.3)
    panel.legend(fontsize='x-small')
