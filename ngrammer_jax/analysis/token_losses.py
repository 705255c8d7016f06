"""Loss of a run at each token of a text.

T tokens; B streams, S tokens of a stream.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from ngrammer_jax import errors, runs
from ngrammer_jax.data.rows import evaluation_streams
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference import language_modeling
from ngrammer_jax.system import progress


def token_losses(
  run: runs.Run,
  text: token_split.TokenSplit,
  tokens: int,
  variables: inference.Variables | None = None,
  name: str = '',
) -> np.ndarray:
  """Returns the loss of the first tokens of a text in nats, float64 [T].

  The text is divided into `evaluation.streams` streams of segments, and each token is scored once,
  as with `evaluation.protocol=streams`, including tokens without training loss.

  Args:
    run: the run.
    text: the split.
    tokens: T.
    variables: variables of the model. None: variables of the checkpoint.
    name: name of the run, for the progress.
  """
  config = run.config
  source = evaluation_streams.EvaluationStreams(
    dataclasses.replace(text, counts=None),
    config.evaluation.streams,
    config.evaluation_length(),
    tokens,
  )
  if variables is None:
    variables = run.variables
  losses = []
  with progress.Progress(f'scoring {name or run.workdir}', tokens, 'tokens') as bar:
    for scores in language_modeling.score_streams(run.engine, variables, source, config):
      segments = []
      for segment in scores:
        segments.append(segment)
        bar.advance(int(segment.counts_BxT.sum()))
      # Each stream is a row, and all rows together are the text.
      nll_BxS = np.concatenate([segment.nll_BxT for segment in segments], axis=1)
      counts_BxS = np.concatenate([segment.counts_BxT for segment in segments], axis=1)
      losses.append(nll_BxS[counts_BxS].astype(np.float64))
  return np.concatenate(losses)


def check_same_text(
  all_runs: Sequence[runs.Run], texts: Sequence[token_split.TokenSplit], analysis: str
) -> None:
  """Raises BadInput if losses of the runs cannot be compared token by token."""
  first = all_runs[0]
  for run, text in zip(all_runs, texts, strict=True):
    has_same_size = run.vocabulary.size == first.vocabulary.size
    if not has_same_size or not np.array_equal(text.tokens, texts[0].tokens):
      raise errors.BadInput(
        f'{run.workdir} and {first.workdir} read different tokens: {analysis} needs runs with the '
        f'same text and vocabulary'
      )
