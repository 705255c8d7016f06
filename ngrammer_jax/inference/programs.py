"""The computations of inference on one padded batch, as functions of a model and its variables.

B batch, T segment length, P tokens of a padded prompt, K choices, C tokens of a choice, D model.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.inference import sampling
from ngrammer_jax.models.language_model import LanguageModel

TOKENS_PER_CALL = 8  # tokens per call of `decode_next`


class Scores(NamedTuple):
  """Scores of the targets of a segment.

  Attributes:
    nll_BxT: negative log-likelihood in nats, 0 for uncounted targets.
    correct_BxT: whether the most likely token is the (counted) target.
    counts_BxT: whether the target counts: it is not padding, see `token_batch.Batch.counted`.
    targets_BxT: the targets.
  """

  nll_BxT: jax.Array
  correct_BxT: jax.Array
  counts_BxT: jax.Array
  targets_BxT: jax.Array


class DecodingState(NamedTuple):
  """State of the generation of a batch.

  Attributes:
    memory: the memory of the model.
    index: index of the next token.
    token_B: the last sampled token.
    is_used_BxV: whether a token is in the text so far; None without a repetition penalty.
  """

  memory: Any
  index: jax.Array
  token_B: jax.Array
  is_used_BxV: jax.Array | None = None


def abstract_segment(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> token_batch.Batch:
  """Returns a segment without values: shapes, dtypes and the sharding."""
  dtypes = np.int32, np.int32, bool, np.float32
  return token_batch.Batch(*(jax.ShapeDtypeStruct(shape, d, sharding=sharding) for d in dtypes))


def score_segment(
  model: LanguageModel, variables: Any, segment: token_batch.Batch, *, memory: Any
) -> tuple[Scores, Any]:
  """Returns the scores of a segment and the new memory."""
  hidden, memory, _ = model.apply(variables, segment.tokens_BxT, memory, **segment.marks)
  return _score(model, variables, hidden, segment.targets_BxT, segment.counted > 0), memory


def score_last_target(
  model: LanguageModel, variables: Any, window: token_batch.Batch, *, memory: Any
) -> tuple[Scores, Any]:
  """Returns the scores of the last target of each row, [B, 1], and the new memory.

  A row of padding has no score. `memory` is the memory before the first segment.
  """
  memory = _known_empty(model, memory)
  hidden_Bx1xD, memory = _forward_last(model, variables, window, memory)
  last_Bx1 = _last_index(window.valid_BxT)
  target_Bx1 = jnp.take_along_axis(window.targets_BxT, last_Bx1, axis=1)
  counts_Bx1 = jnp.take_along_axis(window.counted, last_Bx1, axis=1) > 0
  return _score(model, variables, hidden_Bx1xD, target_Bx1, counts_Bx1), memory


def _score(
  model: LanguageModel,
  variables: Any,
  hidden_BxTxD: jax.Array,
  targets_BxT: jax.Array,
  counts_BxT: jax.Array,
) -> Scores:
  """Returns the scores of targets with a count mask."""
  scores = model.apply(variables, hidden_BxTxD, targets_BxT, method='scores')
  nll_BxT = jnp.where(counts_BxT, scores.nll_BxT, 0)
  return Scores(nll_BxT, scores.correct_BxT & counts_BxT, counts_BxT, targets_BxT)


def _last_index(valid_BxT: jax.Array) -> jax.Array:
  """Returns the index of the last valid token of each row, int32 [B, 1]; 0 without any."""
  return jnp.maximum((valid_BxT > 0).sum(axis=1, keepdims=True, dtype=jnp.int32) - 1, 0)


def _forward_last(
  model: LanguageModel, variables: Any, inputs: token_batch.Batch, memory: Any
) -> tuple[jax.Array, Any]:
  """Returns the hidden state of the last valid token of each row, [B, 1, D], and the memory."""
  hidden_BxTxD, memory, _ = model.apply(variables, inputs.tokens_BxT, memory, **inputs.marks)
  last_Bx1x1 = _last_index(inputs.valid_BxT)[:, :, None]
  return jnp.take_along_axis(hidden_BxTxD, last_Bx1x1, axis=1), memory


def _zero_tokens(model: LanguageModel) -> int:
  """Returns the number of initial tokens with zeros as keys and values."""
  return 0 if model.config.memory is None else model.config.memory.zeros()


def _known_empty(model: LanguageModel, memory: Any) -> Any:
  """Returns the memory before the first segment, marked so that attention skips an empty cache."""
  slots = memory.get('cache')
  if slots is None or _zero_tokens(model):
    return memory
  return memory | {'cache': slots.replace(is_empty=True)}


def rank_choices(
  model: LanguageModel,
  variables: Any,
  prompt: token_batch.Batch,
  choices_KxBxC: jax.Array,
  valid_KxBxC: jax.Array,
  choice_variables: Any = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns log p(choice | prompt), and whether greedy decoding gives the choice, both [K, B].

  Args:
    model, variables: the model and its variables.
    prompt: the prompts.
    choices_KxBxC, valid_KxBxC: token ids of the choices, and 1 where they are not padding.
    choice_variables: collections of each choice, stacked [K, ...].
  """
  B, P = prompt.tokens_BxT.shape
  C = choices_KxBxC.shape[2]
  memory = _known_empty(model, model.empty_memory(B, P + C + _zero_tokens(model)))
  last_hidden_Bx1xD, memory = _forward_last(model, variables, prompt, memory)

  def score_choice(choice: tuple[jax.Array, jax.Array, Any]) -> tuple[jax.Array, jax.Array]:
    ids_BxC, valid_BxC, own_variables = choice
    hidden_BxCxD, _, _ = model.apply(
      variables | own_variables, ids_BxC[:, :-1], memory, valid_BxT=valid_BxC[:, :-1]
    )
    hidden_BxCxD = jnp.concatenate([last_hidden_Bx1xD, hidden_BxCxD], axis=1)
    scores = _score(model, variables, hidden_BxCxD, ids_BxC, valid_BxC > 0)
    is_greedy_B = (scores.correct_BxT | ~scores.counts_BxT).all(axis=1)
    return -scores.nll_BxT.sum(axis=1), is_greedy_B

  return jax.lax.map(score_choice, (choices_KxBxC, valid_KxBxC, choice_variables or {}))


def decode_prompt(
  model: LanguageModel,
  variables: Any,
  seeds_B: jax.Array,
  sampler: sampling.SamplerParams,
  prompt: token_batch.Batch,
  *,
  state: DecodingState,
  is_first: bool = False,
) -> tuple[jax.Array, DecodingState]:
  """Returns the token after each prompt, [1, B], and the next state.

  `is_first`: the memory is the one before the first segment.
  """
  if is_first:
    state = state._replace(memory=_known_empty(model, state.memory))
  state = _decode_step(model, variables, seeds_B, sampler, prompt, state)
  return state.token_B[None], state


def decode_next(
  model: LanguageModel,
  variables: Any,
  seeds_B: jax.Array,
  sampler: sampling.SamplerParams,
  *,
  state: DecodingState,
) -> tuple[jax.Array, DecodingState]:
  """Returns the next tokens, [TOKENS_PER_CALL, B], and the state after them.

  Several tokens per call, because starting a program takes as long as a token of a small model.
  """

  def step(state: DecodingState, _: None) -> tuple[DecodingState, jax.Array]:
    # Otherwise XLA computes what depends on parameters alone, such as a scaled embedding of the
    # whole vocabulary, before the loop.
    params, token_B = jax.lax.optimization_barrier((variables, state.token_B))
    token_Bx1 = token_B[:, None]
    # Constants: XLA removes what depends on them.
    marks = jnp.zeros_like(token_Bx1, bool), jnp.ones_like(token_Bx1)
    inputs = token_batch.Batch(token_Bx1, None, *marks)
    state = _decode_step(model, params, seeds_B, sampler, inputs, state)
    return state, state.token_B

  state, tokens_KxB = jax.lax.scan(step, state, length=TOKENS_PER_CALL)
  return tokens_KxB, state


def _decode_step(
  model: LanguageModel,
  variables: Any,
  seeds_B: jax.Array,
  sampler: sampling.SamplerParams,
  inputs: token_batch.Batch,
  state: DecodingState,
) -> DecodingState:
  """Returns the state with the token sampled after the last valid token of each row.

  The random key only depends on the seed of the row and the index of the token. The repetition
  penalty ignores the document start, so it does not make the end of a document less likely.
  """
  hidden_Bx1xD, memory = _forward_last(model, variables, inputs, state.memory)
  is_used_BxV = state.is_used_BxV
  if sampler.repetition_penalty is None:
    log_probs_Bx1xV = model.apply(variables, hidden_Bx1xD, method='log_probs')
  else:
    is_start_BxT = inputs.starts_BxT & (inputs.tokens_BxT == sampler.document_start)
    is_text_BxT = (inputs.valid_BxT > 0) & ~is_start_BxT
    is_used_BxV = sampling.mark_tokens(is_used_BxV, inputs.tokens_BxT, is_text_BxT)
    logits_Bx1xV = model.apply(variables, hidden_Bx1xD, method='logits')
    penalty = sampler.repetition_penalty
    logits_Bx1xV = sampling.penalize(logits_Bx1xV, is_used_BxV[:, None], penalty)
    log_probs_Bx1xV = jax.nn.log_softmax(logits_Bx1xV)

  def make_key(seed: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), state.index)

  token_B = sampling.sample_tokens(log_probs_Bx1xV[:, 0], sampler, jax.vmap(make_key)(seeds_B))
  return DecodingState(memory, state.index + 1, token_B, is_used_BxV)
