"""Every notebook runs from top to bottom."""

import ast
import json
import pathlib

import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).resolve().parents[1] / 'notebooks').glob('*.ipynb'))


def cells(path):
  """The code, cell by cell."""
  read = json.loads(path.read_text())['cells']
  return [''.join(cell['source']) for cell in read if cell['cell_type'] == 'code']


@pytest.mark.slow
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, monkeypatch, tmp_path):
  import matplotlib

  matplotlib.use('agg')
  monkeypatch.chdir(tmp_path)
  names: dict = {}
  for source in cells(path):
    exec(compile(source, str(path), 'exec'), names)
  assert names


def test_what_notebooks_import_there_is():
  """And take from it; they are run rarely."""
  imports, used = [], set()
  for source in (source for path in NOTEBOOKS for source in cells(path)):
    for node in ast.walk(ast.parse(source)):
      if isinstance(node, ast.ImportFrom) and node.module.startswith('ngrammer_jax'):
        imports.append(node)
      if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        used.add((node.value.id, node.attr))
  names: dict = {}
  exec(ast.unparse(ast.Module(imports, [])), names)
  taken = [(name, attribute) for name, attribute in used if name in names]
  assert len(imports) >= 3 and len(taken) >= 3
  assert all(hasattr(names[name], attribute) for name, attribute in taken)
