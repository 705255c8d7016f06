"""Training speed of attention LSTMs, compared with the same models in PyTorch.

  python benchmarks/attention_lstm.py --rows lstm key_value_predict --words=77000

Trains variants of configs/attention_lstm.py at the paper's sizes: 64 streams of 20 random tokens,
Adam, gradients clipped by their norm, float32, on the same cores. The JAX step is the step of the
trainer, with document starts within a segment; PyTorch's `nn.LSTM` cannot be reset there, so
each segment is one document. Both run in turn; a ratio is the median over rounds of the ratio of
consecutive measurements. Needs `pip install torch`.
"""

import argparse
import json
import os
import pathlib
import runpy
import time

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import numpy as np
import torch
from torch import nn

from ngrammer_jax import config as experiment
from ngrammer_jax import sharding
from ngrammer_jax.config import recurrent as recurrent_config
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.training import programs

CONFIGS = pathlib.Path(__file__).parents[1] / 'configs' / 'attention_lstm.py'
STEPS = 2  # training steps per measurement


class JaxTraining:
  """The steps of the trainer."""

  def __init__(self, config: experiment.Config, V: int, tokens_BxT: np.ndarray):
    self._run = programs.Programs(config, V, sharding.make_mesh())
    self._state = self._run.create()
    B, T = tokens_BxT.shape
    tokens = np.broadcast_to(tokens_BxT, (STEPS, B, T))
    starts = np.random.default_rng(1).random((STEPS, B, T)) < 0.01
    segment = token_batch.Batch(tokens, tokens, starts, np.ones(tokens.shape, np.float32))
    load = lambda rows: token_batch.map_batches(lambda array: array[:, rows], segment)
    self._segments = sharding.global_rows(self._run.mesh, B, load, axis=1)
    self._run.compile(self._state, self._segments)

  def train(self) -> float:
    """Trains STEPS steps and returns the last loss."""
    self._state, metrics = self._run.call(self._state, self._segments, STEPS)
    return float(metrics['loss'][-1])


class Readout(nn.Module):
  """The readouts of `layers`, for the first segment of a stream."""

  def __init__(self, r: recurrent_config.RecurrentConfig, V: int):
    super().__init__()
    J = r.width
    self.r = r
    if r.readout == 'recurrent_memory':
      self.words = nn.ModuleList([nn.Embedding(V, J), nn.Embedding(V, J)])
      self.temporal = nn.Parameter(torch.empty(J, r.window).uniform_(-0.1, 0.1))
      self.gates = nn.ModuleList([nn.Linear(J, J, bias=False) for _ in range(6)])
    elif r.readout == 'ngram':
      self.slices = nn.Linear(r.hidden, J, bias=False)
    elif r.readout in recurrent_config.ATTENTION:
      names = ('key', 'query', 'read', 'predict')
      self.maps = nn.ModuleDict({name: nn.Linear(J, J, bias=False) for name in names})
      self.score = nn.Parameter(torch.empty(J).uniform_(-0.1, 0.1))

  def forward(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Maps outputs [B, T, K] to [B, T, J]."""
    r, (B, T, _), J = self.r, h.shape, self.r.width
    if r.readout == 'none':
      return h
    if r.readout == 'recurrent_memory':
      return self._recurrent_memory(h, tokens)
    pad = lambda x, slots: torch.cat([x.new_zeros(B, slots, x.shape[2]), x], dim=1)
    if r.readout == 'ngram':
      padded = pad(h, r.slices - 1)
      slice_of = lambda s: padded[:, r.slices - 1 - s : r.slices - 1 - s + T, s * J : (s + 1) * J]
      return torch.tanh(self.slices(torch.cat([slice_of(s) for s in range(r.slices)], dim=2)))
    L = r.window
    keys = h[..., :J]
    values = h[..., : 2 * J][..., -J:]
    windows = lambda x: pad(x, L)[:, :-1].unfold(1, L, 1)  # [B, T, J, L]
    key = windows(self.maps['key'](keys))
    scores = torch.einsum(
      'btjl,j->btl', torch.tanh(key + self.maps['query'](keys)[..., None]), self.score
    )
    weights = softmax(scores, -L)
    read = torch.einsum('btjl,btl->btj', windows(values), weights)
    return torch.tanh(self.maps['read'](read) + self.maps['predict'](h[..., -J:]))

  def _recurrent_memory(self, h, tokens):
    L = self.r.window
    pad = lambda x: nn.functional.pad(x, (0, 0, L - 1, 0))
    words = [pad(embedding(tokens)).unfold(1, L, 1) for embedding in self.words]
    weights = softmax(torch.einsum('btjl,btj->btl', words[0] + self.temporal, h), 1 - L)
    s = torch.einsum('btjl,btl->btj', words[1], weights)
    s_maps = self.gates[:3]
    h_maps = self.gates[3:]
    z, q = (torch.sigmoid(s_maps[i](s) + h_maps[i](h)) for i in range(2))
    return (1 - z) * h + z * torch.tanh(s_maps[2](s) + h_maps[2](q * h))


def softmax(scores: torch.Tensor, first: int) -> torch.Tensor:
  """Softmax over the slots [B, T, L] of existing tokens.

  `first` is the position of the first slot of the first token, negative before the segment.
  """
  T, L = scores.shape[1:]
  exists = torch.arange(T)[:, None] + torch.arange(first, first + L) >= 0
  return torch.softmax(scores.masked_fill(~exists, -1e30), dim=-1) * exists


class TorchTraining:
  """The same steps in PyTorch."""

  def __init__(self, config: experiment.Config, V: int, tokens_BxT: np.ndarray, fused: bool):
    r = config.model.recurrent
    width = config.model.width
    cell = {'lstm': nn.LSTM, 'rnn': nn.RNN}[r.cell]
    self._recurrence = cell(width, r.hidden, batch_first=True)
    self._rest = nn.ModuleList([nn.Embedding(V, width), Readout(r, V), nn.Linear(r.width, V)])
    self._parameters = [*self._recurrence.parameters(), *self._rest.parameters()]
    self._adam = torch.optim.Adam(self._parameters, config.optimizer.learning_rate, fused=fused)
    self._tokens = torch.from_numpy(tokens_BxT.astype(np.int64))
    self._state = None

  def train(self) -> float:
    """Trains STEPS steps and returns the last loss."""
    embedding, readout, output = self._rest
    for _ in range(STEPS):
      h, state = self._recurrence(embedding(self._tokens), self._state)
      self._state = jax.tree.map(lambda part: part.detach(), state)
      logits = output(readout(h, self._tokens))
      loss = nn.functional.cross_entropy(logits.flatten(0, 1), self._tokens.flatten())
      self._adam.zero_grad()
      loss.backward()
      nn.utils.clip_grad_norm_(self._parameters, 5.0)
      self._adam.step()
    return float(loss.detach())


def measure(training: JaxTraining | TorchTraining) -> float:
  """Returns the seconds of one measurement."""
  start = time.perf_counter()
  assert np.isfinite(training.train())
  return time.perf_counter() - start


def main() -> None:
  """Prints a table; with --json also writes it."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  rows = ['lstm', 'attention', 'key_value', 'key_value_predict', '4gram']
  parser.add_argument('--rows', nargs='+', default=rows, help='variants of the config')
  parser.add_argument('--words', type=int, default=77_000, help='size of the vocabulary')
  parser.add_argument(
    '--chunk', type=int, help='vocabulary_chunk of the JAX softmax; 0 for no chunks'
  )
  parser.add_argument('--fused', action='store_true', help="use PyTorch's fused Adam")
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--json', type=pathlib.Path, help='output file')
  options = parser.parse_args()
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  trainings = {}
  times = {}
  for row in options.rows:
    config = runpy.run_path(str(CONFIGS))['get_config'](row)
    config.training.segments_per_call = STEPS
    if options.chunk is not None:
      config.model.vocabulary_chunk = options.chunk or None
    config = experiment.resolve(config)
    t = config.training
    shape = t.batch_size, t.segment_length
    tokens = np.random.default_rng(0).integers(0, options.words, shape, np.int32)
    trainings[row, JaxTraining] = JaxTraining(config, options.words, tokens)
    trainings[row, TorchTraining] = TorchTraining(config, options.words, tokens, options.fused)
    for kind in (JaxTraining, TorchTraining):
      measure(trainings[row, kind])  # the first measurement is a warm-up
      times[row, kind] = []
  for _ in range(options.rounds):
    for key, training in trainings.items():
      times[key].append(measure(training))
  first = np.array(times[options.rows[0], JaxTraining])
  print(
    f'{options.words:,} words, {jax.devices()[0].device_kind}, {torch.get_num_threads()} threads'
  )
  print(f'{"row":<20}{"tokens/s":>10}{"PyTorch":>10}{"ratio":>8}  step over {options.rows[0]}')
  result = {}
  for row in options.rows:
    jax_times, torch_times = (np.array(times[row, kind]) for kind in (JaxTraining, TorchTraining))
    tokens = STEPS * np.prod(shape)
    result[row] = {
      'tokens_per_second': tokens / np.median(jax_times),
      'pytorch': tokens / np.median(torch_times),
      'ratio': float(np.median(torch_times / jax_times)),
      'step': float(np.median(jax_times / first)),
    }
    r = result[row]
    print(
      f'{row:<20}{r["tokens_per_second"]:>10,.0f}{r["pytorch"]:>10,.0f}{r["ratio"]:>8.2f}'
      f'{r["step"]:>8.2f}'
    )
  if options.json:
    options.json.write_text(json.dumps({'words': options.words, 'rows': result}, indent=2) + '\n')


if __name__ == '__main__':
  main()
