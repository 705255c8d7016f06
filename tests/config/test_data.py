"""The section `data`: mixtures."""

import pytest

from ngrammer_jax.config.data import DataConfig, PartConfig


def test_temperature_is_that_of_seqio():
  parts = tuple(PartConfig(weight) for weight in (100.0, 1.0, 0.0))
  for temperature in (0.5, 1.0, 2.0, 1e-3):
    rates = [100 ** (1 / temperature) if temperature > 0.01 else 1, 1 if temperature > 0.01 else 0]
    expected = (*(rate / sum(rates) for rate in rates), 0)
    weights = DataConfig(mixture=parts, mixture_temperature=temperature).weights()
    assert weights == pytest.approx(expected)


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


def test_parts_may_be_conversations_or_text():
  parts = (
    PartConfig(path='a'),
    PartConfig(path='b', chat=False),
    PartConfig(path='c', corpus='cbt'),
  )
  options = {'vocabulary': 'tokenizer', 'chat': True, 'loss_on': 'assistant'}
  configs = DataConfig('text', mixture=parts, **options).parts().values()
  assert [c.chat for c in configs] == [True, False, False]
  assert [c.loss_on for c in configs] == ['assistant', 'all', 'all']
  parts = (PartConfig(path='a', chat=True, loss_on='assistant'), PartConfig(path='b'))
  configs = DataConfig('text', mixture=parts, vocabulary='tokenizer').parts().values()
  assert [(c.chat, c.loss_on) for c in configs] == [(True, 'assistant'), (False, 'all')]
