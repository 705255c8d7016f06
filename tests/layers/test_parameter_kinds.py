"""What a parameter is, by its logical axis names."""

import pytest

from ngrammer_jax.layers import parameter_kinds


@pytest.mark.parametrize(
  'names, kind',
  [
    (('embed', 'heads', 'kv'), 'matrix'),
    (('heads', 'kv', None), 'matrix'),
    (('embed', 'gates', 'mlp'), 'matrix'),
    ((None, 'branches', 'embed'), 'matrix'),
    (('layers', 'mlp', 'embed'), 'matrix'),
    (('vocab', 'embed'), 'embedding'),
    (('position', 'heads', 'kv'), 'embedding'),
    (('vocab_clusters', None), 'embedding'),
    (('vocab',), 'vector'),
    (('layers', 'vocab'), 'vector'),
    (('heads', 'kv'), 'vector'),
    (('gates', 'mlp'), 'vector'),
    (('branches', 'embed'), 'vector'),
    (('norm',), 'vector'),
    ((None, 'norm'), 'vector'),
    (('layers', None, 'norm'), 'vector'),
    (('ngram_vocab', 'host_ngram_embed'), 'table'),
  ],
)
def test_the_kind_of_axis_names(names, kind):
  assert parameter_kinds.of(names).name == kind


@pytest.mark.parametrize(
  'names, inputs, outputs, has_features',
  [
    (('embed', 'heads', 'kv'), (0,), (1, 2), True),
    (('heads', 'kv', 'embed'), (0, 1), (2,), True),
    (('heads', 'kv', None), (1,), (2,), True),
    ((None, 'branches', 'embed'), (0,), (2,), True),
    (('embed', 'heads'), (0,), (1,), False),
    (('embed', 'gates'), (0,), (1,), False),
  ],
)
def test_inputs_and_outputs_of_a_map(names, inputs, outputs, has_features):
  kind = parameter_kinds.of(names)
  assert kind.axes == (inputs, outputs)
  assert kind.has_features == has_features


@pytest.mark.parametrize(
  'names',
  [
    ('taps', None, 'embed'),
    ('heads', 'persistent', 'kv'),
    ('heads', None, None, 'kv'),
    ('vocab', 'embed'),
    ('heads', 'kv'),
  ],
)
def test_what_is_no_map(names):
  assert parameter_kinds.of(names).axes is None
