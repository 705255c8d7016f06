"""The interface of the training rows of one corpus, cached or streamed."""

from typing import Any, Protocol

from ngrammer_jax.data.tokens import token_split


class TrainRows(Protocol):
  """The training rows of one corpus, `cached_rows.CachedRows` or `streamed_rows.StreamedRows`.

  Attributes:
    epochs: number of completed epochs after the last step read here.
  """

  epochs: int

  def rows(self, step: int, rows: range) -> dict[int, token_split.Row]:
    """Returns the segments of the rows that read the corpus at a step."""

  def epochs_before(self, step: int) -> float | None:
    """Returns the number of epochs read by all rows before a step; None if unknown."""

  def states(self, step: int) -> dict[str, Any] | None:
    """Returns the states, before a step, of the rows read here; None for stateless rows.

    Call it before `rows` reads the step, because reading advances the state.
    """

  def restore(self, step: int, saved: dict[str, Any] | None) -> None:
    """Continues at a step, with the `states` of all rows before it."""
