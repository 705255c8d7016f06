"""Every notebook runs from top to bottom."""

import json
import pathlib

import matplotlib
import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).resolve().parents[1] / 'notebooks').glob('*.ipynb'))


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, monkeypatch, tmp_path):
  matplotlib.use('agg')
  monkeypatch.chdir(tmp_path)
  names: dict = {}
  for cell in json.loads(path.read_text())['cells']:
    if cell['cell_type'] == 'code':
      exec(compile(''.join(cell['source']), str(path), 'exec'), names)
  assert names
