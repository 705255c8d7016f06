"""Row states of runs up to version 0.3.0, saved every 100 steps to `places/*/ROWS.jsonl`.

Read-only: newer checkpoints have the states of their own step.
"""

from collections.abc import Iterator, Sequence
import contextlib
import operator
import pathlib
from typing import NamedTuple

from ngrammer_jax.data.rows import row_reader
from ngrammer_jax.system import json_files

MAX_STEPS = 8  # newest saved steps among which one has all rows


class SavedStates(NamedTuple):
  """A line of a file: states of some rows before a step."""

  step: int
  states: dict[int, row_reader.RowState]
  num_values: int  # per state in the line: 5 in the oldest versions


class SavedPlaces:
  """The states saved by earlier versions in a folder.

  Args:
    folder: the folder; it may be missing.
    order: `data.shuffle` and `data.begin_of_text`; states of another order are ignored.
  """

  def __init__(self, folder: pathlib.Path, order: Sequence[int | bool | None]):
    self._folder = folder
    self._order = list(order)

  @property
  def keeps_blank(self) -> bool:
    """Whether the version of the run counted white space as a document."""
    for path in self._paths():
      first = next(self._read(path), None)
      if first is not None and first.num_values == 5:
        return True
    return False

  def newest(self, step: int, rows: range) -> tuple[int, dict[int, row_reader.RowState]] | None:
    """Returns the newest complete step up to `step`, and the states of its rows.

    One host may have been a few steps ahead of another.
    """
    states_by_step: dict[int, dict[int, row_reader.RowState]] = {}
    for path in self._paths():
      for saved in self._read(path):
        if saved.step <= step:
          states_by_step.setdefault(saved.step, {}).update(saved.states)
        if len(states_by_step) > MAX_STEPS:
          del states_by_step[min(states_by_step)]
    for saved_step in sorted(states_by_step, reverse=True):
      if set(rows) <= set(states_by_step[saved_step]):
        return saved_step, states_by_step[saved_step]
    return None

  def _paths(self) -> list[pathlib.Path]:
    return sorted(self._folder.glob('[0-9]*.jsonl'))

  def _read(self, path: pathlib.Path) -> Iterator[SavedStates]:
    """Yields the valid lines of a file with the same order."""
    for line in json_files.read_lines(path):
      with contextlib.suppress(ValueError, TypeError, LookupError):
        step = operator.index(line['step'])
        states = [row_reader.RowState(*map(operator.index, s)) for s in line['places']]
        # The oldest versions did not write the order.
        if line.get('order', self._order) == self._order:
          yield SavedStates(step, dict(enumerate(states, line['first'])), len(line['places'][0]))
