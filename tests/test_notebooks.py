"""Notebooks run from top to bottom, and hold what they printed and drew when they did."""

import ast
import json
import os
import pathlib
import re
import sys

import pytest

from tests.documentation import NOTEBOOKS, ROOT

ABSOLUTE_PATH = re.compile(r'(?:^|[\s\'"=(:])((?:/[\w.-]+){2,}|[A-Z]:\\)', re.M)
MAGIC = re.compile(r'^([ \t]*)[%!].*$', re.M)


def read(path):
  return json.loads(path.read_text(encoding='utf-8'))['cells']


def python_cells(path):
  """The source of cells in Python, without the lines of IPython."""
  sources = (''.join(cell['source']) for cell in read(path) if cell['cell_type'] == 'code')
  return [MAGIC.sub(r'\1pass', source) for source in sources if not source.startswith('%%')]


def output_kinds(cells):
  """Kinds of the outputs of each code cell: streams, results, and images."""
  return [
    sorted(
      {kind for output in cell['outputs'] for kind in output.get('data', {output.get('name')})}
    )
    for cell in cells
    if cell['cell_type'] == 'code'
  ]


@pytest.mark.slow
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_from_clean(path, monkeypatch, tmp_path):
  import nbclient
  import nbformat

  folder = pathlib.Path(sys.executable).parent
  monkeypatch.setenv('PATH', f'{folder}{os.pathsep}{os.environ["PATH"]}')
  monkeypatch.setenv('PYTHONPATH', str(ROOT))
  monkeypatch.setenv('IPYTHONDIR', str(tmp_path / 'ipython'))
  for name in ('JAX_NUM_CPU_DEVICES', 'XLA_FLAGS'):  # one device, as a reader has
    monkeypatch.delenv(name)
  notebook = nbformat.read(path, as_version=4)
  before = output_kinds(notebook.cells)
  settings = {'metadata': {'path': str(tmp_path)}}
  nbclient.NotebookClient(notebook, timeout=1200, resources=settings).execute()
  assert output_kinds(notebook.cells) == before


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_run_in_order_and_names_no_path_of_a_machine(path):
  cells = read(path)
  title, setup, *_ = (''.join(cell['source']) for cell in cells)
  assert title.startswith('# ') and 'Colab' in title and '%pip install' in setup
  code = [cell for cell in cells if cell['cell_type'] == 'code']
  assert [cell['execution_count'] for cell in code] == list(range(1, len(code) + 1))
  kinds = {kind for cell in output_kinds(cells) for kind in cell}
  assert 'stdout' in kinds and ('image/png' in kinds or path.stem == 'superglue')
  assert all(len(''.join(cell['source']).splitlines()) <= 40 for cell in code)
  outputs = [output for cell in code for output in cell['outputs']]
  assert all(output['output_type'] != 'error' for output in outputs)
  for output in outputs:
    text = ''.join(output.get('text', output.get('data', {}).get('text/plain', '')))
    assert not ABSOLUTE_PATH.search(text), ABSOLUTE_PATH.search(text)[1]


def test_what_notebooks_import_there_is():
  """And the attributes that they use; they are run rarely."""
  imports, used = [], set()
  for source in (source for path in NOTEBOOKS for source in python_cells(path)):
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
