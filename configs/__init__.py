"""The configs that come with ngrammer_jax, installed as `ngrammer_jax.configs`."""
