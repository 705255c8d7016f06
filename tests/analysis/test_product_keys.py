"""`analyze product_keys` against a count of the rows that a layer reads."""

import json

import numpy as np

from ngrammer_jax import analyze, runs
from ngrammer_jax.config.product_memory import ProductMemoryConfig
from ngrammer_jax.data.tokens import token_split
from tests.checks import bad_input

SUB_KEYS, TOP, LENGTH = 4, 2, 50


def test_share_of_used_values_and_divergence(tiny, untrained, monkeypatch, capsys):
  """Head 0 reads the same two values for every token, with a weight of 3/4 and 1/4."""
  text = token_split.TokenSplit(np.arange(LENGTH).astype(np.uint16), np.array([0]), None, 256)
  monkeypatch.setattr(runs.Run, 'split', lambda run, name: text)

  def modify(params, codebook):
    memory = params['layer_1']['product_memory']
    memory['query']['kernel'] *= 0
    memory['query']['bias'] = np.ones((2, 4))
    # Scores of a half: the sums of (1, 2) and (1, 0) are the largest, 0 and -log 3.
    scores = np.array([[-9.0, 0.0, -9.0, -9.0], [-np.log(3), -9.0, 0.0, -9.0]])
    keys = np.broadcast_to(scores[..., None] / 2, (2, SUB_KEYS, 2))
    memory['sub_keys'] = np.stack([keys, keys[::-1]])

  memory = ProductMemoryConfig(sub_keys=SUB_KEYS, heads=2, top=TOP, key_width=4)
  workdir = untrained(tiny({'ngram': None, 'product_memory': memory}), modify)
  assert analyze.main(['product_keys', f'--workdir={workdir}']) == 0
  result = json.loads((workdir / 'product_keys.json').read_text())
  (layer,) = result['layers']
  assert (layer['name'], result['tokens'], result['values']) == (
    'layer_1/product_memory',
    LENGTH,
    SUB_KEYS**2,
  )
  entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
  for head in layer['heads']:
    np.testing.assert_allclose([head['used'], head['kl']], [2 / 16, np.log(16) - entropy], 1e-5)
  # Rows 6 and 4 of head 0, 9 and 1 of head 1.
  both = [4 / 16, np.log(16) - entropy - np.log(2)]
  np.testing.assert_allclose([layer['used'], layer['kl']], both, 1e-5)
  assert result['all'] == {'used': layer['used'], 'kl': layer['kl']}
  np.testing.assert_allclose(np.array(layer['curve'])[[0, 25, 100]], [0, 1, 1], atol=1e-6)
  printed = capsys.readouterr().out
  assert 'layer_1/product_memory, head 1' in printed and '12.5%' in printed


def test_a_model_without_product_keys(tiny, untrained):
  workdir = untrained(tiny({'ngram': None}))
  with bad_input(f'--workdir={workdir} has no product keys: it needs model.product_memory'):
    analyze.main(['product_keys', f'--workdir={workdir}'])
