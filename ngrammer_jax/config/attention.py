"""Options of attention."""

import dataclasses

from ngrammer_jax.config.fields import field


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
  """Options of attention (see `layers.Attention`)."""

  logit_cap: float | None = field(
    None, 'c of the capped attention logits c tanh(s / c); None: not capped', above=0
  )
