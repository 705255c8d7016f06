"""The public name of `runs.pretrained.pretrained`."""

from ngrammer_jax.runs.pretrained import pretrained as pretrained
