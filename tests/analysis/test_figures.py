"""Figures of analyses."""

import pytest

from ngrammer_jax.analysis import figures
from tests.checks import bad_input


def test_failed_analysis_leaves_no_figure(tmp_path):
  path = tmp_path / 'folder' / 'figure.png'
  with pytest.raises(ZeroDivisionError), figures.saved_figure(path):
    _ = 1 / 0
  assert not list(tmp_path.iterdir())
  with figures.saved_figure(path) as axes:
    axes.plot([1, 2])
  assert path.read_bytes().startswith(b'\x89PNG')


def test_unwritable_path_is_reported_before_the_analysis(tmp_path):
  (tmp_path / 'file').write_text('')
  (tmp_path / 'folder').mkdir()
  for name, message in (
    ('folder', f'folder is a folder: name a file, such as {tmp_path}/folder/figure.png'),
    ('figure.txt', 'figure.txt has no suffix of an image: use .png, .svg or .pdf'),
    ('file/figure.png', 'file/figure.png cannot be written: check the path and its permissions'),
  ):
    with bad_input(f'--figure={tmp_path}/{message}'), figures.saved_figure(tmp_path / name):
      pytest.fail('the analysis ran')


def test_labels_of_tokens_show_spaces_and_line_breaks():
  labels = figures.token_labels(['', ' a', '.\n\n', '\t', '$5'])
  assert labels == ['¶', '_a', '.↵↵', '→', r'\$5']
