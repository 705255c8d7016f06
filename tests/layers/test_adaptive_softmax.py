"""Adaptive input and softmax, against loops over words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers import adaptive_softmax
from tests import jaxprs
from tests.checks import assert_close, random_variables

V, D, B, T = 23, 8, 2, 5
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


def build(case):
  layer = adaptive_softmax.AdaptiveSoftmax(V, D, dtype=jnp.float64, **CASES[case])
  hidden = jnp.asarray(np.random.default_rng(1).normal(size=(B, T, D)))
  variables = random_variables(layer, hidden, method='log_probs', dtype='float64')
  return layer, variables, hidden


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
      incoming[word] = np.asarray(params[f'embedding_{i}'])[place] @ np.asarray(inwards)
      row = np.asarray(params.get(f'softmax_weight_{i}', params[f'embedding_{i}']))[place]
      outgoing[word] = row @ np.asarray(outwards)
  head = params.get('softmax_projection_0', params.get('projection_0', np.eye(J, D)))
  return incoming, outgoing, clusters, np.asarray(head)


def slow_log_probs(case, params, hidden):
  _, outgoing, clusters, head = slow_vectors(case, params)
  bias = np.concatenate([params[f'bias_{i}'] for i in range(clusters.max() + 1)])
  result = np.zeros((B, T, V))
  for b, t in np.ndindex(B, T):
    logits = outgoing @ hidden[b, t] + bias
    tails = []
    for i in range(1, clusters.max() + 1):
      vector = np.asarray(params['cluster_weight'])[i - 1] @ head
      tails.append(vector @ hidden[b, t] + params['cluster_bias'][i - 1])
    total = np.log(np.exp([*logits[clusters == 0], *tails]).sum())
    for word in range(V):
      i = clusters[word]
      if i == 0:
        result[b, t, word] = logits[word] - total
      else:
        within = np.log(np.exp(logits[clusters == i]).sum())
        result[b, t, word] = tails[i - 1] - total + logits[word] - within
  return result


@pytest.mark.parametrize('case', CASES)
def test_all_probabilities_equal_slow_loop(x64, case):
  layer, variables, hidden = build(case)
  log_probs = layer.apply(variables, hidden, method='log_probs')
  assert_close(log_probs, slow_log_probs(case, variables['params'], np.asarray(hidden)), 1e-12)
  assert_close(jnp.exp(log_probs).sum(axis=-1), np.ones((B, T)), 1e-12)


@pytest.mark.parametrize('case', CASES)
def test_scores_and_their_gradients_are_those_of_the_probabilities(x64, case):
  layer, variables, hidden = build(case)
  log_probs = np.asarray(layer.apply(variables, hidden, method='log_probs'))
  for first in range(0, V, T):
    targets = jnp.asarray(np.arange(first, first + B * T).reshape(B, T) % V)
    scores = layer.apply(variables, hidden, targets, method='scores')
    expected = -np.take_along_axis(log_probs, np.asarray(targets)[..., None], axis=-1)[..., 0]
    assert_close(scores.nll_BxT, expected, 1e-12)
    assert scores.correct_BxT.tolist() == (log_probs.argmax(axis=-1) == targets).tolist()

  def by_scores(variables, hidden):
    return layer.apply(variables, hidden, targets, method='scores').nll_BxT.sum()

  def by_log_probs(variables, hidden):
    all_words = layer.apply(variables, hidden, method='log_probs')
    return -jnp.take_along_axis(all_words, targets[..., None], axis=-1).sum()

  gradients = (jax.grad(f, argnums=(0, 1))(variables, hidden) for f in (by_scores, by_log_probs))
  jax.tree.map(lambda a, b: assert_close(a, b, 1e-10), *gradients)


@pytest.mark.parametrize('case', CASES)
def test_inputs_equal_slow_loop(x64, case):
  layer, variables, _ = build(case)
  tokens = jnp.arange(V)[None]
  incoming, *_ = slow_vectors(case, variables['params'])
  assert_close(layer.apply(variables, tokens, method='embed')[0], incoming, 1e-12)


def test_logits_of_all_words_never_exist():
  layer = adaptive_softmax.AdaptiveSoftmax(4096, D, (128, 1024), 2)
  hidden, targets = jnp.zeros((4, 16, D)), jnp.zeros((4, 16), jnp.int32)
  variables = random_variables(layer, hidden, method='log_probs')
  score = lambda v: layer.apply(v, hidden, targets, method='scores').nll_BxT.sum()
  assert jaxprs.largest_array(jax.grad(score), variables) <= max(4 * 16 * 128, 4096 * D)
