"""Parameters of attention LSTMs (Daniluk et al. 2017), named after the equations.

The authors published no code; reference arrays and slow loops have these names. Matrices are
[in, out] and multiply rows from the right; the gates are in the order i, f, g, o.

D embedding width, K hidden size, J width of the readout, V vocabulary, L words, G gates.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ngrammer_jax.config import model as model_config
from ngrammer_jax.config import recurrent as recurrent_config
from ngrammer_jax.interop import named_arrays
from ngrammer_jax.layers.recurrent import recurrence

Source = named_arrays.ArraySource

ORIGIN = 'an attention LSTM'
# Config fields of these models, without `width` and `recurrent`.
MODEL_OPTIONS = {'tie_embeddings': False, 'scale_embeddings': False, 'softmax_bias': True}


def load(
  arrays: Mapping[str, Any], config: model_config.ModelConfig, vocabulary_size: int
) -> dict[str, Any]:
  """Converts matrices to variables of `RecurrentLM`, {'params': ...}.

  Source names: `emb` [V, D], `Wx` [D, G K], `Wh` [K, G K] and `b` [G K], which includes the bias of
  the forget gate; `Wo` [J, V] and `bo` [V]; for attention `WY`, `Whh`, `Wr`, `Wxx` [J, J] and
  `wa` [J]; for the N-gram RNN `WN` [K, J]; for a recurrent memory `M`, `C` [V, K], `T` [L, K], `T2`
  if there are two temporal tables, the kernels `Wz`, `Wr`, `W` of the memory readout and `Uz`,
  `Ur`, `U` of the hidden state h [K, K], and their biases `bWz`, `bUz`, ... [K] if the gates have
  biases.

  The config is `ModelConfig(**MODEL_OPTIONS, width=D, recurrent=RecurrentConfig(...))`.
  """
  return named_arrays.convert(arrays, _sources(config, vocabulary_size), ORIGIN)


def _sources(config: model_config.ModelConfig, V: int) -> dict[str, Source]:
  """Returns the source of each variable of a supported config."""
  r = config.recurrent
  D, K, J, G = config.width, r.hidden, r.width, recurrence.CELLS[r.cell]
  split_gates = lambda a: a.reshape(*a.shape[:-1], G, K)
  return {
    'params/embedding': Source('emb', (V, D)),
    'params/softmax_weight': Source('Wo', (J, V), np.transpose),
    'params/softmax_bias': Source('bo', (V,)),
    'params/recurrence/input_kernel': Source('Wx', (D, G * K), split_gates),
    'params/recurrence/recurrent_kernel': Source('Wh', (K, G * K), split_gates),
    'params/recurrence/bias': Source('b', (G * K,), split_gates),
    **{f'params/readout/{name}': source for name, source in _readout_sources(r, V).items()},
  }


def _readout_sources(r, V) -> dict[str, Source]:
  K, J = r.hidden, r.width
  if r.readout in recurrent_config.ATTENTION:
    names = {'WY': 'keys', 'Whh': 'query', 'Wr': 'read', 'Wxx': 'predict'}
    kernels = {f'{name}/kernel': Source(source_name, (J, J)) for source_name, name in names.items()}
    return kernels | {'score': Source('wa', (J,))}
  if r.readout == 'ngram':
    return {'slices/kernel': Source('WN', (K, J))}
  if r.readout != 'recurrent_memory':
    return {}
  sources = {
    'input_words': Source('M', (V, K)),
    'output_words': Source('C', (V, K)),
    'temporal': Source('T', (r.window, K)),
  }
  if r.temporal_tables == 2:
    sources['output_temporal'] = Source('T2', (r.window, K))
  for suffix, gate in {'z': 'update', 'r': 'reset', '': 'candidate'}.items():
    for source_name, name in ((f'W{suffix}', gate), (f'U{suffix}', f'{gate}_h')):
      sources[f'{name}/kernel'] = Source(source_name, (K, K))
      if r.gate_bias:
        sources[f'{name}/bias'] = Source(f'b{source_name}', (K,))
  return sources
