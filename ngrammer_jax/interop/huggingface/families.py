"""The families of models: fields, options and tensors.

Fields of config.json have the names of Llama; `names` lists the other names of a family. Tensors
are listed by module as (name, axes), for a weight and an optional bias of its outputs:

  'NH D'     rows are the features of all heads, columns the inputs
  'NqH D'    the same, with the 3 projections q, k, v of each head after each other

D width, N heads, K key heads, H head width, F inner width, V vocabulary, P positions.
"""

from collections.abc import Mapping
import dataclasses
import types
from typing import Any, NamedTuple

REQUIRED = object()  # a field without a default
# Names of non-parameter tensors, in any family; and in models with images.
BUFFERS = r'\.(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)$'
BUFFERS_AND_IMAGES = rf'{BUFFERS}|(^|\.)(vision|multi_modal)_'


class Tensor(NamedTuple):
  """The tensors of a module.

  Attributes:
    name: their name without `.weight` or `.bias`, and without the name of the layer.
    axes: axes of the weight, by the letters of their sizes; q has the size 3.
    part: index of the module in `parts`, or in the 3 projections of q.
    parts: sizes of the rows joined in the tensor, by letters. (): one module.
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
    fields: relevant fields of config.json, with their defaults.
    options: keys of `config.model` shared by all its models.
    tensors: the tensors of each module; modules of a layer without `layer_i/`.
    names: the name of a field in this family, if different from Llama.
    layer_list: the name of the list of layers.
  """

  model_type: str
  architecture: str
  fields: Mapping[str, Any]
  options: Mapping[str, Any]
  tensors: Mapping[str, Tensor]
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  layer_list: str = 'layers'

  @property
  def layers(self) -> str:
    """Prefix of the tensor names of layers.

    Files may leave out its first word, before the names of all tensors but the head.
    """
    return f'{self.tensors["embedding"].name.partition(".")[0]}.{self.layer_list}.'


_QKV = ('NH', 'KH', 'KH')
_HALVES = ('F', 'F')
_LLAMA_TENSORS = {
  'embedding': Tensor('model.embed_tokens', 'V D'),
  'final_norm': Tensor('model.norm', 'D'),
  'softmax_weight': Tensor('lm_head', 'V D'),
  'attention_norm': Tensor('input_layernorm', 'D'),
  'feed_forward_norm': Tensor('post_attention_layernorm', 'D'),
  'attention/query': Tensor('self_attn.q_proj', 'NH D'),
  'attention/key': Tensor('self_attn.k_proj', 'KH D'),
  'attention/value': Tensor('self_attn.v_proj', 'KH D'),
  'attention/out': Tensor('self_attn.o_proj', 'D NH'),
  'feed_forward/gate': Tensor('mlp.gate_proj', 'F D'),
  'feed_forward/in': Tensor('mlp.up_proj', 'F D'),
  'feed_forward/out': Tensor('mlp.down_proj', 'D F'),
}
_HEAD_NORMS = {
  'attention/query_norm': Tensor('self_attn.q_norm', 'H'),
  'attention/key_norm': Tensor('self_attn.k_norm', 'H'),
}
_POST_NORMS = {
  'attention_post_norm': Tensor('post_attention_layernorm', 'D'),
  'feed_forward_post_norm': Tensor('post_feedforward_layernorm', 'D'),
}
_OLMO2_NORMS = _POST_NORMS | {
  'attention_norm': None,
  'feed_forward_norm': None,
  'attention/query_norm': Tensor('self_attn.q_norm', 'NH'),
  'attention/key_norm': Tensor('self_attn.k_norm', 'KH'),
}
_GEMMA2_NORMS = _POST_NORMS | {'feed_forward_norm': Tensor('pre_feedforward_layernorm', 'D')}
_GEMMA3_NORMS = _GEMMA2_NORMS | _HEAD_NORMS
_FUSED = {
  'attention/query': Tensor('self_attn.qkv_proj', 'NH D', 0, _QKV),
  'attention/key': Tensor('self_attn.qkv_proj', 'KH D', 1, _QKV),
  'attention/value': Tensor('self_attn.qkv_proj', 'KH D', 2, _QKV),
  'feed_forward/gate': Tensor('mlp.gate_up_proj', 'F D', 0, _HALVES),
  'feed_forward/in': Tensor('mlp.gate_up_proj', 'F D', 1, _HALVES),
}
_GPT2_TENSORS = {
  'embedding': Tensor('transformer.wte', 'V D'),
  'absolute_position': Tensor('transformer.wpe', 'P D'),
  'final_norm': Tensor('transformer.ln_f', 'D'),
  'softmax_weight': Tensor('lm_head', 'V D'),
  'attention_norm': Tensor('ln_1', 'D'),
  'feed_forward_norm': Tensor('ln_2', 'D'),
  'attention/query': Tensor('attn.c_attn', 'D qNH', 0),  # Conv1D: inputs first
  'attention/key': Tensor('attn.c_attn', 'D qKH', 1),
  'attention/value': Tensor('attn.c_attn', 'D qKH', 2),
  'attention/out': Tensor('attn.c_proj', 'NH D'),
  'feed_forward/in': Tensor('mlp.c_fc', 'D F'),
  'feed_forward/out': Tensor('mlp.c_proj', 'F D'),
}
_NEOX_TENSORS = {
  'embedding': Tensor('gpt_neox.embed_in', 'V D'),
  'final_norm': Tensor('gpt_neox.final_layer_norm', 'D'),
  'softmax_weight': Tensor('embed_out', 'V D'),
  'attention_norm': Tensor('input_layernorm', 'D'),
  'feed_forward_norm': Tensor('post_attention_layernorm', 'D'),
  'attention/query': Tensor('attention.query_key_value', 'NqH D', 0),
  'attention/key': Tensor('attention.query_key_value', 'KqH D', 1),
  'attention/value': Tensor('attention.query_key_value', 'KqH D', 2),
  'attention/out': Tensor('attention.dense', 'D NH'),
  'feed_forward/in': Tensor('mlp.dense_h_to_4h', 'F D'),
  'feed_forward/out': Tensor('mlp.dense_4h_to_h', 'D F'),
}

_SIZES = {
  'vocab_size': REQUIRED,
  'hidden_size': REQUIRED,
  'num_hidden_layers': REQUIRED,
  'num_attention_heads': REQUIRED,
  'intermediate_size': REQUIRED,
  'tie_word_embeddings': False,
}
_ROPE = {
  'rope_theta': 10_000.0,
  'rope_scaling': {},
  'rope_parameters': {},
  'original_max_position_embeddings': None,
}
_LLAMA_FIELDS = {
  **_SIZES,
  **_ROPE,
  'num_key_value_heads': None,
  'head_dim': None,
  'hidden_act': 'silu',
  'rms_norm_eps': 1e-6,
  'max_position_embeddings': 2048,
}
_BIASES = {'attention_bias': False, 'mlp_bias': False}
_MISTRAL = {
  'num_key_value_heads': 8,
  'sliding_window': 4096,
  'max_position_embeddings': 131_072,
}
_QWEN = {
  'num_key_value_heads': 32,
  'sliding_window': 4096,
  'use_sliding_window': False,
  'max_window_layers': 28,
  'layer_types': None,
  'max_position_embeddings': 32_768,
}
_QWEN3 = _QWEN | {'head_dim': 128, 'attention_bias': False}
_GEMMA = {
  'attention_bias': False,
  'num_key_value_heads': 16,
  'head_dim': 256,
  'hidden_act': 'gelu_pytorch_tanh',
  'tie_word_embeddings': True,
  'max_position_embeddings': 8192,
}
_WINDOWED_GEMMA = _GEMMA | {
  'num_key_value_heads': 4,
  'sliding_window': 4096,
  'layer_types': None,
  'query_pre_attn_scalar': 256,
}
_GEMMA2 = _WINDOWED_GEMMA | {'attn_logit_softcapping': 50.0, 'final_logit_softcapping': 30.0}
_GEMMA3 = _WINDOWED_GEMMA | {
  'vocab_size': 262_208,
  'hidden_size': 2304,
  'intermediate_size': 9216,
  'num_hidden_layers': 26,
  'num_attention_heads': 8,
  'final_logit_softcapping': None,
  'rope_theta': 1_000_000.0,
  'rope_local_base_freq': 10_000.0,
  'sliding_window_pattern': 6,
  'max_position_embeddings': 131_072,
}
_SMOLLM3 = _BIASES | {
  'num_key_value_heads': 4,
  'tie_word_embeddings': True,
  'rope_theta': 2_000_000.0,
  'no_rope_layers': None,
  'no_rope_layer_interval': 4,
  'layer_types': None,
  'sliding_window': None,
  'use_sliding_window': False,
  'max_position_embeddings': 32_768,
}
_OLMO2 = {'attention_bias': False, 'rms_norm_eps': 1e-5}
_PHI3 = {
  'rms_norm_eps': 1e-5,
  'sliding_window': None,
  'max_position_embeddings': 4096,
  'original_max_position_embeddings': 4096,
  'partial_rotary_factor': 1.0,
}
_GPT2 = _SIZES | {
  'intermediate_size': None,
  'hidden_act': 'gelu_new',
  'rms_norm_eps': 1e-5,
  'tie_word_embeddings': True,
  'max_position_embeddings': 1024,
  'scale_attn_weights': True,
  'scale_attn_by_inverse_layer_idx': False,
}
_NEOX = {
  **_SIZES,
  **_ROPE,
  'hidden_act': 'gelu',
  'rms_norm_eps': 1e-5,
  'max_position_embeddings': 2048,
  'partial_rotary_factor': 0.25,
  'attention_bias': True,
  'use_parallel_residual': True,
}
_GEMMA_NAMES = {'hidden_act': 'hidden_activation'}
_GPT2_NAMES = {
  'hidden_size': 'n_embd',
  'num_hidden_layers': 'n_layer',
  'intermediate_size': 'n_inner',
  'num_attention_heads': 'n_head',
  'max_position_embeddings': 'n_positions',
  'rms_norm_eps': 'layer_norm_epsilon',
  'hidden_act': 'activation_function',
}
_NEOX_NAMES = {
  'rms_norm_eps': 'layer_norm_eps',
  'partial_rotary_factor': 'rotary_pct',
  'rope_theta': 'rotary_emb_base',
}
_RMS = {
  'norm_kind': 'rms',
  'gated': True,
  'softmax_bias': False,
  'scale_embeddings': False,
}
_QWEN3_OPTIONS = {'attention.query_key_norm': 'head'}
_OLMO2_OPTIONS = {'norm': 'post', 'attention.query_key_norm': 'full'}
_GEMMA_OPTIONS = {'norm_offset': True, 'scale_embeddings': True}
_GEMMA2_OPTIONS = _GEMMA_OPTIONS | {'norm': 'hybrid'}
_GEMMA3_OPTIONS = _GEMMA2_OPTIONS | _QWEN3_OPTIONS
_LAYER_NORM = {
  'norm_kind': 'layer',
  'gated': False,
  'softmax_bias': False,
  'scale_embeddings': False,
  'feed_forward_bias': True,
}
_GPT2_OPTIONS = _LAYER_NORM | {'bias': True, 'position': 'absolute'}


def _llama(
  model_type: str,
  architecture: str,
  fields: Mapping[str, Any],
  options: Mapping[str, Any] = types.MappingProxyType({}),
  tensors: Mapping[str, Tensor | None] = types.MappingProxyType({}),
  names: Mapping[str, str] = types.MappingProxyType({}),
) -> Family:
  """Returns a family like Llama except for these fields, options and tensors."""
  all_tensors = {**_LLAMA_TENSORS, **tensors}
  return Family(
    model_type=model_type,
    architecture=architecture,
    fields={**_LLAMA_FIELDS, **fields},
    options={**_RMS, **options},
    tensors={name: tensor for name, tensor in all_tensors.items() if tensor is not None},
    names=dict(names),
  )


_ALL = (
  _llama('llama', 'LlamaForCausalLM', _BIASES),
  _llama('mistral', 'MistralForCausalLM', _MISTRAL),
  _llama('qwen2', 'Qwen2ForCausalLM', _QWEN, {'attention.query_key_value_bias': True}),
  _llama('qwen3', 'Qwen3ForCausalLM', _QWEN3, _QWEN3_OPTIONS, _HEAD_NORMS),
  _llama('gemma', 'GemmaForCausalLM', _GEMMA, _GEMMA_OPTIONS, names=_GEMMA_NAMES),
  _llama('gemma2', 'Gemma2ForCausalLM', _GEMMA2, _GEMMA2_OPTIONS, _GEMMA2_NORMS, _GEMMA_NAMES),
  _llama('gemma3_text', 'Gemma3ForCausalLM', _GEMMA3, _GEMMA3_OPTIONS, _GEMMA3_NORMS, _GEMMA_NAMES),
  _llama('smollm3', 'SmolLM3ForCausalLM', _SMOLLM3),
  _llama('olmo2', 'Olmo2ForCausalLM', _OLMO2, _OLMO2_OPTIONS, _OLMO2_NORMS),
  _llama('phi3', 'Phi3ForCausalLM', _PHI3, tensors=_FUSED),
  Family(
    model_type='gpt2',
    architecture='GPT2LMHeadModel',
    fields=_GPT2,
    options=_GPT2_OPTIONS,
    tensors=_GPT2_TENSORS,
    names=_GPT2_NAMES,
    layer_list='h',
  ),
  Family(
    model_type='gpt_neox',
    architecture='GPTNeoXForCausalLM',
    fields=_NEOX,
    options=_LAYER_NORM,
    tensors=_NEOX_TENSORS,
    names=_NEOX_NAMES,
  ),
)
FAMILIES = {family.model_type: family for family in _ALL}
LLAMA = FAMILIES['llama']
