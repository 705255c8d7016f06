"""The sampling settings of a published model: fields of its generation_config.json.

Fields in the file are used with or without `do_sample`, and missing fields have the defaults of
`SamplingConfig`. Transformers would decode greedily without `do_sample`, and have top_k=50 with it.
`"do_sample": false` means greedy decoding.
"""

from collections.abc import Mapping
import logging
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.config import fields
from ngrammer_jax.inference import sampling
from ngrammer_jax.interop.huggingface.published_model import GENERATION

# Fields that do not change which token comes next: ids of tokens, lengths, caches, outputs and
# drafts of another model.
OTHER_FIELDS = frozenset(
  """
  do_sample bos_token_id eos_token_id pad_token_id decoder_start_token_id max_length max_new_tokens
  max_time _from_model_config _commit_hash _name_or_path transformers_version trust_remote_code
  use_cache cache_implementation cache_config max_cache_len return_legacy_cache low_memory
  compile_config disable_compile output_attentions output_hidden_states output_scores output_logits
  return_dict_in_generate num_return_sequences remove_invalid_values renormalize_logits
  prefill_chunk_size is_assistant num_assistant_tokens num_assistant_tokens_schedule
  assistant_confidence_threshold assistant_early_exit assistant_lookbehind target_lookbehind
  prompt_lookup_num_tokens max_matching_ngram_size
  """.split()
)


def read(generation: Mapping[str, Any]) -> dict[str, float | int]:
  """Returns the sampling settings by their names in `SamplingConfig`.

  Invalid values and unsupported fields, such as `num_beams`, are logged and ignored.

  Args:
    generation: the content of the file; empty without a file.
  """
  settings = {}
  keys = fields.keys(sampling.SamplingConfig)
  for name, key in keys.items():
    if generation.get(name) is None:
      continue
    try:
      value = key.convert(generation[name])
      key.check_value(value)
    except errors.BadInput as error:
      logging.warning('%s: %s; it is ignored', GENERATION, error)
    else:
      settings[name] = value
  do_sample = generation.get('do_sample')
  if do_sample is False:
    settings['temperature'] = 0.0
  elif do_sample not in (None, True):
    logging.warning('%s: do_sample=%r must be true or false; it is ignored', GENERATION, do_sample)
  unsupported = sorted(
    name
    for name in generation.keys() - keys.keys() - OTHER_FIELDS
    if not _is_neutral(generation[name])
  )
  if unsupported:
    logging.warning('%s: ignoring %s, not supported', GENERATION, ', '.join(unsupported))
  return settings


def _is_neutral(value: Any) -> bool:
  """Whether a field with this value has no effect: null, false, 0, 1 or empty."""
  return not value or (value == 1 and value is not True)
