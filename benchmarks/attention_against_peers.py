"""Speed of attention beside the official PyTorch code of two papers, at the same sizes.

  git clone https://github.com/facebookresearch/adaptive-span
  git clone https://github.com/kimiyoung/transformer-xl
  python -m benchmarks.attention_against_peers --peer adaptive-span=adaptive-span \\
    --peer transformer-xl=transformer-xl --json=attention_against_peers.json

Each side of a case is a process that answers a line on its standard input by one step and the
seconds that it took, wall and CPU. The sides take turns, in alternating order. A ratio is that of
the medians, the seconds of the peer divided by ours: above 1 ours is faster. Peers without a
folder are skipped. float32. Where other programs run too, use --cores=1 and compare CPU seconds:
threads of PyTorch that wait for each other count as busy.

  fixed_512, fixed_2048   training step: 4 layers of width 256, 4 rows of 512 tokens, memory 512 or
                          2,048, without learned spans
  adaptive_8192           the same with learned spans of 314 tokens in the mean, of at most 8,192
  xl_train, xl_evaluate   Transformer-XL of --layers layers of width 512, 8 rows of 128 tokens after
                          a memory of 128: training step, and losses of a segment
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np

OURS, ADAPTIVE_SPAN, TRANSFORMER_XL = 'ngrammer_jax', 'adaptive-span', 'transformer-xl'
PEERS = {
  'fixed_512': ADAPTIVE_SPAN,
  'fixed_2048': ADAPTIVE_SPAN,
  'adaptive_8192': ADAPTIVE_SPAN,
  'xl_train': TRANSFORMER_XL,
  'xl_evaluate': TRANSFORMER_XL,
}
V, LIMIT, RAMP = 205, 8192, 32
SPAN_SHAPE, SPAN_LAYERS, SPAN_WIDTH, SPAN_HEADS = (4, 512), 4, 256, 4
XL_SHAPE, XL_MEMORY, XL_WIDTH, XL_HEADS = (8, 128), 128, 512, 8


def mean_spans():
  """Returns spans [layers, heads] of 314 tokens in the mean: most are short, a few long."""
  spans = np.exp(1.5 * np.random.default_rng(0).normal(size=(SPAN_LAYERS, SPAN_HEADS)))
  return np.minimum(314 * spans / spans.mean(), LIMIT)


def measure(
  case: str, peers: dict[str, str], rounds: int = 7, layers: int = 12, cores: int | None = None
) -> dict[str, dict]:
  """Returns the seconds of the sides of a case, by side, and the ratio to the peer.

  Args:
    case: a key of PEERS.
    peers: folders of the peers, by name; a peer without one is skipped.
    rounds: number of measured steps of each side.
    layers: number of layers of the Transformer-XL.
    cores: number of cores of each side. None: all.
  """
  sides = {OURS: ''} | {name: peers[name] for name in (PEERS[case],) if name in peers}
  seconds = {side: [] for side in sides}
  with contextlib.ExitStack() as stack:
    workers = {
      side: stack.enter_context(_worker(case, f'{side}={folder}', layers, cores))
      for side, folder in sides.items()
    }
    for number in range(rounds):
      for side in list(workers)[:: 1 if number % 2 else -1]:
        seconds[side].append(_ask(workers[side]))
  result = {}
  for side, values in seconds.items():
    wall, cpu = np.array(values).T
    result[side] = {
      'wall_median': float(np.median(wall)),
      'wall_best': float(wall.min()),
      'cpu_median': float(np.median(cpu)),
    }
  if len(result) == 2:
    ours, other = (result[side] for side in sides)
    result['ratio'] = {key: other[key] / ours[key] for key in ours}
  return result


@contextlib.contextmanager
def _worker(case, side, layers, cores):
  """Starts a side, NAME=FOLDER, of a case, waits until it is ready, and ends it."""
  module = 'benchmarks.attention_against_peers'
  command = [sys.executable, '-m', module, f'--worker={side}', f'--cases={case}']
  command += [f'--layers={layers}', *([] if cores is None else [f'--cores={cores}'])]
  process = subprocess.Popen(
    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
  )
  try:
    if process.stdout.readline() != 'ready\n':
      raise RuntimeError(f'{side} does not run {case}: see its message above')
    yield process
  finally:
    process.stdin.close()
    process.wait()


def _ask(process):
  """Returns the wall and CPU seconds of one step of a worker."""
  process.stdin.write('step\n')
  return json.loads(process.stdout.readline())


def work(case: str, side: str, folder: str, layers: int) -> None:
  """Answers every line of the standard input by one step."""
  makers = {OURS: make_ours, ADAPTIVE_SPAN: make_adaptive_span, TRANSFORMER_XL: make_transformer_xl}
  run = makers[side](case, folder, layers)
  for _ in range(3):
    run()
  print('ready', flush=True)
  for _ in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), flush=True)


def make_ours(case, folder, layers):
  """Returns a function that does one step of a case with this library."""
  del folder
  from benchmarks import span_cost
  from ngrammer_jax.config import model as model_config

  if case.startswith('fixed'):
    return span_cost.trainer(span_cost.make_model(int(case.removeprefix('fixed_'))))
  if case == 'adaptive_8192':
    span = model_config.SpanConfig(limit=LIMIT, ramp=RAMP)
    return span_cost.trainer(span_cost.make_model(LIMIT, span), mean_spans())
  config = model_config.ModelConfig(
    layers=layers,
    width=XL_WIDTH,
    heads=XL_HEADS,
    feed_forward_width=4 * XL_WIDTH,
    activation='relu',
    gated=False,
    feed_forward_bias=True,
    norm='post_skip',
    final_norm=False,
    position='relative',
    memory=model_config.MemoryConfig(XL_MEMORY, 'zeros'),
  )
  config.check()
  return (_xl_trainer if case == 'xl_train' else _xl_evaluator)(config)


def _xl_trainer(config):
  from benchmarks import span_cost
  from ngrammer_jax.models import language_model

  model = language_model.build(config, V)
  return span_cost.trainer(model, shape=XL_SHAPE, algorithm='adam')


def _xl_evaluator(config):
  import jax

  from benchmarks import span_cost
  from ngrammer_jax.models import language_model

  model = language_model.build(config, V)
  params, tokens = span_cost.make_params(model), np.zeros(XL_SHAPE, np.int32)
  holder = [language_model.empty_memory(config, XL_SHAPE[0], XL_MEMORY)]

  def losses(params, memory):
    hidden, memory, _ = model.apply({'params': params}, tokens, memory)
    return model.apply({'params': params}, hidden, tokens, method='scores'), memory

  losses = jax.jit(losses, donate_argnums=1)

  def run():
    _, holder[0] = jax.block_until_ready(losses(params, holder[0]))

  return run


def make_adaptive_span(case, folder, layers):
  """Returns a function that trains one step of a case with the code of Facebook."""
  del layers
  sys.path.insert(0, folder)
  from adagrad_with_grad_clip import AdagradWithGradClip
  import models
  import torch

  is_adaptive, length = case.startswith('adaptive'), int(case.split('_')[1])
  span_params = {
    'adapt_span_enabled': is_adaptive,
    'adapt_span_loss': 0.0,
    'adapt_span_ramp': RAMP,
    'adapt_span_init': 0.0,
    'adapt_span_cache': True,
  }
  model = models.TransformerSeq(
    vocab_size=V,
    hidden_size=SPAN_WIDTH,
    nb_heads=SPAN_HEADS,
    nb_layers=SPAN_LAYERS,
    attn_span=length,
    emb_dropout=0.0,
    adapt_io_params={'adapt_io_enabled': False},
    dropout=0.0,
    inner_hidden_size=4 * SPAN_WIDTH,
    adapt_span_params=span_params,
    pers_mem_params={'pers_mem_size': 0},
  )
  if is_adaptive:
    for layer, spans in zip(model.layers, mean_spans(), strict=True):
      values = torch.tensor(spans / LIMIT, dtype=torch.float32)
      layer.attn.attn.adaptive_span._mask.current_val.data = values[:, None, None]
  sizes = [layer.attn.attn.get_cache_size() for layer in model.layers]
  holder = [[torch.zeros(SPAN_SHAPE[0], size, SPAN_WIDTH) for size in sizes]]
  optimizer = AdagradWithGradClip(model.parameters(), lr=1e-6, grad_clip=0.03)
  tokens = torch.randint(V, (SPAN_SHAPE[0], SPAN_SHAPE[1] + 1))

  def run():
    optimizer.zero_grad()
    log_probs, holder[0], _ = model(tokens[:, :-1], holder[0])
    targets = tokens[:, 1:].reshape(-1)
    torch.nn.functional.nll_loss(log_probs.view(-1, V), targets).backward()
    optimizer.step()

  return run


def make_transformer_xl(case, folder, layers):
  """Returns a function that does one step of a case with the code of the Transformer-XL."""
  import torch

  code = pathlib.Path(folder, 'pytorch')
  sys.path[:0] = [str(code), str(code / 'utils')]
  torch.Tensor.byte = torch.Tensor.bool  # its masks are bytes, which PyTorch no longer supports
  import mem_transformer

  sizes = {'tgt_len': XL_SHAPE[1], 'ext_len': 0, 'mem_len': XL_MEMORY}
  arguments = V, layers, XL_HEADS, XL_WIDTH, XL_WIDTH // XL_HEADS, 4 * XL_WIDTH, 0.0, 0.0
  model = mem_transformer.MemTransformerLM(*arguments, **sizes)
  for param in model.parameters():
    torch.nn.init.normal_(param, 0.0, 0.02)
  optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
  tokens, holder = torch.randint(V, (XL_SHAPE[1] + 1, XL_SHAPE[0])), [()]

  def train():
    model.zero_grad()
    losses, *holder[0] = model(tokens[:-1], tokens[1:], *holder[0])
    losses.mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()

  def evaluate():
    with torch.no_grad():
      _, *holder[0] = model(tokens[:-1], tokens[1:], *holder[0])

  if case == 'xl_train':
    return train
  model.eval()
  return evaluate


def main() -> None:
  """Prints a table; with --json also writes it."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--cases', nargs='+', choices=PEERS, default=list(PEERS))
  parser.add_argument('--peer', action='append', default=[], help='NAME=FOLDER')
  parser.add_argument('--rounds', type=int, default=7)
  parser.add_argument('--layers', type=int, default=12, help='of the Transformer-XL')
  parser.add_argument('--cores', type=int, help='of each side; all by default')
  parser.add_argument('--json', type=pathlib.Path, help='output file')
  parser.add_argument('--worker', help=argparse.SUPPRESS)
  options = parser.parse_args()
  peers = dict(peer.split('=', 1) for peer in options.peer)
  if options.worker:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    work(options.cases[0], *options.worker.split('=', 1), options.layers)
    return
  result = {}
  for case in options.cases:
    result[case] = measure(case, peers, options.rounds, options.layers, options.cores)
    for side, values in result[case].items():
      numbers = ''.join(f'{value:12.3f}' for value in values.values())
      print(f'{case:<16}{side:<16}{numbers}', flush=True)
  if options.json:
    options.json.write_text(json.dumps(result, indent=2) + '\n')


if __name__ == '__main__':
  main()
