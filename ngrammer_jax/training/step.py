"""One training step, and many of them in one call.

A step is one segment of every row, one optimiser update and one codebook update.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ngrammer_jax import sharding
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data import streams
from ngrammer_jax.layers import quantizer
from ngrammer_jax.models import language_model, ngrams
from ngrammer_jax.training import accumulation, optimizers
from ngrammer_jax.training import state as train_state

Metrics = dict[str, jax.Array]


def train_step(
  model: language_model.LanguageModel,
  optimizer: optax.GradientTransformation,
  seed: int,
  state: train_state.TrainState,
  segment: streams.Segment,
  half_loss: bool = False,
  frozen_codebook: bool = False,
  parts: accumulation.GradientAccumulation | None = None,
) -> tuple[train_state.TrainState, Metrics]:
  """The state after one segment of every row, and the metrics of the step.

  With `half_loss` only the later half of every segment counts (Transformer-XL's ablation). A frozen
  codebook stays as it is. In parts, some rows are computed after others, for the same update.
  """
  T = segment.tokens_BxT.shape[1]
  counts_BxT = segment.valid_BxT if segment.counts_BxT is None else segment.counts_BxT
  counts_BxT = counts_BxT * (jnp.arange(T) >= (T // 2 if half_loss else 0))
  dropout_key = jax.random.fold_in(jax.random.key(seed), state.step)
  learns = [] if frozen_codebook else ['codebook' if parts is None else 'statistics']
  part = functools.partial(_gradient, model, learns, state.params, state.codebook, counts_BxT.sum())
  rows = segment, counts_BxT, state.memory
  if parts is None:
    gradient, (memory, nll, learned) = part(rows, dropout_key)
    codebook = state.codebook if frozen_codebook else learned.get('codebook', {})
  else:

    def of_rows(rows, number):
      key = jax.random.fold_in(dropout_key, number)
      # What is added to the loss may be a mean over tokens, as the loss is.
      share = rows[0].valid_BxT.sum() / segment.valid_BxT.sum()
      gradient, (memory, *rest) = part(rows, key, share)
      return memory, (gradient, *rest)

    memory, (gradient, nll, learned) = parts(of_rows, rows)
    codebook = moved(model.config, state.codebook, learned.get('statistics', {}))
  updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
  metrics = {'loss': nll, 'update_norm': optax.tree.norm(updates)}
  for label, norm in optimizers.norms_by_label(gradient).items():
    metrics[f'gradient_norm/{label}'] = norm
  metrics |= codebook_metrics(state.codebook, codebook, whole=parts is None)
  params = optax.apply_updates(state.params, updates)
  state = state.replace(
    step=state.step + 1, params=params, codebook=codebook, opt_state=opt_state, memory=memory
  )
  if model.config.span is not None:
    metrics |= span_metrics(model.config, state.params, memory)
  return state, metrics


def _gradient(model, learns, params, codebook, total, rows, key, share=1.0):
  """The gradient of some rows of a step, their memory, their part of the loss, what was learned.

  Args:
    model, params, codebook: of the step.
    learns: the collections that are mutable.
    total: of the tokens of all rows.
    rows: segment, what counts of it, and memory.
    key: for dropout.
    share: of these rows.
  """
  segment, counts_BxT, memory = rows

  def loss_of(params):
    (hidden, after, aux), learned = model.apply(
      {'params': params, 'codebook': codebook},
      segment.tokens_BxT,
      memory,
      starts_BxT=segment.starts_BxT,
      valid_BxT=segment.valid_BxT,
      prefix_BxT=segment.prefix_BxT,
      train=True,
      rngs={'dropout': key},
      mutable=learns,
    )
    scores = model.apply({'params': params}, hidden, segment.targets_BxT, method='scores')
    counted_BxT = jnp.where(counts_BxT > 0, scores.nll_BxT, 0)
    nll = counted_BxT.sum() / total
    return nll + share * sum(aux.values()), (after, nll, learned)

  return jax.grad(loss_of, has_aux=True)(params)


def moved(config: model_config.ModelConfig, codebook: Any, statistics: Any) -> Any:
  """The codebook after one update, by what each quantiser has counted."""
  if 'sums' in statistics:
    layer = ngrams.make(config)
    return layer.make_quantizer(parent=None).update_codebook(codebook, statistics)
  of_part = lambda name: moved(config, codebook[name], statistics.get(name, {}))
  return {name: of_part(name) for name in codebook} if statistics else codebook


def codebook_metrics(before: Any, after: Any, whole: bool = True) -> Metrics:
  """How healthy the clusters are, mean over heads and layers.

  `perplexity`, exp of the entropy of their usage: how many are in use; `dead`, the share that
  is all but unused; `drift`, how far the centroids moved in this step, relative to their
  length; `changed`, the share of tokens that this moved to another cluster, where the rows were
  computed as a whole.
  """
  changes = zip(_quantizers(before), _quantizers(after), strict=True)
  of_each = [_quantizer_metrics(old, new, whole) for old, new in changes]
  return jax.tree.map(lambda *values: sum(values) / len(values), *of_each) if of_each else {}


def _quantizers(codebook: Any) -> list[dict[str, jax.Array]]:
  """The variables of every quantiser of a model."""
  if 'centroids' in codebook:
    return [codebook]
  return [found for part in codebook.values() for found in _quantizers(part)]


def _quantizer_metrics(old, new, whole) -> Metrics:
  usage_NxK = new['usage']
  entropy_N = -jax.scipy.special.xlogy(usage_NxK, usage_NxK).sum(axis=-1)
  moved_NxKxH = new['centroids'] - old['centroids']
  changed = {'codebook/changed': new['changed'].mean()} if whole else {}
  return {
    'codebook/perplexity': jnp.exp(entropy_N).mean(),
    'codebook/dead': (usage_NxK < quantizer.DEAD / usage_NxK.shape[1]).mean(),
    'codebook/drift': jnp.linalg.norm(moved_NxKxH) / jnp.linalg.norm(old['centroids']),
    **changed,
  }


def make_call(
  model: language_model.LanguageModel,
  optimizer: optax.GradientTransformation,
  seed: int,
  abstract: train_state.TrainState,
  half_loss: bool = False,
  frozen_codebook: bool = False,
  parts: int = 1,
) -> Callable[..., tuple[train_state.TrainState, Metrics]]:
  """A jitted function of the state, a stack of segments [steps, B, T] and how many are trained on.

  The steps beyond that number are skipped. The state given in is donated. Metrics come back stacked
  by step; those of skipped steps mean nothing.
  """
  where = jax.tree.map(lambda leaf: leaf.sharding, abstract)
  how = {'half_loss': half_loss, 'frozen_codebook': frozen_codebook}
  if parts > 1:
    how['parts'] = accumulation.GradientAccumulation(parts, where.step.mesh)
  step = functools.partial(train_step, model, optimizer, seed, **how)

  def step_or_skip(state, numbered):
    is_trained, segment = numbered
    _, like = jax.eval_shape(step, state, segment)
    skip = lambda state, _: (state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like))
    return jax.lax.cond(is_trained, step, skip, state, segment)

  def call(state, segments, steps):
    numbers = jnp.arange(len(segments.tokens_BxT))
    return jax.lax.scan(step_or_skip, state, (numbers < steps, segments))

  everywhere = sharding.replicated(where.step.mesh)
  return jax.jit(call, donate_argnums=0, out_shardings=(where, everywhere))


def span_metrics(config: model_config.ModelConfig, params: Any, memory: Any) -> Metrics:
  """The average and the longest span of each layer, and of all, in tokens with the ramp.

  Spans of tokens are those of the last segment, which the memory of training has.
  """
  s = config.span
  if s.kind == 'dynamic':
    spans_LxN, means_L = memory['spans'].longest_BxN.max(axis=0), memory['spans'].mean.mean(axis=0)
  else:
    spans_LxN = language_model.adaptive_spans(config, params)
    means_L = spans_LxN.mean(axis=1)
  with_ramp = lambda tokens_L: jnp.minimum(jnp.ceil(tokens_L) + s.ramp, s.limit)
  averages_L, longest_L = with_ramp(means_L), with_ramp(spans_LxN.max(axis=1))
  result = {'span/average': averages_L.mean(), 'span/maximum': longest_L.max()}
  for i in range(config.layers):
    result[f'span/average/layer_{i}'] = averages_L[i]
    result[f'span/maximum/layer_{i}'] = longest_L[i]
  return result
