"""Text tables for terminals."""

from collections.abc import Sequence


def align_columns(rows: Sequence[Sequence[str]], alignment: str) -> list[str]:
  """Returns one line per row; columns are as wide as their widest cell, two spaces apart.

  Args:
    rows: cells, the header first; all rows have the same number of cells.
    alignment: '<' (left) or '>' (right) for each column; the last one also for further columns.
  """
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  sides = alignment.ljust(len(widths), alignment[-1])
  lines = []
  for row in rows:
    cells = zip(row, sides, widths, strict=True)
    lines.append('  '.join(f'{cell:{side}{width}}' for cell, side, width in cells).rstrip())
  return lines
