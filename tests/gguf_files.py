"""Small GGUF files: the bytes of a header and of tensors, so that a test can damage either."""

import json
import struct

import numpy as np

from tests import tokenizer_files

KINDS = {bool: (7, '?'), int: (4, 'I'), float: (6, 'f')}
LAYERS, D, N, K, H, F, V = 1, 32, 4, 2, 8, 64, 40


def text(value):
  """A string of the format."""
  return struct.pack('<Q', len(value.encode())) + value.encode()


def value(x):
  """A value after its type. Of lists, the first element tells the type."""
  if isinstance(x, np.ndarray):
    x = x.tolist()
  if isinstance(x, str):
    return struct.pack('<I', 8) + text(x)
  if isinstance(x, list):
    elements = [value(element) for element in x]
    return (
      struct.pack('<I', 9)
      + elements[0][:4]
      + struct.pack('<Q', len(x))
      + b''.join(element[4:] for element in elements)
    )
  kind, code = KINDS[type(x)]
  return struct.pack(f'<I{code}', kind, x)


def content(metadata, tensors, alignment=32):
  """The bytes of a file; a tensor is its shape, the number of its type, and its bytes."""
  header = b'GGUF' + struct.pack('<IQQ', 3, len(tensors), len(metadata))
  header += b''.join(text(key) + value(x) for key, x in metadata.items())
  data = b''
  for name, (shape, kind, stored) in tensors.items():
    header += text(name) + struct.pack('<I', len(shape))
    header += struct.pack(f'<{len(shape)}Q', *shape[::-1]) + struct.pack('<IQ', kind, len(data))
    data += stored + bytes(-len(stored) % alignment)
  return header + bytes(-len(header) % alignment) + data


def split(metadata, tensors, count=2):
  """The bytes of each of several files of a model; the first has its metadata."""
  parts = []
  for number in range(count):
    keys = {'split.count': count, 'split.no': number, 'split.tensors.count': len(tensors)}
    if number == 0:
      keys = metadata | keys
    parts.append(content(keys, dict([*tensors.items()][number::count])))
  return parts


def plain(array):
  """A tensor in float32."""
  return array.shape, 0, array.astype('<f4').tobytes()


def metadata(**changes):
  """Metadata of a Llama with a byte-level tokenizer; None takes a key away."""
  values = {
    'general.architecture': 'llama',
    'llama.block_count': LAYERS,
    'llama.embedding_length': D,
    'llama.feed_forward_length': F,
    'llama.attention.head_count': N,
    'llama.attention.head_count_kv': K,
    'llama.attention.layer_norm_rms_epsilon': 1e-5,
    'llama.context_length': 64,
    'llama.rope.freq_base': 10_000.0,
  }
  return {key: x for key, x in (values | changes).items() if x is not None}


def tensors(seed=0):
  """The tensors of that Llama, in float32."""
  rng = np.random.default_rng(seed)
  draw = lambda *shape: plain(0.3 * rng.standard_normal(shape))
  block = {
    'attn_norm': (D,),
    'ffn_norm': (D,),
    'attn_q': (N * H, D),
    'attn_k': (K * H, D),
    'attn_v': (K * H, D),
    'attn_output': (D, N * H),
    'ffn_gate': (F, D),
    'ffn_up': (F, D),
    'ffn_down': (D, F),
  }
  return {
    'token_embd.weight': draw(V, D),
    'output_norm.weight': draw(D),
    **{f'blk.0.{name}.weight': draw(*shape) for name, shape in block.items()},
  }


def tokenizer(pre='gpt-2', **changes):
  """Metadata of byte pairs that begin with the tokens <s> and </s>."""
  model = json.loads(tokenizer_files.byte_level(special=('<s>', '</s>')))['model']
  tokens = sorted(model['vocab'], key=model['vocab'].get)
  values = {
    'model': 'gpt2',
    'pre': pre,
    'tokens': tokens,
    'bos_token_id': 0,
    'eos_token_id': 1,
    'token_type': np.array([3, 3, *[1] * (len(tokens) - 2)]),
    'merges': [' '.join(merge) for merge in model['merges']],
  }
  values |= changes
  return {f'tokenizer.ggml.{name}': x for name, x in values.items() if x is not None}
