"""Text tables."""

from ngrammer_jax.system import text_tables


def test_columns_are_aligned():
  rows = [('name', 'n', 'share', 'note'), ('a', '1,000', '5%', 'x'), ('longer', '7', '', '')]
  assert text_tables.align_columns(rows, '<>><') == [
    'name        n  share  note',
    'a       1,000     5%  x',
    'longer      7',
  ]
  assert text_tables.align_columns(rows, '<>')[1] == 'a       1,000     5%     x'
