"""Training step of the adaptive-span paper, beside the official PyTorch code.

4 layers of width 256, 4 rows of 512 tokens, Adagrad with clipped gradients, float32.

  fixed_512, fixed_2048   a memory of 512 or 2,048, without learned spans
  adaptive_8192           learned spans of 314 tokens in the mean, of at most 8,192
"""

from collections.abc import Callable, Mapping
import functools
import pathlib

import numpy as np

from benchmarks import paired

PEER = 'adaptive-span'
PASSES = {'fixed_512': 512, 'fixed_2048': 2048, 'adaptive_8192': 8192}
RAMP = 32
# As in `benchmarks.span_cost`, which imports JAX.
V, B, T, LAYERS, WIDTH, HEADS = 205, 4, 512, 4, 256, 4


def sides(peers: Mapping[str, pathlib.Path]) -> dict[str, paired.Make]:
  """Returns the sides, see `paired.measure`."""
  return {paired.OURS: make_jax, PEER: functools.partial(make_torch, peers.get(PEER))}


def mean_spans(limit: int) -> np.ndarray:
  """Returns spans [layers, heads] of 314 tokens in the mean: most are short, a few long."""
  spans = np.exp(1.5 * np.random.default_rng(0).normal(size=(LAYERS, HEADS)))
  return np.minimum(314 * spans / spans.mean(), limit)


def make_jax() -> dict[str, Callable[[], None]]:
  """Returns the passes of this library."""
  from benchmarks import span_cost
  from ngrammer_jax.config import model as model_config

  def make(name, limit):
    if name.startswith('fixed'):
      return span_cost.trainer(span_cost.make_model(limit))
    span = model_config.SpanConfig(limit=limit, ramp=RAMP)
    return span_cost.trainer(span_cost.make_model(limit, span), mean_spans(limit))

  return {name: make(name, limit) for name, limit in PASSES.items()}


def make_torch(folder: pathlib.Path | None) -> dict[str, Callable[[], None]]:
  """Returns the passes of the official code in a folder."""
  paired.import_from(PEER, folder)
  from adagrad_with_grad_clip import AdagradWithGradClip
  import models
  import torch

  def make_model(name, limit):
    is_adaptive = name.startswith('adaptive')
    span_params = {
      'adapt_span_enabled': is_adaptive,
      'adapt_span_loss': 0.0,
      'adapt_span_ramp': RAMP,
      'adapt_span_init': 0.0,
      'adapt_span_cache': True,
    }
    model = models.TransformerSeq(
      vocab_size=V,
      hidden_size=WIDTH,
      nb_heads=HEADS,
      nb_layers=LAYERS,
      attn_span=limit,
      emb_dropout=0.0,
      adapt_io_params={'adapt_io_enabled': False},
      dropout=0.0,
      inner_hidden_size=4 * WIDTH,
      adapt_span_params=span_params,
      pers_mem_params={'pers_mem_size': 0},
    )
    if is_adaptive:
      for layer, spans in zip(model.layers, mean_spans(limit), strict=True):
        values = torch.tensor(spans / limit, dtype=torch.float32)
        layer.attn.attn.adaptive_span._mask.current_val.data = values[:, None, None]
    return model

  def make(name, limit):
    model = make_model(name, limit)
    sizes = [layer.attn.attn.get_cache_size() for layer in model.layers]
    cache = [torch.zeros(B, size, WIDTH) for size in sizes]
    optimizer = AdagradWithGradClip(model.parameters(), lr=1e-6, grad_clip=0.03)
    tokens = torch.randint(V, (B, T + 1))

    def run():
      nonlocal cache
      optimizer.zero_grad()
      log_probs, cache, _ = model(tokens[:, :-1], cache)
      targets = tokens[:, 1:].reshape(-1)
      torch.nn.functional.nll_loss(log_probs.view(-1, V), targets).backward()
      optimizer.step()

    return run

  return {name: make(name, limit) for name, limit in PASSES.items()}
