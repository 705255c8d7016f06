"""Training of a published model loses what the official model loses, step by step."""

import numpy as np
import pytest

from ngrammer_jax import runs
from ngrammer_jax.config import conversion
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.training import programs

STEPS, B, T = 20, 4, 24
SIZES = {
  'vocab_size': 96,
  'hidden_size': 32,
  'intermediate_size': 48,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'max_position_embeddings': 64,
}
ADAM = {'learning_rate': 0.01, 'beta1': 0.9, 'beta2': 0.95, 'epsilon': 1e-8}


def official_losses(torch, model, tokens):
  """The loss before each step of Adam."""
  betas = ADAM['beta1'], ADAM['beta2']
  options = {'lr': ADAM['learning_rate'], 'betas': betas, 'eps': ADAM['epsilon']}
  optimizer, losses = torch.optim.Adam(model.train().parameters(), **options), []
  for step in tokens:
    ids = torch.tensor(step)
    logits = model(ids[:, :-1]).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
  return losses


def losses_of(folder, tokens, mesh):
  """The same of our training step, from the weights in a folder."""
  run = runs.load_pretrained(folder)
  values = {
    'model': {**run.published.description.model, 'dtype': 'float32'},
    'training': {'steps': STEPS, 'batch_size': B, 'segment_length': T},
    'optimizer': {
      'learning_rate': ADAM['learning_rate'],
      'epsilon': ADAM['epsilon'],
      'schedule': 'constant',
      'warmup_steps': 0,
      'clip_norm': None,
      'adam': {'beta1': ADAM['beta1'], 'beta2': ADAM['beta2']},
    },
  }
  program = programs.Programs(conversion.resolve(values), SIZES['vocab_size'], mesh)
  state = program.create()
  state = state.replace(params=run.load(state.params))
  starts = np.broadcast_to(np.arange(T) == 0, (STEPS, B, T))
  inputs, targets = tokens[:, :, :-1], tokens[:, :, 1:]
  segments = token_batch.Batch(inputs, targets, starts, np.ones(inputs.shape, np.float32))
  program.compile(state, segments)
  _, metrics = program.call(state, segments, STEPS)
  return metrics['loss']


@pytest.mark.slow
def test_training_equals_that_of_the_official_code(tmp_path, one_device):
  transformers, torch = pytest.importorskip('transformers'), pytest.importorskip('torch')
  torch.manual_seed(0)
  config = transformers.LlamaConfig(**SIZES, initializer_range=0.2)
  model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager')
  model.save_pretrained(tmp_path / 'llama')
  # Half of the tokens repeat the one before, so that there is something to learn.
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, SIZES['vocab_size'], (STEPS, B, T + 1)).astype(np.int32)
  tokens[:, :, 1::2] = tokens[:, :, 0:-1:2]
  expected = official_losses(torch, model, tokens.astype(np.int64))
  assert expected[-1] < expected[0] - 0.5
  losses = losses_of(tmp_path / 'llama', tokens, runs.load_pretrained(tmp_path / 'llama').mesh)
  np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-4)
