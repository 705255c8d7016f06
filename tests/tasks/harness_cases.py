"""Tiny published models, and requests of lm_eval to them, all drawn from a seed."""

from collections.abc import Iterator
import dataclasses
import itertools
import json
import pathlib
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.numpy

from ngrammer_jax.inference import padding
from tests import checks, tiny_tokenizers

STORED = checks.REFERENCE / 'lm_eval_hf.json'  # answers of `hf` to requests of the quick tests
STORED_SLICE = (2, None, 9)  # every ninth request: there are some of each model and kind
TOLERANCE = 1e-4  # of log-likelihoods, and of logits that are as good as equal
POSITIONS = 32  # of the models; some contexts are longer
VOCABULARY_SIZE = 320  # of all models, so that they share compiled programs
WIDTH = 16
CONFIG = {
  'architectures': ['LlamaForCausalLM'],
  'model_type': 'llama',
  'hidden_size': WIDTH,
  'intermediate_size': 24,
  'num_hidden_layers': 2,
  'num_attention_heads': 2,
  'num_key_value_heads': 1,
  'head_dim': 8,
  'vocab_size': VOCABULARY_SIZE,
  'max_position_embeddings': POSITIONS,
  'rms_norm_eps': 1e-5,
  'hidden_act': 'silu',
  'tie_word_embeddings': False,
  'torch_dtype': 'float32',
  'rope_theta': 10000.0,
  'bos_token_id': None,
  'eos_token_id': 2,
}
# What texts are drawn from. Characters beyond ASCII are several tokens of some tokenizers.
WORDS = ('the', ' cat', ' and', ' you', ' in', 'on', ' sat', ' 7', ' xyz', '.', '?', '\n', '\n\n')
WORDS += (' é', 'ö', '漢', ' \U0001f642', '  ', ' <', '|', '#', "'s")
SPECIAL = tiny_tokenizers.SPECIAL[1:]
STOPS = ('the', 'a', 'on', '.', '\n', '\n\n', ' ', 'th', 'e', 'é', '#', 'you', 'in ', '|')


@dataclasses.dataclass(frozen=True)
class Model:
  """One of the models: the kind of its tokenizer, and whether a text begins with a begin token."""

  kind: str
  has_begin: bool

  @property
  def name(self) -> str:
    return f'{self.kind}{"_with_begin" if self.has_begin else ""}'

  def write(self, parent: pathlib.Path) -> pathlib.Path:
    """Writes its folder, and returns it."""
    folder = parent / self.name
    folder.mkdir()
    (folder / 'config.json').write_text(json.dumps(CONFIG))
    tiny_tokenizers.write(folder, self.kind, self.has_begin)
    safetensors.numpy.save_file(_weights(self), folder / 'model.safetensors')
    return folder

  @property
  def seed(self) -> list[int]:
    return [77, tiny_tokenizers.KINDS.index(self.kind), int(self.has_begin)]


MODELS = [Model(*values) for values in itertools.product(tiny_tokenizers.KINDS, (False, True))]


@dataclasses.dataclass(frozen=True)
class Request:
  """A request of the harness.

  Attributes:
    kind: the method of a model that answers it.
    args: its arguments.
  """

  kind: str
  args: tuple[Any, ...]

  @property
  def instance(self) -> types.SimpleNamespace:
    """What the harness hands to the method."""
    return types.SimpleNamespace(args=self.args, task_name=None)


class Answered(NamedTuple):
  """A request and its answer.

  Attributes:
    request: the request.
    value: a log-likelihood with its greedy flag, a log-likelihood, or a text; None: there is none.
    is_decided: whether the best logit of each new token is ahead of the second.
  """

  request: Request
  value: Any
  is_decided: bool = True

  def check(self, value: Any) -> None:
    """Compares another answer with this one."""
    expected = self.value
    if expected is None or not self.is_decided:
      return
    if isinstance(expected, str):
      assert value == expected, self.request
      return
    if self.request.kind == 'loglikelihood':
      assert value[1] == expected[1], self.request
      value, expected = value[0], expected[0]
    assert abs(value - expected) < TOLERANCE, self.request


def score_in_one_program(monkeypatch: pytest.MonkeyPatch, length: int, choices: int) -> None:
  """Pads all pairs to one shape, because compiling takes longest; others are slow tests."""
  bucket = padding.bucket
  monkeypatch.setattr(padding, 'bucket', lambda size, least=1: bucket(max(size, 4), least))
  shape = length, choices, length
  monkeypatch.setattr(padding, 'rank_shapes', lambda prefixes, choices: [shape] * len(prefixes))


def all_requests() -> Iterator[tuple[Model, Request]]:
  """Yields 25 requests to each model."""
  for model in MODELS:
    for request in draw(model):
      yield model, request


def read_stored() -> dict[str, list[Answered]]:
  """Returns the stored answers by the name of the model."""
  stored: dict[str, list[Answered]] = {}
  for name, kind, args, value in json.loads(STORED.read_text()):
    stored.setdefault(name, []).append(Answered(Request(kind, tuple(args)), value))
  return stored


def _weights(model: Model) -> dict[str, np.ndarray]:
  """Random weights; special tokens are likely, and ids that the tokenizer lacks are not."""
  rng = np.random.default_rng(model.seed)
  tokens = tiny_tokenizers.vocabulary(model.kind)
  likely = [i for i, token in enumerate(tokens) if not token.startswith('<0x')]

  def draw(*shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)

  head = 0.4 * draw(VOCABULARY_SIZE, WIDTH)
  head[likely] *= 1.5
  head[1:5] *= 1.4  # special tokens
  head[len(tokens) :] = 0
  tensors = {'model.embed_tokens.weight': draw(VOCABULARY_SIZE, WIDTH), 'lm_head.weight': head}
  tensors['model.norm.weight'] = np.ones(WIDTH, np.float32)
  shapes = {
    'self_attn.q_proj': (WIDTH, WIDTH),
    'self_attn.k_proj': (WIDTH // 2, WIDTH),
    'self_attn.v_proj': (WIDTH // 2, WIDTH),
    'self_attn.o_proj': (WIDTH, WIDTH),
    'mlp.gate_proj': (24, WIDTH),
    'mlp.up_proj': (24, WIDTH),
    'mlp.down_proj': (WIDTH, 24),
  }
  for layer in range(2):
    prefix = f'model.layers.{layer}'
    for name, shape in shapes.items():
      tensors[f'{prefix}.{name}.weight'] = draw(*shape) / shape[1] ** 0.5
    for name in ('input_layernorm', 'post_attention_layernorm'):
      tensors[f'{prefix}.{name}.weight'] = np.ones(WIDTH, np.float32)
  return tensors


def draw(model: Model, count: int = 25) -> Iterator[Request]:
  """Yields requests to a model; of five, two are generated answers and one is a whole text."""
  rng = np.random.default_rng([*model.seed, 1])
  kinds = ('loglikelihood', 'generate_until', 'loglikelihood_rolling')
  for kind in itertools.islice(itertools.cycle([*kinds, *kinds[:2]]), count):
    if kind == 'loglikelihood':
      yield Request(kind, (_context(rng), _text(rng, 1, 5)))
    elif kind == 'generate_until':
      yield Request(kind, (_context(rng), _options(rng)))
    else:
      yield Request(kind, (_text(rng, 1, 40),))


def _text(rng: np.random.Generator, least: int, most: int) -> str:
  """Words, and special tokens in every sixth place. All tokenizers have tokens for it."""
  words = rng.choice(WORDS, int(rng.integers(least, most + 1))).tolist()
  for i in range(len(words)):
    if rng.random() < 1 / 6:
      words[i] = str(rng.choice(SPECIAL))
  text = ''.join(words)
  return text if text.strip() else 'the'


def _context(rng: np.random.Generator) -> str:
  """A context: empty, short, or longer than the model."""
  most = int(rng.choice([0, 4, 12, 40], p=[0.1, 0.3, 0.4, 0.2]))
  return _text(rng, 1, most) if most else ''


def _options(rng: np.random.Generator) -> dict[str, Any]:
  """Options of a generation: stops of text and of special tokens."""
  count = int(rng.integers(0, 3))
  stops = rng.choice(STOPS, count, replace=False).tolist()
  if rng.random() < 0.5:
    stops.append(str(rng.choice(SPECIAL)))
  return {'until': stops, 'max_gen_toks': int(rng.integers(2, 17)), 'do_sample': False}
