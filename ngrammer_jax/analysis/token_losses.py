"""Loss of a run at each token of a text.

T tokens; B streams, S tokens of a stream.
"""

from collections.abc import Sequence

import numpy as np

from ngrammer_jax import errors, runs
from ngrammer_jax.data import streams, token_cache
from ngrammer_jax.inference import engine as inference


def token_losses(
  run: runs.Run,
  text: token_cache.TokenSplit,
  tokens: int,
  variables: inference.Variables | None = None,
) -> np.ndarray:
  """Returns the loss of the first tokens of a text in nats, float64 [T].

  The text is divided into streams of segments, as in validation during training.

  Args:
    run: the run.
    text: the split.
    tokens: T.
    variables: variables of the model. None: those of the checkpoint.
  """
  config = run.config
  num_streams = min(config.training.batch_size, config.evaluation.streams)
  source = streams.EvaluationStreams(text, num_streams, config.evaluation_length(), tokens)
  make_segment = lambda index, rows: source.segment(index, rows.start, rows.stop - rows.start)
  variables = run.variables if variables is None else variables
  segments = list(
    run.engine.score_segments(variables, source.streams, source.segments, make_segment)
  )
  # Each stream is a row, and all rows together are the text.
  nll_BxS, counts_BxS = (
    np.concatenate([getattr(scores, name) for scores in segments], axis=1)
    for name in ('nll_BxT', 'counts_BxT')
  )
  return nll_BxS[counts_BxS].astype(np.float64)


def check_same_text(
  all_runs: Sequence[runs.Run], texts: Sequence[token_cache.TokenSplit], analysis: str
) -> None:
  """Raises BadInput if losses of the runs cannot be compared token by token."""
  first = all_runs[0]
  for run, text in zip(all_runs, texts, strict=True):
    has_same_size = run.vocabulary.size == first.vocabulary.size
    if not has_same_size or not np.array_equal(text.tokens, texts[0].tokens):
      raise errors.BadInput(
        f'--workdir={run.workdir} and --workdir={first.workdir} read different tokens: {analysis} '
        f'needs runs with the same text and vocabulary'
      )
