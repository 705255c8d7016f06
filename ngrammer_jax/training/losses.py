"""Training losses: by default the negative log-likelihood of the next token.

A `train_task.TrainTask` may have its own loss, a function of the type `Loss`.

B batch, T segment length, J width of the hidden states, V vocabulary.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ngrammer_jax import errors
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.layers import softmax
from ngrammer_jax.models import language_model


@dataclasses.dataclass(frozen=True, eq=False)
class LossContext:
  """Inputs of a loss besides hidden states and targets, for the rows of one microbatch.

  Attributes:
    model: the model.
    params: its parameters; the loss is differentiated with respect to them.
    batch: the tokens, targets and masks of these rows.
    counts_BxT: weight of each token in the loss; 0: ignored.
    total: number of counted tokens in all rows of the batch.
  """

  model: language_model.LanguageModel
  params: Any
  batch: token_batch.Batch
  counts_BxT: jax.Array
  total: jax.Array

  def scores(self, hidden_BxTxJ: jax.Array, targets_BxT: jax.Array) -> softmax.TokenScores:
    """Returns the negative log-likelihood of each target in nats, and whether it was predicted.

    Computes at most `model.vocabulary_chunk` logits of a token at once.
    """
    return self._head('scores', hidden_BxTxJ, targets_BxT, train=True)

  def log_probs(self, hidden_BxTxJ: jax.Array) -> jax.Array:
    """Returns log-probabilities [B, T, V] of the next tokens in nats, without chunking."""
    return self._head('log_probs', hidden_BxTxJ)

  def _head(self, method: str, *inputs: jax.Array, **options: Any) -> Any:
    return self.model.apply({'params': self.params}, *inputs, method=method, **options)

  def mean(self, values_BxT: jax.Array) -> jax.Array:
    """Returns the part of these rows in the mean over all counted tokens; 0 if there are none."""
    sum_of_rows = jnp.where(self.counts_BxT > 0, values_BxT, 0).sum()
    return sum_of_rows / jnp.maximum(self.total, 1)


VALUE_PREFIX = 'loss/'  # of the recorded names of extra metrics

# Maps hidden states [B, T, J], targets [B, T] and the context to the loss of each token, [B, T],
# and to extra metrics of each token by name, [B, T], whose means are recorded as loss/NAME. A loss
# that is not finite ends the training; such extra metrics are not recorded.
Loss = Callable[[jax.Array, jax.Array, LossContext], tuple[jax.Array, dict[str, jax.Array]]]


def next_token(
  hidden_BxTxJ: jax.Array, targets_BxT: jax.Array, context: LossContext
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Returns the negative log-likelihood of each target in nats, [B, T]. A `Loss`."""
  return context.scores(hidden_BxTxJ, targets_BxT).nll_BxT, {}


def smoothed(share: float) -> Loss:
  """Returns the loss with label smoothing (Szegedy et al. 2016), arXiv 1512.00567, section 7.

    loss = (1 - e) nll(target) + e mean_v nll(v)

  The extra metric `nll` is the negative log-likelihood of the target. All log-probabilities of a
  microbatch exist at once.

  Args:
    share: e.
  """

  def loss(
    hidden_BxTxJ: jax.Array, targets_BxT: jax.Array, context: LossContext
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    nll_BxTxV = -context.log_probs(hidden_BxTxJ)
    nll_BxTx1 = jnp.take_along_axis(nll_BxTxV, targets_BxT[..., None], axis=-1)
    nll_BxT = nll_BxTx1[..., 0]
    return (1 - share) * nll_BxT + share * nll_BxTxV.mean(axis=-1), {'nll': nll_BxT}

  return loss


def means(loss: Loss, hidden_BxTxJ: jax.Array, context: LossContext) -> dict[str, jax.Array]:
  """Returns the metrics `loss` and `loss/NAME`: the means of the results of a loss.

  The means of microbatches add up to the mean of the batch.

  Raises:
    BadInput: the loss does not return one value for each token.
  """
  targets_BxT = context.batch.targets_BxT
  loss_BxT, values = loss(hidden_BxTxJ, targets_BxT, context)
  named = {'loss': loss_BxT}
  for name, values_BxT in values.items():
    named[VALUE_PREFIX + name] = values_BxT
  for name, values_BxT in named.items():
    if jnp.shape(values_BxT) != targets_BxT.shape:
      raise errors.BadInput(
        f'{name} of the task has the shape {list(jnp.shape(values_BxT))}: return one value for '
        f'each token, {list(targets_BxT.shape)}'
      )
  return {name: context.mean(values_BxT) for name, values_BxT in named.items()}
