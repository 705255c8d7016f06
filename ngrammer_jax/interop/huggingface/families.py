"""What the families of models have in common and how they differ: fields, options and tensors.

The fields are those of config.json by the names of Llama; a family that calls one otherwise says
so in `names`. Tensors are listed by our parameters, as (name, axes):

  'NH D'     rows are the features of all heads, columns the inputs
  'NqH D'    the same, with the 3 projections q, k, v of each head after each other

D width, N heads, K key heads, H head width, F inner width, V vocabulary, P positions.
"""

from collections.abc import Mapping
import dataclasses
import types
from typing import Any, NamedTuple

REQUIRED = object()  # a field without a default
EMPTY: Mapping[str, Any] = types.MappingProxyType({})


class Tensor(NamedTuple):
  """The tensor of a parameter.

  Attributes:
    name: its name; {i} is the number of the layer.
    axes: its axes, by the letters of their sizes; q has the size 3.
    part: which of the `parts`, or of the 3 projections of q, is the parameter.
    parts: sizes of the rows that are joined in the tensor, by letters. (): one parameter.
  """

  name: str
  axes: str
  part: int = 0
  parts: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of models.

  Attributes:
    model_type: its name in config.json.
    architecture: the class of its models.
    fields: fields of config.json that matter, with the value of an absent one.
    options: keys of `config.model` that all its models share.
    tensors: the tensor of each parameter; those of a layer without `layer_i/`.
    names: the name of a field in this family, where it is not that of Llama.
    prefix: prefix of the names of all tensors but the head, which files may leave out.
    buffers: endings of names of tensors that are no parameters.
  """

  model_type: str
  architecture: str
  fields: Mapping[str, Any]
  options: Mapping[str, Any]
  tensors: Mapping[str, Tensor]
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  prefix: str = 'model.'
  buffers: tuple[str, ...] = ('.rotary_emb.inv_freq',)


def _named(prefix: str, tensors: Mapping[str, tuple]) -> dict[str, Tensor]:
  """Returns the tensors with a prefix; a name that ends with a dot stands for weight and bias."""
  named = {}
  for path, (name, axes, *part) in tensors.items():
    if not name.endswith('.'):
      named[path] = Tensor(prefix + name, axes, *part)
      continue
    kernel = 'scale' if path.endswith('norm') else 'kernel'
    outputs = axes.split()[-1 if 'c_' in name else 0]  # Conv1D of GPT-2 is [in, out]
    named[f'{path}/{kernel}'] = Tensor(f'{prefix}{name}weight', axes, *part)
    named[f'{path}/bias'] = Tensor(f'{prefix}{name}bias', outputs, *part)
  return named


_LAYER = 'layers.{i}.'
_QKV = ('NH', 'KH', 'KH')
_HALVES = ('F', 'F')
_HEAD = {'softmax_weight': Tensor('lm_head.weight', 'V D')}
_LLAMA_TENSORS = _HEAD | _named(
  'model.',
  {
    'embedding': ('embed_tokens.weight', 'V D'),
    'final_norm': ('norm.', 'D'),
    'attention_norm': (f'{_LAYER}input_layernorm.', 'D'),
    'feed_forward_norm': (f'{_LAYER}post_attention_layernorm.', 'D'),
    'attention/query': (f'{_LAYER}self_attn.q_proj.', 'NH D'),
    'attention/key': (f'{_LAYER}self_attn.k_proj.', 'KH D'),
    'attention/value': (f'{_LAYER}self_attn.v_proj.', 'KH D'),
    'attention/out': (f'{_LAYER}self_attn.o_proj.', 'D NH'),
    'feed_forward/gate': (f'{_LAYER}mlp.gate_proj.', 'F D'),
    'feed_forward/in': (f'{_LAYER}mlp.up_proj.', 'F D'),
    'feed_forward/out': (f'{_LAYER}mlp.down_proj.', 'D F'),
  },
)
_HEAD_NORMS = _named(
  f'model.{_LAYER}self_attn.',
  {
    'attention/query_norm/scale': ('q_norm.weight', 'H'),
    'attention/key_norm/scale': ('k_norm.weight', 'H'),
  },
)
_FULL_NORMS = {
  'attention/query_norm/scale': Tensor(f'model.{_LAYER}self_attn.q_norm.weight', 'NH'),
  'attention/key_norm/scale': Tensor(f'model.{_LAYER}self_attn.k_norm.weight', 'KH'),
}
_POST_NORMS = _named(
  f'model.{_LAYER}',
  {
    'attention_post_norm': ('post_attention_layernorm.', 'D'),
    'feed_forward_post_norm': ('post_feedforward_layernorm.', 'D'),
  },
)
_BOTH_NORMS = _POST_NORMS | _named(
  f'model.{_LAYER}', {'feed_forward_norm': ('pre_feedforward_layernorm.', 'D')}
)
_FUSED = _named(
  f'model.{_LAYER}',
  {
    'attention/query': ('self_attn.qkv_proj.', 'NH D', 0, _QKV),
    'attention/key': ('self_attn.qkv_proj.', 'KH D', 1, _QKV),
    'attention/value': ('self_attn.qkv_proj.', 'KH D', 2, _QKV),
    'feed_forward/gate': ('mlp.gate_up_proj.', 'F D', 0, _HALVES),
    'feed_forward/in': ('mlp.gate_up_proj.', 'F D', 1, _HALVES),
  },
)
_GPT2_TENSORS = _HEAD | _named(
  'transformer.',
  {
    'embedding': ('wte.weight', 'V D'),
    'absolute_position': ('wpe.weight', 'P D'),
    'final_norm': ('ln_f.', 'D'),
    'attention_norm': ('h.{i}.ln_1.', 'D'),
    'feed_forward_norm': ('h.{i}.ln_2.', 'D'),
    'attention/query': ('h.{i}.attn.c_attn.', 'D qNH', 0),
    'attention/key': ('h.{i}.attn.c_attn.', 'D qKH', 1),
    'attention/value': ('h.{i}.attn.c_attn.', 'D qKH', 2),
    'attention/out': ('h.{i}.attn.c_proj.', 'NH D'),
    'feed_forward/in': ('h.{i}.mlp.c_fc.', 'D F'),
    'feed_forward/out': ('h.{i}.mlp.c_proj.', 'F D'),
  },
)
_GPT_NEOX_TENSORS = _named(
  'gpt_neox.',
  {
    'embedding': ('embed_in.weight', 'V D'),
    'final_norm': ('final_layer_norm.', 'D'),
    'attention_norm': (f'{_LAYER}input_layernorm.', 'D'),
    'feed_forward_norm': (f'{_LAYER}post_attention_layernorm.', 'D'),
    'attention/query': (f'{_LAYER}attention.query_key_value.', 'NqH D', 0),
    'attention/key': (f'{_LAYER}attention.query_key_value.', 'KqH D', 1),
    'attention/value': (f'{_LAYER}attention.query_key_value.', 'KqH D', 2),
    'attention/out': (f'{_LAYER}attention.dense.', 'D NH'),
    'feed_forward/in': (f'{_LAYER}mlp.dense_h_to_4h.', 'F D'),
    'feed_forward/out': (f'{_LAYER}mlp.dense_4h_to_h.', 'D F'),
  },
) | {'softmax_weight': Tensor('embed_out.weight', 'V D')}

_SIZES = {
  **dict.fromkeys(('vocab_size', 'hidden_size', 'num_hidden_layers'), REQUIRED),
  **{'num_attention_heads': REQUIRED, 'intermediate_size': REQUIRED, 'tie_word_embeddings': False},
}
_ROPE = {
  **{'rope_theta': 10_000.0, 'rope_scaling': {}, 'rope_parameters': {}},
  'original_max_position_embeddings': None,
}
_LLAMA_FIELDS = (
  _SIZES
  | _ROPE
  | {'num_key_value_heads': None, 'head_dim': None, 'hidden_act': 'silu', 'rms_norm_eps': 1e-6}
  | {'max_position_embeddings': 2048}
)
_BIASES = {'attention_bias': False, 'mlp_bias': False}
_QWEN = {
  **{'num_key_value_heads': 32, 'sliding_window': 4096, 'use_sliding_window': False},
  **{'max_window_layers': 28, 'layer_types': None, 'max_position_embeddings': 32_768},
}
_GEMMA = {
  **{'attention_bias': False, 'num_key_value_heads': 4, 'head_dim': 256},
  **{'hidden_act': 'gelu_pytorch_tanh', 'tie_word_embeddings': True, 'sliding_window': 4096},
  **{'query_pre_attn_scalar': 256, 'layer_types': None, 'max_position_embeddings': 8192},
}
_RMS = {'norm_kind': 'rms', 'gated': True, 'softmax_bias': False, 'scale_embeddings': False}
_GEMMA_OPTIONS = {'norm': 'hybrid', 'norm_offset': True, 'scale_embeddings': True}
_LAYER_NORM = {
  **{'norm_kind': 'layer', 'gated': False, 'softmax_bias': False, 'scale_embeddings': False},
  'feed_forward_bias': True,
}


def _llama(model_type, architecture, fields, options=EMPTY, tensors=EMPTY, **others):
  """Returns a family that has what Llama has, but for these fields, options and tensors."""
  parts = _LLAMA_FIELDS | fields, _RMS | options, _LLAMA_TENSORS | tensors
  return Family(model_type, architecture, *parts, **others)


FAMILIES = {
  family.model_type: family
  for family in (
    _llama('llama', 'LlamaForCausalLM', _BIASES),
    _llama(
      'mistral',
      'MistralForCausalLM',
      {'num_key_value_heads': 8, 'sliding_window': 4096, 'max_position_embeddings': 131_072},
    ),
    _llama('qwen2', 'Qwen2ForCausalLM', _QWEN, {'attention.query_key_value_bias': True}),
    _llama(
      'qwen3',
      'Qwen3ForCausalLM',
      _QWEN | {'head_dim': 128, 'attention_bias': False},
      {'attention.query_key_norm': 'head'},
      _HEAD_NORMS,
    ),
    _llama(
      'gemma2',
      'Gemma2ForCausalLM',
      _GEMMA | {'attn_logit_softcapping': 50.0, 'final_logit_softcapping': 30.0},
      _GEMMA_OPTIONS,
      _BOTH_NORMS,
      names={'hidden_act': 'hidden_activation'},
    ),
    _llama(
      'gemma3_text',
      'Gemma3ForCausalLM',
      _GEMMA
      | {'final_logit_softcapping': None, 'rope_theta': 1_000_000.0}
      | {'rope_local_base_freq': 10_000.0, 'sliding_window_pattern': 6}
      | {'max_position_embeddings': 131_072},
      _GEMMA_OPTIONS | {'attention.query_key_norm': 'head'},
      _BOTH_NORMS | _HEAD_NORMS,
      names={'hidden_act': 'hidden_activation'},
    ),
    _llama(
      'smollm3',
      'SmolLM3ForCausalLM',
      _BIASES
      | {'num_key_value_heads': 4, 'tie_word_embeddings': True, 'rope_theta': 2_000_000.0}
      | {'no_rope_layers': None, 'no_rope_layer_interval': 4, 'layer_types': None}
      | {'sliding_window': None, 'use_sliding_window': False, 'max_position_embeddings': 32_768},
    ),
    _llama(
      'olmo2',
      'Olmo2ForCausalLM',
      {'attention_bias': False, 'rms_norm_eps': 1e-5},
      {'norm': 'post', 'attention.query_key_norm': 'full'},
      _POST_NORMS | _FULL_NORMS,
    ),
    _llama(
      'phi3',
      'Phi3ForCausalLM',
      {'rms_norm_eps': 1e-5, 'sliding_window': None, 'max_position_embeddings': 4096}
      | {'original_max_position_embeddings': 4096, 'partial_rotary_factor': 1.0},
      tensors=_FUSED,
    ),
    Family(
      'gpt2',
      'GPT2LMHeadModel',
      _SIZES
      | {'intermediate_size': None, 'hidden_act': 'gelu_new', 'rms_norm_eps': 1e-5}
      | {'tie_word_embeddings': True, 'max_position_embeddings': 1024}
      | {'scale_attn_weights': True, 'scale_attn_by_inverse_layer_idx': False},
      _LAYER_NORM | {'bias': True, 'position': 'absolute'},
      _GPT2_TENSORS,
      {
        **{'hidden_size': 'n_embd', 'num_hidden_layers': 'n_layer', 'intermediate_size': 'n_inner'},
        **{'num_attention_heads': 'n_head', 'max_position_embeddings': 'n_positions'},
        **{'rms_norm_eps': 'layer_norm_epsilon', 'hidden_act': 'activation_function'},
      },
      'transformer.',
      ('.attn.bias', '.attn.masked_bias'),
    ),
    Family(
      'gpt_neox',
      'GPTNeoXForCausalLM',
      _SIZES
      | _ROPE
      | {'hidden_act': 'gelu', 'rms_norm_eps': 1e-5, 'max_position_embeddings': 2048}
      | {'partial_rotary_factor': 0.25, 'attention_bias': True, 'use_parallel_residual': True},
      _LAYER_NORM,
      _GPT_NEOX_TENSORS,
      {
        **{'rms_norm_eps': 'layer_norm_eps', 'partial_rotary_factor': 'rotary_pct'},
        'rope_theta': 'rotary_emb_base',
      },
      'gpt_neox.',
      ('.attention.bias', '.attention.masked_bias', '.rotary_emb.inv_freq'),
    ),
  )
}
LLAMA = FAMILIES['llama']
