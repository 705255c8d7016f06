"""Sampling settings of generation_config.json are the defaults of a model."""

import json

import pytest

from ngrammer_jax import runs
from ngrammer_jax.checkpoints import workdirs
from ngrammer_jax.inference import sampling
from ngrammer_jax.runs import generation_config
from tests import published_folders

SETTINGS = {'temperature': 0.7, 'top_k': 20, 'top_p': 0.8, 'repetition_penalty': 1.05}
QWEN = SETTINGS | {'do_sample': True, 'transformers_version': '4.37.0'}
# The content of a file, the settings, and the warnings.
FILES = [
  (
    QWEN | {'eos_token_id': [7, 8], 'max_length': 4096, 'transformers_version': '4.37.0'},
    SETTINGS,
    [],
  ),
  ({}, {}, []),
  ({'do_sample': True}, {}, []),
  ({'do_sample': None, 'temperature': None, 'top_k': None}, {}, []),
  # A field is used without `do_sample`, too.
  ({'temperature': 0.9, 'min_p': 0.05}, {'temperature': 0.9, 'min_p': 0.05}, []),
  ({'do_sample': False}, {'temperature': 0.0}, []),
  ({'do_sample': False, 'temperature': 0.9, 'top_k': 5}, {'temperature': 0.0, 'top_k': 5}, []),
  # Values that switch off, or are whole numbers.
  ({'temperature': 0, 'top_k': 0, 'top_p': 1}, {'temperature': 0.0, 'top_k': 0, 'top_p': 1.0}, []),
  (
    {'temperature': 'hot', 'top_k': 20.0, 'top_p': 1.5, 'min_p': True, 'repetition_penalty': 0.5},
    {},
    [
      "temperature='hot' is not of type float; it is ignored",
      'top_k=20.0 is not of type int or None; it is ignored',
      'top_p=1.5 must be above 0 and at most 1, or None; it is ignored',
      'repetition_penalty=0.5 must be at least 1: 1 is no penalty; it is ignored',
      'min_p=True is not of type float or None; it is ignored',
    ],
  ),
  ({'top_p': float('nan')}, {}, ['top_p=nan must be finite; it is ignored']),
  ({'do_sample': 'no'}, {}, ["do_sample='no' must be true or false; it is ignored"]),
  (
    {'num_beams': 4, 'no_repeat_ngram_size': 3, 'stop_strings': ['x'], 'token_healing': True},
    {},
    ['ignoring no_repeat_ngram_size, num_beams, stop_strings, token_healing, not supported'],
  ),
  # Fields that have no effect are not named.
  ({'num_beams': 1, 'typical_p': 1.0, 'no_repeat_ngram_size': 0, 'bad_words_ids': None}, {}, []),
]


@pytest.mark.parametrize(('content', 'settings', 'warnings'), FILES)
def test_settings_of_a_file(content, settings, warnings, caplog):
  assert generation_config.read(content) == settings
  assert caplog.messages == [f'generation_config.json: {message}' for message in warnings]
  sampling.SamplingConfig(**settings).check_values()


@pytest.fixture
def folder(tmp_path):
  """A published model that recommends settings."""
  published_folders.write(tmp_path / 'model')
  (tmp_path / 'model/generation_config.json').write_text(json.dumps(QWEN | {'num_beams': 2}))
  return tmp_path / 'model'


def test_an_argument_overrides_a_setting_of_the_model(folder, caplog):
  caplog.set_level('INFO')
  run = runs.load_run(folder)
  assert run.sampling_config() == sampling.SamplingConfig(0.7, 20, 0.8, 1.05)
  changed = run.sampling_config(temperature=0.0, top_k=0, min_p=0.1)
  assert changed == sampling.SamplingConfig(0.0, 0, 0.8, 1.05, 0.1)
  assert run.sampling_config(1.0, 0, 1.0, 1.0) == sampling.SamplingConfig(1.0, 0, 1.0, 1.0)
  assert caplog.messages == [
    'generation_config.json: ignoring num_beams, not supported',
    'generation_config.json of the model sets temperature=0.7, top_k=20, top_p=0.8, '
    'repetition_penalty=1.05',
    'generation_config.json of the model sets top_p=0.8, repetition_penalty=1.05',
  ]


def test_a_run_has_the_settings_of_the_model_that_it_started_from(folder, tmp_path):
  published = runs.load_run(folder)
  workdir = tmp_path / 'run'
  workdir.mkdir()
  workdirs.write(workdir, published.config, published.vocabulary, 'abc')
  assert runs.load_run(workdir).sampling_config() == sampling.SamplingConfig()
  workdirs.write_origin(workdir, published.origin)
  assert runs.load_run(workdir).sampling_config() == sampling.SamplingConfig(0.7, 20, 0.8, 1.05)


def test_generate_uses_the_settings_of_the_model(folder, one_device, monkeypatch):
  """And `completions`, which the harness calls, only those that it is given."""
  run = runs.load_run(folder)
  monkeypatch.setitem(run.__dict__, 'recommended_sampling', {'top_k': 1})
  prompts = ['lines'] * 8  # one program
  greedy, *_ = run.generate(prompts, tokens=1, temperature=0)
  assert {sample.text for sample in run.generate(prompts, tokens=1)} == {greedy.text}
  samples = run.generate(prompts, tokens=1, top_k=0)
  assert len({sample.text for sample in samples}) > 1
  assert list(run.completions(prompts, sampling.SamplingConfig(), tokens=1)) == samples
