"""Tables of the fields of config.json: used, harmless and refused ones."""

# Fields that change no logit, by the reason why.
HARMLESS_BY_REASON = {
  'a name, a version or a description': """
    architectures model_type transformers_version transformers.js_config _name_or_path name_or_path
    internal_version is_llama_config finetuning_task task_specific_params custom_pipeline
    custom_pipelines _sliding_window_pattern _commit_hash _from_model_config author license
    created_date
  """,
  'Python code for a model_type that has an implementation here': 'auto_map',
  'the dtype of parameters, which the files of the weights say': """
    dtype torch_dtype use_bfloat16
  """,
  'tokens and the tokenizer': """
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id
    bos_token eos_token pad_token sep_token unk_token tokenizer_class prefix tokenizer_type
    tokenizer_model_max_length tokenizer_padding_side padding_side
  """,
  'training: dropout, the start and the loss': """
    initializer_range attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout
    attention_probs_dropout_prob hidden_dropout_prob gradient_checkpointing
    predict_special_tokens num_steps use_deepspeed_checkpointing
  """,
  'settings of generation, not of the model': """
    use_cache cache_implementation temperature top_k top_p typical_p max_length min_length
    max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids badwordsids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens
  """,
  'a head for another task': """
    problem_type id2label label2id num_labels _num_labels classifier_dropout summary_type
    summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
  """,
  'what a call returns': """
    return_dict use_return_dict output_hidden_states output_attentions output_past
  """,
  'how the same numbers are computed': """
    torchscript tf_legacy_loss chunk_size_feed_forward attn_implementation _attn_implementation
    _attn_implementation_autoset _flash_attn_2_enabled use_flash_attn use_flashattn
    use_flash_attention use_sdpa xla_device reorder_and_upcast_attn pretraining_tp
  """,
  'an encoder, which these models do not have': """
    is_decoder cross_attention_hidden_size tie_encoder_decoder
  """,
  'a length that the official code takes from another field': """
    n_ctx max_sequence_length max_seq_length max_seq_len model_max_length
  """,
  'the attention of other engines to texts beyond the length of training': """
    dual_chunk_attention_config
  """,
  'a number of special tokens, which vocab_size counts': 'n_special',
}
HARMLESS = frozenset(' '.join(HARMLESS_BY_REASON.values()).split())
HARMLESS_PREFIXES = ('unsloth_',)  # marks and versions of a tool for fine-tuning
# Fields of quantised weights.
QUANTIZATION = ('quantization_config', 'quantization', 'compression_config')
# Fields ignored by a family, with the value that matches our computation.
NEUTRAL = {
  'attention_bias': False,
  'mlp_bias': False,
  'lm_head_bias': False,
  'qkv_bias': False,
  'bias': False,
  'use_bidirectional_attention': False,
  'use_mrope': False,
  'rope_interleaved': False,
  'add_cross_attention': False,
  'is_encoder_decoder': False,
  'use_sliding_window': False,
  'full_attn_mod': 1,
  'interpolate_factor': 1,
  'partial_rotary_factor': 1,
  'pruned_heads': {},
}
# Fields of a family that it does not read.
UNREAD = {
  'gemma': ('hidden_act',),
  'gemma2': ('hidden_act',),
  'gemma3_text': ('hidden_act', 'attn_logit_softcapping'),
  'mistral': ('layer_types',),
  'phi3': ('layer_types',),
  'llama': ('layer_types',),
  'olmo2': ('layer_types',),
  'smollm3': ('max_window_layers',),
}
# Other names of fields, which some files have besides the usual one.
SYNONYMS = {'sliding_window_size': 'sliding_window'}
# Fields of a model with images that say nothing of its text; `text_config` says which head it has.
IMAGE_FIELDS = (
  'text_config',
  'vision_config',
  'tie_word_embeddings',
  'mm_tokens_per_image',
  'boi_token_index',
  'eoi_token_index',
  'image_token_index',
)
# Fields for which null is a value of its own; elsewhere it is an absent field.
NULLABLE = (
  'num_key_value_heads',
  'head_dim',
  'intermediate_size',
  'sliding_window',
  'attn_logit_softcapping',
  'final_logit_softcapping',
)
# The first name of an activation is written.
ACTIVATIONS = {
  'silu': 'silu',
  'swish': 'silu',
  'gelu_pytorch_tanh': 'gelu',
  'gelu_new': 'gelu',
  'gelu_fast': 'gelu',
  'gelu': 'gelu_erf',
  'relu': 'relu',
}
# Rules of integers above 0, see `fields.Key`.
_COUNT = {'types': (int,), 'at_least': 1}
COUNTS = {
  'num_hidden_layers': _COUNT | {'at_most': 1000},
  'vocab_size': _COUNT,
  'hidden_size': _COUNT,
  'intermediate_size': _COUNT,
  'num_attention_heads': _COUNT,
  'num_key_value_heads': _COUNT,
  'head_dim': _COUNT,
  'max_position_embeddings': _COUNT,
  'original_max_position_embeddings': _COUNT,
  'sliding_window_pattern': _COUNT,
  'no_rope_layer_interval': _COUNT,
}
# Fields with the same meaning as a key of `config.model`.
SHARED = {
  'num_hidden_layers': 'layers',
  'hidden_size': 'width',
  'num_attention_heads': 'heads',
  'num_key_value_heads': 'key_value_heads',
  'head_dim': 'head_width',
  'intermediate_size': 'feed_forward_width',
  'rms_norm_eps': 'norm_epsilon',
  'tie_word_embeddings': 'tie_embeddings',
  'use_parallel_residual': 'parallel_residual',
  'final_logit_softcapping': 'final_logit_cap',
  'mlp_bias': 'feed_forward_bias',
  'attn_logit_softcapping': 'attention.logit_cap',
  'scale_attn_by_inverse_layer_idx': 'attention.inverse_layer_scale',
  'attention_bias': 'attention.output_bias',
  'sliding_window': 'attention.window',
}
