"""The section `data`: mixtures."""

import pytest

from ngrammer_jax import config
from ngrammer_jax.config.data import DataConfig, PartConfig
from tests.checks import bad_input


def test_temperature_is_that_of_seqio():
  parts = tuple(PartConfig(weight) for weight in (100.0, 1.0, 0.0))
  for temperature in (0.5, 1.0, 2.0, 1e-3):
    rates = [100 ** (1 / temperature) if temperature > 0.01 else 1, 1 if temperature > 0.01 else 0]
    expected = (*(rate / sum(rates) for rate in rates), 0)
    weights = DataConfig(mixture=parts, mixture_temperature=temperature).weights()
    assert weights == pytest.approx(expected)


@pytest.mark.parametrize(
  'values, message',
  [
    ([{'weight': -1.0}], 'data.mixture.0.weight=-1.0 must be at least 0'),
    (
      [{'weight': 0.0}, {'weight': 0, 'name': 'b'}],
      'data.mixture: all weights are 0: set data.mixture.0.weight=1',
    ),
    (
      [{'path': '/a/x.txt'}, {'path': '/b/x.jsonl'}],
      "data.mixture.0 has the name 'x', too: set data.mixture.1.name",
    ),
    ([{'name': 'a/b'}], "data.mixture.0.name='a/b': use letters, digits, '_', '-' and '.' only"),
    ([{'pth': 'x'}], 'unknown config key data.mixture.0.pth: did you mean data.mixture.0.path?'),
    (
      [{'corpus': 'shards', 'path': 'x'}, {}],
      "data.mixture.0.corpus='shards' is tokenised during training, but data.vocabulary='words' "
      'needs the whole text in advance: use sentencepiece or bytes',
    ),
  ],
)
def test_settings_that_are_refused(values, message):
  with bad_input(message):
    config.resolve({'data': {'vocabulary': 'words', 'mixture': values}})


def test_parts_have_the_keys_that_are_for_them():
  corpora = ('shards', 'text', 'enwik8')
  parts = tuple(PartConfig(name=name, corpus=name, path='x') for name in corpora)
  keys = {'shuffle': 3, 'drop_duplicates': True, 'newlines': 'drop', 'text_field': ('a',)}
  data = DataConfig(corpus='shards', mixture=parts, document_separator='|', **keys)
  configs = data.parts()
  values = lambda key: [getattr(configs[name], key) for name in corpora]
  assert values('corpus') == [*corpora] and values('shuffle') == [3, None, None]
  assert values('drop_duplicates') == [False, True, True]
  assert values('newlines') == ['keep', 'keep', 'drop']
  assert values('text_field') == [('a',), ('a',), ('text',)]
  assert values('document_separator') == ['|', '|', None]
  for part in configs.values():
    part.check()
  with bad_input(
    "data.mixture.0.text_field=('b',) is not for data.mixture.0.corpus='enwik8', but for text, "
    "shards: use ('text',)"
  ):
    config.resolve({'data': {'mixture': [{'corpus': 'enwik8', 'text_field': 'b'}]}})
