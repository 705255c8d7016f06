"""The config.json of published checkpoints, as their authors ship them, is read as it is meant."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import errors, runs
from ngrammer_jax.interop.huggingface import configs, rotary_fields
from ngrammer_jax.models import language_model
from tests import checks

OPENED = (
  # llama
  'decapoda-llama-7b-hf',
  'vicuna-7b-delta-v0',
  'Wizard-Vicuna-30B-Uncensored',
  'pygmalion-7b-merged',
  'Llama-2-7b-hf',
  'ELYZA-japanese-Llama-2-13b-instruct',
  'CodeFuse-CodeLlama-34B',
  'Meta-Llama-3-8B',
  'Llama-3.2-3B-Instruct',
  'Llama-3.3-70B-Instruct',
  'unsloth-Llama-3.2-1B-Instruct',
  'TinyLlama-1.1B-Chat-v1.0',
  'SmolLM2-135M-Instruct-transformers5',
  'Yi-1.5-6B-Chat-slerp',
  'internlm-20b-llama',
  'granite-3b-code-instruct-128k',
  'Megrez-3B-Instruct',
  'ALLaM-7B-Instruct-preview',
  'deepseek-coder-1.3b-instruct',
  'Triangulum-10B',
  # mistral
  'Mistral-7B-v0.1-sharded',
  'Mistral-7B-Instruct-v0.2',
  'Mistral-7B-Instruct-v0.3-all-fields',
  'Dolphin3.0-R1-Mistral-24B',
  'Devstral-Small-2507',
  # qwen2
  'Qwen1.5-0.5B-Chat',
  'Qwen1.5-4B-Chat',
  'Qwen2-7B-Instruct',
  'Qwen2.5-3B',
  'Qwen2.5-7B-Instruct',
  'DeepSeek-R1-Distill-Qwen-32B',
  'cogito-v1-preview-qwen-14B',
  # qwen3
  'Qwen3-8B',
  'Qwen3-Embedding-0.6B',
  'Qwen3-0.6B-sft-layer_types',
  # gemma, gemma2, gemma3 and gemma3_text
  'gemma-2b',
  'gemma-2-2b-it',
  'gemma-3-4b-it',
  'medgemma-27b-it',
  'gemma-3-270m-it-unsloth',
  'gemma-3-270m-unsloth-fp16',
  # smollm3
  'SmolLM3-3B',
  # phi3
  'Phi-3-mini-4k-instruct',
  'Phi-3-mini-128k-instruct-april',
  'Phi-3-mini-128k-instruct',
  'Phi-3.5-mini-instruct',
  'phi-4',
  'Chocolatine-3B-slerp',
  # gpt2
  'gpt2-large',
  'gpt2-transformers4.57',
  'gpt2-medium',
  'distilgpt2',
  'gpt2-chinese',
  'DialoGPT-medium-finetuned',
  # gpt_neox
  'pythia-410m-classifier',
  'RedPajama-INCITE-7B-Base',
  'oasst-sft-1-pythia-12b',
)
QUANTIZED = 'the weights are quantised; use a model in bfloat16, float16 or float32'
REFUSED = {
  'orpheus-3b-0.1-ft-unsloth-bnb-4bit': f'is not supported for llama: {QUANTIZED}',
  'Qwen3-14B-MLX-4bit': f"'bits': 4}} are not supported for qwen3: {QUANTIZED}",
  # Its own Python code has other frequencies than transformers, and another attention factor.
  'Yarn-Mistral-7b-128k': 'finetuned is not supported for rope_type=yarn',
  # Somebody renamed the type from phi3.
  'Phi-4-mini-reasoning': 'auto_map names Python code for it, which is never run',
  # It is from before the field existed, and transformers does not guess it either.
  'distilgpt2-2019': 'add the model_type to the file',
}
# Found in public repositories besides: the opened ones have odd fields, or were missing above.
DRAWN = json.loads((checks.REFERENCE / 'hf' / 'drawn_configs.json').read_text())
DRAWN_REFUSED = {
  'CLEX-7B-16K': 'log_scale=False is not supported for llama',  # and rope_type='clex'
  'UrbanGPT-vicuna-7b-v1.5-16k': 'st_hidden_size=64, lin_hidden_size=128, time_steps=12, ',
  # A config.json that was merged with that of an adapter.
  'securix-Llama-2-7B-with-LoRA-fields': "bias='none', fan_in_fan_out=False",
}
APRIL = 'Phi-3-mini-128k-instruct-april'
# Folders of models whose arrays are stored, see `official_models`.
STORED = sorted(path.name for path in (checks.REFERENCE / 'hf').glob('published_*'))


def read_config(folder, name):
  """The content of a config.json, a drawn one or one in a folder."""
  if name in DRAWN:
    return DRAWN[name]
  return json.loads((folder / name / 'config.json').read_text())


def check_refused(config, message):
  """The config is refused with this message."""
  with pytest.raises(errors.BadInput) as error:
    configs.read(config).config()
  assert message in str(error.value)


def test_each_one_opens_or_is_refused_for_a_reason(published_configs):
  for name in OPENED:
    configs.read(read_config(published_configs, name)).config()
  for name, message in REFUSED.items():
    check_refused(read_config(published_configs, name), message)
  folders = {path.parent.name for path in published_configs.glob('*/config.json')}
  assert folders == {*OPENED, *REFUSED}


def test_drawn_ones():
  for name, message in DRAWN_REFUSED.items():
    check_refused(DRAWN[name], message)
  for name in DRAWN.keys() - DRAWN_REFUSED.keys():
    configs.read(DRAWN[name]).config()


def compute_logits(folder, ids, is_long=False):
  """The logits of texts in float64, maybe with the long factors of longrope."""
  run = runs.load_pretrained(folder, 'float64')
  config = dataclasses.replace(run.config.model, dtype='float64')
  if is_long:
    scaling = dataclasses.replace(config.positional.scaling, is_long=True)
    positional = dataclasses.replace(config.positional, scaling=scaling)
    config = dataclasses.replace(config, positional=positional)
  model = language_model.build(config, run.vocabulary_size)
  ids = jnp.asarray(ids, jnp.int32)
  starts = jnp.zeros(ids.shape, bool).at[:, 0].set(True)
  memory = model.empty_memory(len(ids))

  @jax.jit
  def apply(params):
    hidden, _, _ = model.apply({'params': params}, ids, memory, starts_BxT=starts)
    return model.apply({'params': params}, hidden, method='logits')

  return apply(run.state.params)


QUICK = ('published_gemma_3_unsloth', 'published_gpt2_medium', 'published_phi_3_5')


@pytest.mark.parametrize('name', checks.rest_is_full(STORED, QUICK))
def test_stored_models_equal_transformers(name, one_device, x64):
  folder = checks.REFERENCE / 'hf' / name
  expected = np.load(folder / 'expected.npz')
  logits = compute_logits(folder, expected['input_ids'])
  np.testing.assert_allclose(logits, expected['logits'], rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize('name', [*OPENED, *(name for name in DRAWN if name not in DRAWN_REFUSED)])
def test_a_small_model_equals_transformers(published_configs, name, one_device, x64, tmp_path):
  pytest.importorskip('transformers')
  from tests import official_models

  config = official_models.cut(read_config(published_configs, name))
  readable = config
  if name == APRIL:  # transformers 5.24 looks for the original length beside the factors only
    length = config[rotary_fields.ORIGINAL_LENGTH]
    scaling = config['rope_scaling'] | {rotary_fields.ORIGINAL_LENGTH: length}
    readable = config | {'rope_scaling': scaling}
  official_models.write_config(tmp_path, readable)
  ids = official_models.texts()
  with official_models.double_precision():
    model = official_models.build(tmp_path)
    expected = official_models.logits(model, ids)
  official_models.save(model, tmp_path, config)
  np.testing.assert_allclose(compute_logits(tmp_path, ids), expected, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_a_text_beyond_the_original_length(published_configs, one_device, x64, tmp_path):
  """Of a longrope, which then has its long factors for all tokens."""
  pytest.importorskip('transformers')
  from tests import official_models

  config = official_models.cut(read_config(published_configs, 'Phi-3.5-mini-instruct'))
  config |= {'num_hidden_layers': 1, 'sliding_window': None}
  official_models.write_config(tmp_path, config)
  ids = official_models.texts(config[rotary_fields.ORIGINAL_LENGTH] + 4)[:1]
  with official_models.double_precision():
    model = official_models.build(tmp_path)
    expected = official_models.logits(model, ids)
  official_models.save(model, tmp_path, config)
  logits = compute_logits(tmp_path, ids, is_long=True)
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-10)
