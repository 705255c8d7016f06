"""The config as frozen dataclasses: types, unknown keys, impossible combinations."""

import dataclasses
import json

import ml_collections
import pytest

from ngrammer_jax import command_line, config, errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.config import fields
from ngrammer_jax.config import model as model_config
from tests.checks import bad_input
from tests.loops import each


def test_default_is_the_dataclasses_of_the_package():
  assert config.resolve(config.default()) == config.Config()


def test_default_has_few_keys_and_optional_blocks_are_none():
  settings = [key.path for key, _ in fields.walk_values(config.Config()) if key.block is None]
  assert len(settings) <= 94
  assert config.default().model.ngram is None


def test_missing_keys_have_their_defaults():
  resolved = config.resolve({'training': {'steps': 20}, 'model': {'ngram': {'dim': 4}}})
  assert resolved == config.Config(
    training=config.TrainingConfig(steps=20),
    model=model_config.ModelConfig(ngram=model_config.NGramConfig(dim=4)),
  )


def test_config_dict_and_plain_dict_are_alike():
  values = {'seed': 3, 'data': {'corpus': 'text', 'path': 'x'}}
  assert config.resolve(ml_collections.ConfigDict(values)) == config.resolve(values)


def test_resolved_config_cannot_be_changed():
  with pytest.raises(dataclasses.FrozenInstanceError):
    config.Config().training.steps = 3


def test_ngram_is_the_block_with_some_fields_changed():
  expected = model_config.NGramConfig(dim=4, clusters=None)
  block = config.block('model.ngram', dim=4, clusters=None)
  assert block.to_dict() == dataclasses.asdict(expected)  # all can be read and changed
  assert config.resolve({'model': {'ngram': block}}).model.ngram == expected


def test_saved_config_is_loaded_the_same(tmp_path):
  path = tmp_path / 'config.json'
  saved = config.Config(
    model=model_config.ModelConfig(ngram=model_config.NGramConfig(dim=4, decay=0.1 + 0.2)),
    data=data_config.DataConfig(corpus='text', path='/a/é"\\'),
    optimizer=config.OptimizerConfig(learning_rate=1e-17, clip_norm=None),
    seed=2**31,
  )
  for one in (saved, config.Config()):
    config.save(one, path)
    assert config.load(path) == one


def test_a_config_is_loaded_by_its_name_as_on_the_command_line(tmp_path):
  name = 'transformer:llama_quickstart'
  loaded = config.load(name)
  assert loaded == command_line.resolve(name, []) and loaded.model.key_value_heads == 2
  config.save(loaded, tmp_path / 'config.json')
  assert config.load(tmp_path) == config.load(str(tmp_path / 'config.json')) == loaded
  with bad_input(f'config.load: no file {tmp_path}/other/config.json'):
    config.load(tmp_path / 'other' / 'config.json')
  with pytest.raises(
    errors.BadInput, match=r"^config.load\('quickstrt'\): .* did you mean quickst"
  ):
    config.load('quickstrt')
  with pytest.raises(errors.BadInput, match="^config.load.*no variant 'llama_quick': did you mean"):
    config.load('transformer:llama_quick')


def test_a_folder_with_the_name_of_a_packaged_config_is_not_loaded_unless_it_is_a_run(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  packaged = config.load('quickstart')
  (tmp_path / 'quickstart').mkdir()
  assert config.load('quickstart') == command_line.resolve('quickstart', []) == packaged
  config.save(config.Config(), tmp_path / 'quickstart' / 'config.json')
  assert config.load('quickstart') == config.Config()


def test_saved_config_of_an_older_version_says_what_is_unknown(tmp_path):
  path = tmp_path / 'config.json'
  fields = dataclasses.asdict(config.Config())
  fields['training']['span_check_every'] = 20  # a key that is no longer used
  path.write_text(json.dumps(fields))
  assert config.load(path) == config.Config()
  fields['training']['warm_up'] = 3
  path.write_text(json.dumps(fields))
  with pytest.raises(errors.BadInput, match='^unknown config key training.warm_up: '):
    config.load(path)


def test_saved_config_has_all_sections_or_those_of_a_model_alone(tmp_path):
  path = tmp_path / 'config.json'
  path.write_text(json.dumps({'model': {'layers': 3}, 'data': {}}))
  assert config.load(path).model.layers == 3
  for sections in ({}, {'model': {}}, {'data': {}, 'model': {}, 'mesh': {}}):
    path.write_text(json.dumps(sections))
    with pytest.raises(ValueError, match='^no section '):
      config.load(path)


@each('key', ['learning_rate', 'clip_norm'])
def test_int_is_a_float_where_one_is_wanted(key):
  resolved = getattr(config.resolve({'optimizer': {key: 1}}).optimizer, key)
  assert (type(resolved), resolved) == (float, 1.0)


POSSIBLE = [
  {'training': {'evaluate_every': 0}},
  {'training': {'segments_per_call': 1, 'steps': 7, 'log_every': 3}},
  {'training': {'steps': 20, 'log_every': 500}},
  {'training': {'steps': 1004, 'log_every': 25, 'evaluate_every': 499, 'checkpoint_every': 8}},
  {'optimizer': {'warmup_steps': 0}},
  {'mesh': {'data': 2, 'fsdp': -1, 'model': 3}},
]


@each('fields', POSSIBLE)
def test_possible_config_passes(fields):
  resolved = dataclasses.asdict(config.resolve(fields))
  for section, values in fields.items():
    assert resolved[section].items() >= values.items()


@each('own, expected', [(None, 128), (64, 64)])
def test_evaluation_has_the_segment_length_of_training_or_its_own(own, expected):
  resolved = config.resolve({'evaluation': {'segment_length': own}})
  assert resolved.evaluation_length() == expected


def test_one_entry_may_stand_without_its_brackets():
  ngram = {'orders': 3, 'layer': 'attention', 'pairing': 'previous'}
  resolved = config.resolve({'model': {'ngram': ngram}}).model.ngram
  assert (resolved.orders, resolved.pairing) == ((3,), ('previous',))


def test_a_call_ends_at_every_event_and_nowhere_by_where_a_run_began():
  every = {'log_every': 3, 'evaluate_every': 5, 'checkpoint_every': 7}
  t = config.TrainingConfig(steps=17, segments_per_call=4, **every)
  calls = list(t.calls(0))
  assert [end for _, end in calls] == [3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15, 16, 17]
  assert [first for first, _ in calls] == [0, *(end for _, end in calls[:-1])]
  for first, _ in calls:
    assert list(t.calls(first)) == [call for call in calls if call[0] >= first]
  assert list(t.calls(17)) == []
  rarely = dataclasses.replace(t, log_every=100, evaluate_every=0, checkpoint_every=100)
  assert list(rarely.calls(0)) == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 17)]


def test_a_window_limits_the_positions_that_a_token_needs():
  """With `same_length`, its keys are fewer than the tokens of the segment and its memory."""
  memory = {'length': 500, 'same_length': 'memory'}
  model = {'position': 'absolute', 'memory': memory, 'positional': {'max_length': 512}}
  resolved = config.resolve({'model': model, 'training': {'segment_length': 128}})
  assert resolved.evaluation_context() == 628


def longrope(training, evaluation):
  scaling = {'kind': 'longrope', 'factor': 2.0, 'original_length': 48}
  scaling |= {'short_factors': [1.0] * 32, 'long_factors': [2.0] * 32}
  return config.resolve(
    {
      'model': {'positional': {'scaling': scaling}},
      'training': {'segment_length': training},
      'evaluation': {'segment_length': evaluation},
    }
  )


def test_longrope_has_long_factors_where_the_context_is_longer():
  for length, is_long in ((48, False), (49, True)):
    model = longrope(48, length).evaluation_model()
    assert model.positional.scaling.is_long == is_long
    assert model.num_positions == (None if is_long else 48)
  with bad_input(
    'training.segment_length=49 with its memory is longer than '
    'model.positional.scaling.original_length=48: use shorter segments, or '
    'model.positional.scaling.is_long=True'
  ):
    longrope(49, 48)
