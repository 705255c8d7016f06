"""Training attention LSTMs: tokens per second here and of the same models in PyTorch.

  python benchmarks/attention_lstm.py --rows lstm key_value_predict --words=77000

Rows of configs/attention_lstm.py at the paper's sizes, 64 streams of 20 tokens, random ones, Adam,
gradients clipped by their norm, float32, on the same cores. Our step is that of the trainer, with
documents that begin within a segment; PyTorch's `nn.LSTM` cannot be reset there and has one for
each segment. Both are run in turn; a ratio is the median over rounds of that of neighbours in time.
Needs `pip install torch`.
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
from ngrammer_jax.data import streams
from ngrammer_jax.training import programs

CONFIGS = pathlib.Path(__file__).parents[1] / 'configs' / 'attention_lstm.py'
STEPS = 2  # of one measurement


class Ours:
  """The trainer's steps of a row."""

  def __init__(self, config: experiment.Config, V: int, tokens_BxT: np.ndarray):
    self._run = programs.Programs(config, V, sharding.make_mesh())
    self._state = self._run.create()
    B, T = tokens_BxT.shape
    tokens = np.broadcast_to(tokens_BxT, (STEPS, B, T))
    starts = np.random.default_rng(1).random((STEPS, B, T)) < 0.01
    segment = streams.Segment(tokens, tokens, starts, np.ones(tokens.shape, np.float32))
    rows = lambda wanted: streams.map_segments(lambda array: array[:, wanted], segment)
    self._segments = sharding.global_rows(self._run.mesh, B, rows, axis=1)
    self._run.compile(self._state, self._segments)

  def steps(self) -> float:
    """Makes them; the loss of the last."""
    self._state, metrics, _ = self._run.call(self._state, self._segments, 0)
    return float(metrics['loss'][-1])


class Readout(nn.Module):
  """The same readouts as in `layers`, at the beginning of a segment with nothing before."""

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
    """[B, T, K] to [B, T, J]."""
    r, (B, T, _), J = self.r, h.shape, self.r.width
    if r.readout == 'none':
      return h
    if r.readout == 'recurrent_memory':
      return self._remember(h, tokens)
    pad = lambda x, slots: torch.cat([x.new_zeros(B, slots, x.shape[2]), x], dim=1)
    if r.readout == 'ngram':
      padded = pad(h, r.slices - 1)
      back = lambda s: padded[:, r.slices - 1 - s : r.slices - 1 - s + T, s * J : (s + 1) * J]
      return torch.tanh(self.slices(torch.cat([back(s) for s in range(r.slices)], dim=2)))
    L, keys, values = r.window, h[..., :J], h[..., : 2 * J][..., -J:]
    windows = lambda x: pad(x, L)[:, :-1].unfold(1, L, 1)  # [B, T, J, L]
    key = windows(self.maps['key'](keys))
    scores = torch.einsum(
      'btjl,j->btl', torch.tanh(key + self.maps['query'](keys)[..., None]), self.score
    )
    weights = softmax(scores, -L)
    read = torch.einsum('btjl,btl->btj', windows(values), weights)
    return torch.tanh(self.maps['read'](read) + self.maps['predict'](h[..., -J:]))

  def _remember(self, h, tokens):
    L = self.r.window
    words = [nn.functional.pad(of(tokens), (0, 0, L - 1, 0)).unfold(1, L, 1) for of in self.words]
    weights = softmax(torch.einsum('btjl,btj->btl', words[0] + self.temporal, h), 1 - L)
    s = torch.einsum('btjl,btl->btj', words[1], weights)
    of_s, of_h = self.gates[:3], self.gates[3:]
    z, q = (torch.sigmoid(of_s[i](s) + of_h[i](h)) for i in range(2))
    return (1 - z) * h + z * torch.tanh(of_s[2](s) + of_h[2](q * h))


def softmax(scores: torch.Tensor, first: int) -> torch.Tensor:
  """Over the slots [B, T, L] of tokens that are there; the first token's first slot is `first`."""
  T, L = scores.shape[1:]
  there = torch.arange(T)[:, None] + torch.arange(first, first + L) >= 0
  return torch.softmax(scores.masked_fill(~there, -1e30), dim=-1) * there


class Theirs:
  """The same steps in PyTorch."""

  def __init__(self, config: experiment.Config, V: int, tokens_BxT: np.ndarray, fused: bool):
    r, width = config.model.recurrent, config.model.width
    cell = {'lstm': nn.LSTM, 'rnn': nn.RNN}[r.cell]
    self._recurrence = cell(width, r.hidden, batch_first=True)
    self._rest = nn.ModuleList([nn.Embedding(V, width), Readout(r, V), nn.Linear(r.width, V)])
    self._parameters = [*self._recurrence.parameters(), *self._rest.parameters()]
    self._adam = torch.optim.Adam(self._parameters, config.optimizer.learning_rate, fused=fused)
    self._tokens = torch.from_numpy(tokens_BxT.astype(np.int64))
    self._state = None

  def steps(self) -> float:
    """Makes them; the loss of the last."""
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


def seconds(of: Ours | Theirs) -> float:
  """Of the steps."""
  began = time.perf_counter()
  assert np.isfinite(of.steps())
  return time.perf_counter() - began


def main() -> None:
  """Prints a table, and writes it as JSON where asked."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  rows = ['lstm', 'attention', 'key_value', 'key_value_predict', '4gram']
  parser.add_argument('--rows', nargs='+', default=rows, help='of the config')
  parser.add_argument('--words', type=int, default=77_000, help='of the vocabulary')
  parser.add_argument('--chunk', type=int, help='words in a chunk of our softmax; 0: all at once')
  parser.add_argument('--fused', action='store_true', help="PyTorch's Adam in one kernel")
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--json', type=pathlib.Path, help='where to write the result')
  options = parser.parse_args()
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  made, taken = {}, {}
  for row in options.rows:
    config = runpy.run_path(str(CONFIGS))['get_config'](row)
    config.training.segments_per_call = STEPS
    if options.chunk is not None:
      config.model.vocabulary_chunk = options.chunk or None
    config = experiment.resolve(config)
    t = config.training
    shape = t.batch_size, t.segment_length
    tokens = np.random.default_rng(0).integers(0, options.words, shape, np.int32)
    made[row, Ours] = Ours(config, options.words, tokens)
    made[row, Theirs] = Theirs(config, options.words, tokens, options.fused)
    for kind in (Ours, Theirs):
      seconds(made[row, kind])  # the first may still load what was compiled
      taken[row, kind] = []
  for _ in range(options.rounds):
    for which, of in made.items():
      taken[which].append(seconds(of))
  first = np.array(taken[options.rows[0], Ours])
  print(
    f'{options.words:,} words, {jax.devices()[0].device_kind}, {torch.get_num_threads()} threads'
  )
  print(f'{"row":<20}{"tokens/s":>10}{"PyTorch":>10}{"ratio":>8}  step over {options.rows[0]}')
  result = {}
  for row in options.rows:
    ours, theirs = (np.array(taken[row, kind]) for kind in (Ours, Theirs))
    tokens = STEPS * np.prod(shape)
    result[row] = {
      'tokens_per_second': tokens / np.median(ours),
      'pytorch': tokens / np.median(theirs),
      'ratio': float(np.median(theirs / ours)),
      'step': float(np.median(ours / first)),
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
