"""A published model beside Hugging Face Transformers: prefill, training steps and decoding.

  pip install torch transformers
  python -m benchmarks.against_peers --cases published_model --peer model=FOLDER

FOLDER holds a published model, such as SmolLM2-135M written by
`python -m ngrammer_jax.export --pretrained=smollm2_135m_instruct --format=huggingface`. Both
libraries read it, in float32, and attend in their usual way (eager in Transformers). A training
step has the AdamW of each library. The prefill returns the logits of the last token; decoding is
greedy, after a prompt of 16 tokens, with room for 512 tokens.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import itertools
import pathlib

import numpy as np

from benchmarks import paired

PROMPT, CONTEXT = 16, 512
PREFILL = 512
TRAINING = 2, 512  # rows and tokens of a step
DECODING = {'decode 1 row': (1, 32), 'decode 8 rows': (8, 16)}  # rows and new tokens


def sides(peers: Mapping[str, pathlib.Path]) -> dict[str, paired.Make]:
  """Returns the sides, see `paired.measure`."""
  if 'model' not in peers:
    raise SystemExit('published_model needs --peer model=FOLDER, see benchmarks/published_model.py')
  folder = peers['model']
  return {
    paired.OURS: functools.partial(make_jax, folder),
    'transformers': functools.partial(make_transformers, folder),
  }


def tokens_of(rows: int, count: int, vocabulary: int) -> np.ndarray:
  """Returns drawn ids, the same for both sides."""
  return np.random.default_rng(0).integers(0, vocabulary, (rows, count)).astype(np.int32)


def make_jax(folder: pathlib.Path) -> dict[str, Callable[[], int]]:
  """Returns the passes of ngrammer_jax."""
  import jax

  from ngrammer_jax import config as experiment
  from ngrammer_jax import runs, sharding
  from ngrammer_jax.data.rows import token_batch
  from ngrammer_jax.inference import sampling
  from ngrammer_jax.training import programs

  run = runs.load_pretrained(str(folder))
  engine = run.engine
  variables = run.variables
  V = run.model.vocabulary_size
  greedy = sampling.SamplingConfig(0.0)

  def generate(rows, prompt, count):
    prompts = list(tokens_of(rows, prompt, V))
    stream = engine.generate(variables, prompts, range(rows), greedy, CONTEXT, rows=rows)
    return sum(1 for _ in itertools.islice(stream, count))

  values = experiment.default()
  values.training.batch_size, values.training.segment_length = TRAINING
  resolved = experiment.resolve(values)
  # A scan over layers is slower than unrolled layers on a CPU.
  unrolled = dataclasses.replace(run.config.model, scan_layers=False)
  resolved = dataclasses.replace(resolved, model=unrolled)
  training = programs.Programs(resolved, V, sharding.make_mesh())
  tokens = tokens_of(TRAINING[0], TRAINING[1] + 1, V)[None]
  shape = tokens[..., 1:].shape
  segments = token_batch.Batch(
    tokens_BxT=tokens[..., :-1],
    targets_BxT=tokens[..., 1:],
    starts_BxT=np.zeros(shape, bool),
    valid_BxT=np.ones(shape, np.float32),
  )
  state = training.create()
  training.compile(state, segments)

  def train():
    nonlocal state
    state, metrics = training.call(state, segments, 1)
    assert np.isfinite(jax.device_get(metrics['loss'])).all()
    return 1

  passes = {'prefill 512': functools.partial(generate, 1, PREFILL - 1, 1), 'train 2 x 512': train}
  for name, (rows, count) in DECODING.items():
    passes[name] = functools.partial(generate, rows, PROMPT, count)
  return passes


def make_transformers(folder: pathlib.Path) -> dict[str, Callable[[], int]]:
  """Returns the passes of Transformers."""
  import torch
  import transformers

  transformers.logging.set_verbosity_error()
  load = transformers.AutoModelForCausalLM.from_pretrained
  model = load(folder, dtype=torch.float32, attn_implementation='eager')
  V = model.config.vocab_size
  optimizer = torch.optim.AdamW(model.parameters(), 1e-6, fused=True)
  tokens_for = lambda rows, count: torch.from_numpy(tokens_of(rows, count, V)).long()

  @torch.no_grad()
  def prefill():
    logits = model(tokens_for(1, PREFILL - 1), use_cache=True, logits_to_keep=1).logits
    assert np.isfinite(logits.max().item())
    return 1

  def train():
    tokens = tokens_for(TRAINING[0], TRAINING[1] + 1)
    optimizer.zero_grad(set_to_none=True)
    logits = model(tokens[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert np.isfinite(loss.item())
    return 1

  @torch.no_grad()
  def generate(rows, count):
    tokens = tokens_for(rows, PROMPT)
    options = {'max_new_tokens': count, 'min_new_tokens': count, 'do_sample': False}
    mask = torch.ones_like(tokens)
    model.generate(tokens, attention_mask=mask, pad_token_id=0, eos_token_id=None, **options)
    return count

  passes = {'prefill 512': prefill, 'train 2 x 512': train}
  for name, case in DECODING.items():
    passes[name] = functools.partial(generate, *case)
  return passes
