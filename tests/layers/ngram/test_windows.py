import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax.layers.ngram.windows import Windows

B, T, EOS = 4, 12, 2
WINDOWS = [
  Windows(1),
  Windows(2),
  Windows(4, fill_id=9),
  Windows(3, displacement=3),
  Windows(4, 'none', fill_id=7),
  Windows(4, 'eos_id', eos_id=EOS, fill_id=EOS),
  Windows(3, 'eos_id', eos_id=EOS, displacement=2),
]


def slow_windows(w, ids, tokens, numbers):
  """Going back from each token one token at a time, until the text no longer belongs to it."""
  places = np.full((w.places, *ids.shape), w.fill_id)
  places[0] = ids
  for s, b, t in np.ndindex(w.places - 1, *ids.shape[:2]):
    first = t - (s + 1) - w.displacement
    between = range(max(first, 0), t)
    is_cut = w.boundary != 'none' and any(numbers[b, u] != numbers[b, t] for u in between)
    is_cut |= w.boundary == 'eos_id' and any(tokens[b, u] == w.eos_id for u in between)
    if first >= 0 and not is_cut:
      places[s + 1, b, t] = ids[b, first]
  return places


def some_text():
  """Token ids with ends of sentences alone, doubled, first, last and everywhere; other ids."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(3, 9, (B, T))
  tokens[0, [0, 4, 5, 8, T - 1]] = EOS
  tokens[1] = EOS
  tokens[2] = np.where(rng.random(T) < 0.3, EOS, tokens[2])
  numbers = np.cumsum(rng.random((B, T)) < 0.2, axis=1) % 2  # the number of a document recurs
  return tokens.astype('int32'), rng.integers(10, 99, (B, T, 2)).astype('int32'), numbers


def test_any_split_equals_slow_loop():
  """Segments of one padded length, each with the state of the one before."""
  tokens, ids, numbers = some_text()
  expected = [slow_windows(w, ids, tokens, numbers) for w in WINDOWS]

  @jax.jit
  def segment(tokens, ids, numbers, valid, states):
    call = lambda w, state: w(ids, numbers, state, valid_BxT=valid, tokens_BxT=tokens)
    return [call(w, state) for w, state in zip(WINDOWS, states, strict=True)]

  for lengths in ([T], [7, 1, 4], [0, 3, 0, 9], [1] * T):
    states = [w.empty_state(B, 2) for w in WINDOWS]
    outputs = [[] for _ in WINDOWS]
    for last, length in zip(np.cumsum(lengths), lengths, strict=True):
      pad = lambda a, now=slice(last - length, last), rest=T - length: np.pad(
        a[:, now], ((0, 0), (0, rest), *[(0, 0)] * (a.ndim - 2)), constant_values=EOS
      )
      valid = np.arange(T) < length
      results = segment(pad(tokens), pad(ids), pad(numbers), np.tile(valid, (B, 1)), states)
      states = [state for _, state in results]
      for output, (windows, _) in zip(outputs, results, strict=True):
        output.append(np.stack(windows)[:, :, :length])
    for w, output, wanted in zip(WINDOWS, outputs, expected, strict=True):
      assert np.concatenate(output, axis=2).tolist() == wanted.tolist(), (w, lengths)


@pytest.mark.slow
def test_rows_of_different_lengths_go_on_where_they_ended():
  w, lengths = Windows(3, 'eos_id', eos_id=EOS), np.array([0, 1, 2, 5])
  tokens, _, _ = some_text()
  valid = (np.arange(5) < lengths[:, None]).astype('int32')
  _, state = w(tokens[:, :5, None], None, None, valid_BxT=valid)
  rest = np.stack([row[n : n + 7] for row, n in zip(tokens, lengths, strict=True)])
  windows, _ = w(rest[..., None], None, state)
  expected = slow_windows(w, tokens[..., None], tokens, np.zeros((B, T)))
  for b, n in enumerate(lengths):
    assert np.stack(windows)[:, b].tolist() == expected[:, b, n : n + 7].tolist(), b


@pytest.mark.full
def test_token_ids_are_compared_unless_others_are_given():
  tokens, _, numbers = some_text()
  w = Windows(3, 'eos_id', eos_id=EOS)
  windows, _ = w(jnp.asarray(tokens[..., None]), numbers, None)
  expected = slow_windows(w, tokens[..., None], tokens, numbers)
  assert np.stack(windows).tolist() == expected.tolist()


def test_windows_that_cannot_be_say_what_to_change():
  with pytest.raises(ValueError, match="^boundary 'eos' is not one of starts, eos_id, none$"):
    Windows(2, 'eos')
  with pytest.raises(ValueError, match='^boundary "eos_id" needs an eos_id, or use boundary="sta'):
    Windows(2, 'eos_id')
