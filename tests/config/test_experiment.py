"""The config as frozen dataclasses: types, unknown keys, impossible combinations."""

import dataclasses
import json

import ml_collections
import pytest

from ngrammer_jax import config, errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.config import fields
from ngrammer_jax.config import model as model_config
from tests.checks import bad_input
from tests.loops import each


def test_default_is_the_dataclasses_of_the_package():
  assert config.resolve(config.default()) == config.Config()


def test_default_has_few_keys_and_optional_blocks_are_none():
  settings = [key.path for key, _ in fields.walk_values(config.Config()) if key.block is None]
  assert len(settings) <= 78
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


SPANS = {'memory': {'length': 64, 'same_length': 'memory_and_self'}, 'span': {'limit': 64}}


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


@each(
  'fields, message',
  [
    ({'sed': 1}, 'unknown config key sed: did you mean seed?'),
    ({'model': None}, 'model=None: the section is required'),
    ({'seed': 1.0}, 'seed=1.0 is not of type int'),
    ({'seed': None}, 'seed=None is not of type int'),
    ({'seed': True}, 'seed=True is not of type int'),
    ({'training': {'steps': '100'}}, "training.steps='100' is not of type int"),
    ({'training': {'steps': 100.0}}, 'training.steps=100.0 is not of type int'),
    ({'training': {'steps': [100]}}, 'training.steps=(100,) is not of type int'),
    ({'model': {'bias': 1}}, 'model.bias=1 is not of type bool'),
    ({'model': {'dtype': None}}, 'model.dtype=None is not of type str'),
    ({'data': {'path': 3}}, 'data.path=3 is not of type str or None'),
    ({'optimizer': {'clip_norm': '1'}}, "optimizer.clip_norm='1' is not of type float or None"),
    ({'optimizer': {'adam': {'beta1': False}}}, 'optimizer.adam.beta1=False is not of type float'),
    ({'model': {'ngram': {'dim': '8'}}}, "model.ngram.dim='8' is not of type int"),
    ({'training': {'steps': 0}}, 'training.steps=0 must be at least 1'),
    ({'training': {'batch_size': 0}}, 'training.batch_size=0 must be at least 1'),
    ({'training': {'segment_length': -1}}, 'training.segment_length=-1 must be at least 1'),
    ({'training': {'segments_per_call': 0}}, 'training.segments_per_call=0 must be at least 1'),
    ({'training': {'log_every': 0}}, 'training.log_every=0 must be at least 1'),
    ({'training': {'checkpoint_every': 0}}, 'training.checkpoint_every=0 must be at least 1'),
    ({'training': {'evaluate_every': -10}}, 'training.evaluate_every=-10 must be at least 0'),
    ({'training': {'keep_checkpoints': 0}}, 'training.keep_checkpoints=0 must be at least 1'),
    ({'evaluation': {'streams': 0}}, 'evaluation.streams=0 must be at least 1'),
    ({'optimizer': {'warmup_steps': -1}}, 'optimizer.warmup_steps=-1 must be at least 0'),
    (
      {'optimizer': {'schedule': 'cosinus'}},
      "optimizer.schedule='cosinus' is not one of: cosine, linear, rsqrt, constant, "
      'transformer_xl, transformer_xl_tensorflow',
    ),
    ({'optimizer': {'learning_rate': 0.0}}, 'optimizer.learning_rate=0.0 must be above 0'),
    (
      {'optimizer': {'table': {'learning_rate': -1.0}}},
      'optimizer.table.learning_rate=-1.0 must be above 0',
    ),
    (
      {'model': {'position': 'relative'}, 'evaluation': {'memory': {'length': 8}}},
      "evaluation.memory is set, but the model has no memory, which model.position='relative' "
      'needs in training too: use evaluation.memory=None',
    ),
    (
      {'model': SPANS, 'evaluation': {'memory': {'length': 128}}},
      'evaluation.memory.length=128 must be at most model.span.limit=64: use 64, or a larger '
      'model.span.limit',
    ),
    (
      {'model': {'memory': {}}, 'evaluation': {'memory': {'length': -1}}},
      'evaluation.memory.length=-1 must be at least 0, or None',
    ),
    (
      {'evaluation': {'protocol': 'window'}},
      "evaluation.protocol='window' is not one of: streams, transformer_xl, adaptive_span, "
      'sliding_window',
    ),
    (
      {'optimizer': {'algorithm': 'sgd'}},
      "optimizer.algorithm='sgd' is not one of: adam, adamw, lamb, adagrad",
    ),
    (
      {'model': {'adaptive_softmax': {'cutoffs': (8,)}}},
      "model.adaptive_softmax.cutoffs=(8,) is not for data.vocabulary='sentencepiece', but for "
      'words: use (); only these are sorted by frequency',
    ),
    (
      {'model': {'position': 'learned'}, 'training': {'segment_length': 600}},
      'model.positional.max_length=512 is less than the 600 tokens of a segment: raise it, or '
      'lower training.segment_length or evaluation.segment_length',
    ),
    (
      {
        'model': {'position': 'absolute', 'memory': {'length': 256}},
        'training': {'segment_length': 257},
        'evaluation': {'segment_length': 64},
      },
      'model.positional.max_length=512 is less than the 513 tokens of a segment and its memory: '
      'raise it, or lower training.segment_length or evaluation.segment_length or '
      'model.memory.length or evaluation.memory.length',
    ),
    (
      {
        'model': {'position': 'absolute', 'memory': {'length': 256}},
        'training': {'segment_length': 256},
        'evaluation': {'memory': {'length': 300}},
      },
      'model.positional.max_length=512 is less than the 556 tokens of a segment and its memory: '
      'raise it, or lower training.segment_length or evaluation.segment_length or '
      'model.memory.length or evaluation.memory.length',
    ),
    (
      {
        'model': {'position': 'absolute', 'positional': {'max_length': 256}},
        'evaluation': {'segment_length': 257},
      },
      'model.positional.max_length=256 is less than the 257 tokens of a segment: raise it, or '
      'lower training.segment_length or evaluation.segment_length',
    ),
    ({'mesh': {'data': 0}}, 'mesh.data=0 must be at least 1, or -1'),
    ({'mesh': {'fsdp': -2}}, 'mesh.fsdp=-2 must be at least 1, or -1'),
    ({'mesh': {'model': 0}}, 'mesh.model=0 must be at least 1, or -1'),
    ({'mesh': {'zero': 2}}, 'mesh.zero=2 must be from 0 to 1'),
    (
      {'evaluation': {'max_examples': 9}},
      'evaluation.max_examples=9 is not for finetune=None, but for a value: use None',
    ),
    (
      {'evaluation': {'max_examples': 0}, 'finetune': {}},
      'evaluation.max_examples=0 must be at least 1, or None',
    ),
    ({'finetune': {'wsc_spans': 't6'}}, "finetune.wsc_spans='t6' is not one of: all, t5"),
  ],
)
def test_impossible_config_says_what_to_change(fields, message):
  with bad_input(message):
    config.resolve(fields)


@each(
  'fields',
  [
    *({'model': 3}, {'model': {'ngram': 3}}, None),  # a value in place of a section
    {'evaluation': {'segment_length': -1}},
    {'evaluation': {'max_tokens': -5}},
    {'data': {'vocabulary': 'words', 'vocabulary_size': -1}},
    {'mesh': {'data': -1, 'fsdp': -1}},
    {'optimizer': {'learning_rate': float('nan')}},
  ],
)
def test_impossible_values_are_bad_input(fields):
  with pytest.raises(errors.BadInput):
    config.resolve(fields)


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


@pytest.mark.parametrize('same_length, is_allowed', [('no', False), ('memory', True)])
def test_keys_of_a_token_have_different_positions(same_length, is_allowed):
  """With `same_length`, these are fewer than the tokens of the segment and its memory."""
  memory = {'length': 500, 'same_length': same_length}
  model = {'position': 'absolute', 'memory': memory, 'positional': {'max_length': 512}}
  resolve = lambda: config.resolve({'model': model, 'training': {'segment_length': 128}})
  if is_allowed:
    assert resolve().evaluation_context() == 628
  else:
    with bad_input(
      'model.positional.max_length=512 is less than the 628 tokens of a segment and its memory: '
      'raise it, or lower training.segment_length or evaluation.segment_length or '
      'model.memory.length or evaluation.memory.length'
    ):
      resolve()


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
