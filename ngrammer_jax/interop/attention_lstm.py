"""Parameters of attention LSTMs (Daniluk et al. 2017), by the names of the equations, to ours.

There is no code of the authors. Matrices are [in, out], applied to rows from the right; the gates
stand in the order i, f, g, o.

D embedding width, K hidden size, J width of the readout, V vocabulary, L words, G gates.
"""

from collections.abc import Mapping
from typing import Any

from ngrammer_jax import errors
from ngrammer_jax.interop import arrays as interop_arrays
from ngrammer_jax.layers import recurrence
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import recurrent_config

Source = interop_arrays.Source

# Of the config, beside `width` and `recurrent`.
SWITCHES = {'tie_embeddings': False, 'scale_embeddings': False, 'softmax_bias': True}
FIXED = {'ngram': None, 'adaptive_softmax': None}


def load_language_model(
  arrays: Mapping[str, Any], config: model_config.ModelConfig, vocabulary_size: int
) -> dict[str, Any]:
  """Variables of our `RecurrentLM`.

  Names: `emb` [V, D], `Wx` [D, G K], `Wh` [K, G K] and `b` [G K], in which the bias of the forget
  gate is; `Wo` [J, V] and `bo` [V]; of attention `WY`, `Whh`, `Wr`, `Wxx` [J, J], `wa` [J]; of the
  N-gram RNN `WN` [K, J]; of a recurrent memory `M`, `C` [V, K], `T` [L, K] and `T2` of two temporal
  tables, the maps `Wz`, `Wr`, `W` of what is read and `Uz`, `Ur`, `U` of h [K, K], and, where the
  gates have them, their biases `bWz`, `bUz`, ... [K].

  The config is `ModelConfig(**SWITCHES, width=D, recurrent=RecurrentConfig(...))`.

  Returns:
    {'params': ...} for `RecurrentLM(config, vocabulary_size).apply`.

  Raises:
    BadInput: a config that theirs cannot have; or listing every missing, extra and misshapen
      array.
  """
  config.check()
  r, V = config.recurrent, vocabulary_size
  if r is None:
    raise errors.BadInput('model.recurrent=None: an attention LSTM has one')
  switches = {key: (value,) for key, value in (SWITCHES | FIXED).items()}
  interop_arrays.check_switches(config, switches)
  D, K, J, G = config.width, r.hidden, r.width, recurrence.CELLS[r.cell]
  by_gate = lambda a: a[0].reshape(*a[0].shape[:-1], G, K)
  sources = {
    ('embedding',): Source(('emb',), (V, D)),
    ('softmax_weight',): Source(('Wo',), (J, V), lambda a: a[0].T),
    ('softmax_bias',): Source(('bo',), (V,)),
    ('recurrence', 'input_kernel'): Source(('Wx',), (D, G * K), by_gate),
    ('recurrence', 'recurrent_kernel'): Source(('Wh',), (K, G * K), by_gate),
    ('recurrence', 'bias'): Source(('b',), (G * K,), by_gate),
    **_readout_sources(r, V),
  }
  sources = {('params', *path): source for path, source in sources.items()}
  return interop_arrays.convert(arrays, sources, 'an attention LSTM')


def _readout_sources(r, V) -> dict[tuple[str, ...], Source]:
  K, J, sources = r.hidden, r.width, {}
  put = lambda name, *path, shape: sources.__setitem__(('readout', *path), Source((name,), shape))
  if r.readout in recurrent_config.ATTENTION:
    for name, ours in {'WY': 'keys', 'Whh': 'query', 'Wr': 'read', 'Wxx': 'predict'}.items():
      put(name, ours, 'kernel', shape=(J, J))
    put('wa', 'score', shape=(J,))
  if r.readout == 'ngram':
    put('WN', 'slices', 'kernel', shape=(K, J))
  if r.readout == 'recurrent_memory':
    put('M', 'input_words', shape=(V, K))
    put('C', 'output_words', shape=(V, K))
    put('T', 'temporal', shape=(r.window, K))
    if r.temporal_tables == 2:
      put('T2', 'output_temporal', shape=(r.window, K))
    for gate, ours in {'z': 'update', 'r': 'reset', '': 'candidate'}.items():
      for name, of in ((f'W{gate}', ours), (f'U{gate}', f'{ours}_h')):
        put(name, of, 'kernel', shape=(K, K))
        if r.gate_bias:
          put(f'b{name}', of, 'bias', shape=(K,))
  return sources
