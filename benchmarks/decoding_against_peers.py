"""Greedy decoding, token by token, beside the GPT-2 of Hugging Face Transformers.

Both models have 3 blocks of width 192, 6 heads, 4,096 tokens and random weights, and start from one
token. Ours is the model of configs/quickstart.py without its n-gram memory, with a gated
feed-forward of 512; GPT-2 has one of 768 without a gate, and as many parameters. Transformers is
measured with one thread (faster for such small products) and with all threads.
"""

from collections.abc import Callable
import functools
import itertools

import numpy as np

from benchmarks import dense_step, paired

# Rows and new tokens; all contexts have room for 1,024 tokens but the first two.
CASES = {'1 row x 128': (1, 127, 128), '8 rows x 128': (8, 127, 128)}
LONG_CASES = {'8 rows x 1,024': (8, 400, 1024)}


def sides(is_quick: bool = False) -> dict[str, paired.Make]:
  """Returns the sides, see `paired.measure`; if `is_quick`, without long contexts and threads."""
  cases = CASES if is_quick else CASES | LONG_CASES
  result = {
    paired.OURS: functools.partial(make_jax, cases),
    'transformers, 1 thread': functools.partial(make_transformers, 1, cases),
  }
  if not is_quick:
    result['transformers'] = functools.partial(make_transformers, None, cases)
  return result


def make_jax(cases: dict[str, tuple[int, int, int]]) -> dict[str, Callable[[], int]]:
  """Returns the passes of our model."""
  from flax import linen as nn
  import jax

  from ngrammer_jax import sharding
  from ngrammer_jax.inference import engine as inference
  from ngrammer_jax.inference import sampling
  from ngrammer_jax.models import language_model

  config = dense_step.experiment_config(1)
  model = language_model.build(config.model, config.data.vocabulary_size)
  memory = language_model.empty_memory(config.model, 1)
  tokens = np.zeros((1, 1), np.int32)
  variables = nn.unbox(jax.jit(model.init)(jax.random.key(0), tokens, memory))
  engine = inference.Engine(model, sharding.make_mesh())
  variables = engine.prepare({'params': variables['params'], 'codebook': {}})

  def generate(rows, count, context):
    greedy = sampling.SamplingConfig(0.0)
    prompts = [np.array([0])] * rows
    stream = engine.generate(variables, prompts, range(rows), greedy, context, rows=rows)
    return sum(1 for _ in itertools.islice(stream, count))

  return {name: functools.partial(generate, *case) for name, case in cases.items()}


def make_transformers(
  threads: int | None, cases: dict[str, tuple[int, int, int]]
) -> dict[str, Callable[[], int]]:
  """Returns the passes of GPT-2."""
  import torch
  import transformers

  transformers.logging.set_verbosity_error()
  if threads is not None:
    torch.set_num_threads(threads)
  sizes = {'n_embd': 192, 'n_layer': 3, 'n_head': 6, 'n_inner': 768, 'n_positions': 1024}
  model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=4096, **sizes)).eval()

  @torch.no_grad()
  def generate(rows, count, context):
    del context  # its cache grows
    tokens = torch.zeros((rows, 1), dtype=torch.long)
    options = {'max_new_tokens': count, 'min_new_tokens': count, 'do_sample': False}
    mask = torch.ones_like(tokens)
    model.generate(tokens, attention_mask=mask, pad_token_id=1, eos_token_id=None, **options)
    return count

  return {name: functools.partial(generate, *case) for name, case in cases.items()}
