"""Rematerialisation of the blocks of a Transformer: which arrays the backward pass reads."""

from flax import linen as nn
import jax

from ngrammer_jax.config import model as model_config
from ngrammer_jax.models import block

# Arrays that `minimal` saves for the backward pass: the results of all products but those of whole
# scores, and what splash attention and blocks need. Scores, norms, convolutions, rotations and sums
# are computed again.
SAVED_NAMES = 'attended', 'attention_output', 'inner_features', 'feed_forward_output', 'memory'


def _saved_names(config: model_config.ModelConfig) -> tuple[str, ...]:
  """Returns the names of the arrays saved by `minimal`."""
  c = config
  # The gradients of norms, convolutions, learned scales and biases need what these are applied to.
  is_changed = (
    c.convolution is not None
    or c.attention_options().query_key_norm is not None
    or c.per_dim_scale
    or 'distances' in c.attention_needs()
  )
  if is_changed:
    return *SAVED_NAMES, 'projected'
  return *SAVED_NAMES, 'heads'


def block_class(config: model_config.ModelConfig, is_scanned: bool) -> type[nn.Module]:
  """Returns the class of the blocks, with the rematerialisation of the config."""
  if config.remat in ('auto', 'none'):
    return block.Block
  names: tuple[str, ...] = ()
  if config.remat == 'minimal':
    names = _saved_names(config)
  policy = jax.checkpoint_policies.save_only_these_names(*names)
  return nn.remat(block.Block, policy=policy, prevent_cse=not is_scanned)
