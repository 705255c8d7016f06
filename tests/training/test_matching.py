"""--match_parameters: a value of a key gives a model the parameters of another."""

import dataclasses
import logging
import os

import pytest

from ngrammer_jax import command_line, config, train
from ngrammer_jax.training import matching, model_size, preparation
from tests.checks import bad_input
from tests.loops import each
from tests.training import toy
from tests.training.helpers import write_config

V = 4096
ENGRAM = 'model.ngram_memories.0'


def parameters(model):
  return model_size.count(model, V)


@each(
  'spec, key, other',
  [
    ('transformer:qwen3_quickstart', 'model.feed_forward_width', 'transformer:llama_quickstart'),
    ('ngram_memories:quickstart_engram', f'{ENGRAM}.rows', 'transformer:llama_quickstart'),
    ('quickstart', 'model.ngram.vocabulary_size', 'ngram_memories:quickstart_wide'),
    ('ngram_memories:quickstart_product_keys', 'model.product_memory.sub_keys', 'quickstart'),
  ],
)
def test_a_key_is_solved_for(spec, key, other, caplog):
  caplog.set_level(logging.INFO)
  target = parameters(config.load(other).model).parameters
  matched = matching.match(config.load(spec), key, config.load(other).model, other, V)
  found = parameters(matched.model).parameters
  assert abs(found / target - 1) <= matching.TOLERANCE
  value = matching._whole_number(matched, key)
  for nearby in (value - 1, value + 1):  # no other value is nearer
    changed = matching._with_value(matched, key, nearby).model
    assert abs(parameters(changed).parameters - target) >= abs(found - target)
  assert f'{key}={value} has {found:,} parameters, and {other} has {target:,} (' in caplog.text
  rest = matching._with_value(matched, key, matching._whole_number(config.load(spec), key))
  assert rest == config.load(spec)  # nothing else has changed


def test_a_key_that_is_zero_is_solved_for():
  start = config.resolve({'model': {'persistent': {'vectors': 0}}})
  other = config.resolve({'model': {'persistent': {'vectors': 77}}})
  matched = matching.match(start, 'model.persistent.vectors', other.model, 'other', V)
  assert matched == other


def test_a_matched_model_is_of_equal_size_for_its_vocabulary(caplog):
  """A config for comparisons warns of another vocabulary, but not once it is matched to it."""
  start = config.load('ngram_memories:quickstart_engram')
  data = dataclasses.replace(start.data, matched_vocabulary_size=V)
  start = dataclasses.replace(start, data=data)
  other = config.load('transformer:llama_quickstart').model
  matched = matching.match(start, f'{ENGRAM}.rows', other, 'other', 2 * V)
  preparation._warn_of_unequal_sizes(matched, 2 * V)
  assert not caplog.messages
  preparation._warn_of_unequal_sizes(start, 2 * V)
  assert 'this config has as many parameters' in caplog.text


def test_what_has_no_solution_is_refused():
  plain, wide = (config.load(f'ngram_memories:quickstart_{name}') for name in ('plain', 'wide'))
  label = '--match_parameters=other --match_key='

  def match(key, other=plain, start=wide):
    matching.match(start, key, other.model, 'other', V)

  for key in ('model.activation', 'model.head_width'):
    with pytest.raises(
      ValueError, match=f'^--match_key={key} is .*, not one whole number: use for'
    ):
      match(key)
  with bad_input(
    '--match_key=model.positional.max_length is None, not one whole number: use for example '
    'model.feed_forward_width or model.ngram_memories.0.rows'
  ):
    match('model.positional.max_length')
  with bad_input(f'{label}training.steps: the number of parameters does not grow with it'):
    match('training.steps')
  with pytest.raises(ValueError, match='parameters with the value 1 are more than'):
    match(
      'model.feed_forward_width',
      dataclasses.replace(
        plain, model=dataclasses.replace(plain.model, layers=1, feed_forward_width=1)
      ),
    )
  with pytest.raises(
    ValueError, match=r'differ by [+-].*%, more than 0.1%: use a --match_key with'
  ):
    match('model.layers')


def test_the_flags_of_a_training(tiny, tmp_path, monkeypatch, capsys, caplog):
  caplog.set_level(logging.INFO)
  toy.install(monkeypatch.setattr)
  monkeypatch.setenv('XLA_FLAGS', os.environ['XLA_FLAGS'])  # the command adds to it
  other = write_config(tmp_path / 'other.py', tiny({'feed_forward_width': 77}))
  file = write_config(tmp_path / 'config.py', tiny())
  arguments = [f'--config={file}', f'--workdir={tmp_path}/run', f'--match_parameters={other}']
  assert train.main(arguments) == 0
  assert config.load(tmp_path / 'run').model.feed_forward_width == 77
  assert '(+0.000%)' in caplog.text
  assert train.main([*arguments, '--dry_run']) == 0 and not list(tmp_path.glob('new'))
  # A run is counted too, if it has the same vocabulary.
  again = [f'--config={file}', f'--workdir={tmp_path}/again', f'--match_parameters={tmp_path}/run']
  assert train.main(again) == 0
  assert config.load(tmp_path / 'again').model.feed_forward_width == 77
  with bad_input(
    f'--match_parameters={tmp_path}/run has a vocabulary of 257 token ids, but this training has '
    f'one of 300: use the same vocabulary'
  ):
    train.main(
      [
        *again[:1],
        f'--workdir={tmp_path}/third',
        again[2],
        '--config.data.vocabulary=sentencepiece',
        '--config.data.vocabulary_size=300',
        '--dry_run',
      ]
    )
  with pytest.raises(
    ValueError, match='^--match_parameters=nothing: no file and no config of the '
  ):
    train.main([*arguments[:2], '--match_parameters=nothing'])
  assert command_line.resolve(str(file), []).model.feed_forward_width == 32
  with bad_input(
    '--print_config prints the config before --match_parameters changes it: use --dry_run, which '
    'logs the value of --match_key, or leave out one of them'
  ):
    train.main([*arguments, '--print_config'])
