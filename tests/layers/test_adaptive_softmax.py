"""Adaptive input and softmax, against loops over words."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import adaptive_softmax
from tests import jaxprs
from tests.checks import assert_close, full, random_variables
from tests.layers.programs import assert_gradient

V, D, B, T = 23, 8, 4, 6  # targets enough for every word
CUTOFFS = (6, 12)
CASES = {
  'one cluster, narrower': {'embedding_width': 4},
  'same width': {'cutoffs': CUTOFFS},
  'same width, narrower than the model': {'cutoffs': CUTOFFS, 'embedding_width': 4},
  'halved': {'cutoffs': CUTOFFS, 'divisor': 2},
  'halved, nothing projected at full width': {
    'cutoffs': CUTOFFS,
    'divisor': 2,
    'project_same_width': False,
  },
  'halved, first projection untied': {
    'cutoffs': CUTOFFS,
    'divisor': 2,
    'tied_projections': (False, True, True),
  },
  'nothing tied': {
    'cutoffs': CUTOFFS,
    'divisor': 2,
    'tied': False,
    'tied_projections': (False,),
    'chunk': 4,
  },
}
GRADIENTS = ('one cluster, narrower', 'same width, narrower than the model', 'nothing tied')
FORWARD = ('halved, nothing projected at full width', 'halved, first projection untied')


def build(case):
  layer = adaptive_softmax.AdaptiveSoftmax(V, D, dtype=jnp.float64, **CASES[case])
  rng = np.random.default_rng(1)
  hidden, targets = rng.normal(size=(B, T, D)), rng.permutation(B * T).reshape(B, T) % V
  variables = random_variables(layer, hidden, method='log_probs', dtype='float64')
  return layer, variables, hidden, targets


def slow_vectors(case, params):
  """Every word's vector on the way in, and the row and bias of its logit, from the formula."""
  fields = CASES[case]
  borders = (0, *fields.get('cutoffs', ()), V)
  divisor, J = fields.get('divisor', 1), fields.get('embedding_width', D)
  incoming, outgoing, clusters = np.zeros((V, D)), np.zeros((V, D)), np.zeros(V, int)
  for i in range(len(borders) - 1):
    width = J // divisor**i
    projects = width != D or (divisor > 1 and fields.get('project_same_width', True))
    identity = np.eye(width, D)
    inwards = params.get(f'projection_{i if divisor > 1 else 0}') if projects else identity
    outwards = params.get(f'softmax_projection_{i}', inwards)
    for word in range(borders[i], borders[i + 1]):
      place = word - borders[i]
      clusters[word] = i
      incoming[word] = params[f'embedding_{i}'][place] @ inwards
      row = params.get(f'softmax_weight_{i}', params[f'embedding_{i}'])[place]
      outgoing[word] = row @ outwards
  head = params.get('softmax_projection_0', params.get('projection_0', np.eye(J, D)))
  return incoming, outgoing, clusters, head


def slow_log_probs(case, params, hidden):
  _, outgoing, clusters, head = slow_vectors(case, params)
  bias = np.concatenate([params[f'bias_{i}'] for i in range(clusters.max() + 1)])
  result = np.zeros((B, T, V))
  for b, t in np.ndindex(B, T):
    logits = outgoing @ hidden[b, t] + bias
    tails = []
    for i in range(1, clusters.max() + 1):
      vector = params['cluster_weight'][i - 1] @ head
      tails.append(vector @ hidden[b, t] + params['cluster_bias'][i - 1])
    total = np.log(np.exp([*logits[clusters == 0], *tails]).sum())
    within = [np.log(np.exp(logits[clusters == i]).sum()) for i in range(clusters.max() + 1)]
    for word in range(V):
      i = clusters[word]
      cluster_log_prob = tails[i - 1] - total - within[i] if i else -total
      result[b, t, word] = logits[word] + cluster_log_prob
  return result


def take_targets(log_probs, targets):
  return np.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]


def run_program(layer, args, tokens, targets, with_gradient):
  """All that a layer computes of hidden states and words, and the gradient of the likelihood."""

  def everything(params, hidden):
    apply_method = lambda *inputs, method: layer.apply({'params': params}, *inputs, method=method)
    scores = apply_method(hidden, targets, method='scores')
    results = (
      scores,
      apply_method(hidden, method='log_probs'),
      apply_method(tokens, method='embed')[0],
    )
    return scores.nll_BxT.sum(), results

  if not with_gradient:
    return None, everything(*args)[1]
  return jax.grad(everything, (0, 1), has_aux=True)(*args)


@pytest.mark.parametrize(
  'case, with_gradient',
  [
    *((case, True) for case in GRADIENTS[:2]),
    full(GRADIENTS[2], True),
    *(full(case, False) for case in FORWARD),
    *(pytest.param(c, True, marks=pytest.mark.slow) for c in CASES if c not in GRADIENTS),
  ],
)
def test_equals_slow_loop_with_the_gradients_of_finite_differences(x64, case, with_gradient):
  layer, variables, hidden, targets = build(case)
  args = jax.device_get(variables['params']), hidden
  expected = slow_log_probs(case, *args)
  assert_close(np.exp(expected).sum(axis=-1), np.ones((B, T)), 1e-12)
  best = expected.argmax(axis=-1)
  targets[0] = best[0]  # some right guesses, some wrong
  program = jax.jit(run_program, static_argnums=(0, 4))
  run = lambda targets: jax.device_get(
    program(layer, args, np.arange(V)[None], targets, with_gradient)
  )
  gradient, (scores, log_probs, embedded) = run(targets)
  assert_close(log_probs, expected, 1e-12)
  assert_close(embedded, slow_vectors(case, args[0])[0], 1e-12)
  assert_close(scores.nll_BxT, -take_targets(expected, targets), 1e-12)
  assert scores.correct_BxT.tolist() == (best == targets).tolist()
  _, (scores, *_) = run(best)
  assert scores.correct_BxT.all()
  if with_gradient:
    slow = lambda args: -take_targets(slow_log_probs(case, *args), targets).sum()
    assert_gradient(gradient, slow, args)


@pytest.mark.full
def test_logits_of_all_words_never_exist():
  layer = adaptive_softmax.AdaptiveSoftmax(4096, D, (128, 1024), 2)
  hidden, targets = np.zeros((4, 16, D), 'float32'), np.zeros((4, 16), 'int32')
  init = lambda: nn.unbox(layer.init(jax.random.key(0), hidden, method='log_probs'))
  variables = jax.eval_shape(init)
  score = lambda v: layer.apply(v, hidden, targets, method='scores').nll_BxT.sum()
  assert jaxprs.largest_array(jax.grad(score), variables) <= max(4 * 16 * 128, 4096 * D)
