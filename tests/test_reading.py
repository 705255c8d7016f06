"""docs/reading.md names what exists, and its example works."""

import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from ngrammer_jax import command_line, config
from ngrammer_jax.config import conversion
from tests import code_lines, tiny_run
from tests.documentation import ROOT

READING = (ROOT / 'docs' / 'reading.md').read_text(encoding='utf-8')
COPIED = ('ngrammer_jax', 'configs', 'tests', 'pyproject.toml', 'setup.py')


def defines(body, names):
  """Returns whether a body defines the first name, and that name defines the next one, ..."""
  if not names:
    return True
  kinds = (ast.ClassDef, ast.FunctionDef)
  matches = [node for node in body if isinstance(node, kinds) and node.name == names[0]]
  matches = matches or [node for node in body if names == assigned(node)]
  return bool(matches) and defines(getattr(matches[0], 'body', []), names[1:])


def assigned(node):
  """Returns the names that a statement assigns."""
  return [target.id for target in node.targets] if isinstance(node, ast.Assign) else []


def test_the_page_names_what_exists():
  """Files, classes, functions and tests of its links, rows of configs, and config keys."""
  links = re.findall(r'\[([^]]+)\]\(\.\./([^)]+)\)', READING)
  assert len(links) > 100
  for text, path in links:
    assert (ROOT / path).exists(), path
    stem, *names = text.strip('`').split('.')
    if path.startswith('configs/'):
      config.resolve(command_line.load_file(str(ROOT / 'configs' / text.strip('`'))))
    elif text.startswith('`') and not f'/{path}'.endswith(f'/{text.strip("`")}'):
      assert stem == pathlib.Path(path).stem, text
      assert defines(ast.parse((ROOT / path).read_text()).body, names), text
  for key in re.findall(
    r'`((?:model|optimizer|training|evaluation)\.[a-z_.]+)(?:=[^`]*)?`', READING
  ):
    conversion.find_key(key)


def imported_modules():
  """Returns the modules that each module of the package imports, in functions too, by name."""
  paths = (ROOT / 'ngrammer_jax').rglob('*.py')
  name_of = lambda path: '.'.join(path.relative_to(ROOT).with_suffix('').parts)
  trees = {name_of(path).removesuffix('.__init__'): ast.parse(path.read_text()) for path in paths}
  imported = {}
  for name, tree in trees.items():
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    targets = [(node.module, f'{node.module}.{each.name}') for node in froms for each in node.names]
    imported[name] = {full if full in trees else short for short, full in targets} & trees.keys()
  imported.pop('ngrammer_jax')  # the door, which all may enter
  return imported


@pytest.mark.full
def test_no_modules_import_each_other():
  remaining = imported_modules()
  while leaves := [name for name, others in remaining.items() if not others & remaining.keys()]:
    for name in leaves:
      del remaining[name]
  assert not remaining, sorted(remaining)


def test_every_folder_is_named():
  section = READING.partition('\n## Folders\n')[2].partition('\n## ')[0]
  named = re.findall(r'\]\(\.\./([^)]+)\)', section)
  files = (ROOT / 'ngrammer_jax').rglob('*.py')
  assert sorted(named) == sorted({path.parent.relative_to(ROOT).as_posix() for path in files})


def test_no_folder_imports_from_one_above_it():
  section = READING.partition('\n## Folders\n')[2].partition('\n## ')[0]
  rank = {}
  for number, line in enumerate(section.splitlines()):
    rank |= dict.fromkeys(re.findall(r'\]\(\.\./([^)]+)\)', line), number)
  upward = []
  for path in (ROOT / 'ngrammer_jax').rglob('*.py'):
    own = path.parent.relative_to(ROOT).as_posix()
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
      for name in node.names if isinstance(node, ast.ImportFrom) else ():
        parts = f'{node.module}.{name.name}'.split('.')
        prefixes = ('/'.join(parts[:count]) for count in range(len(parts), 1, -1))
        folder = next((prefix for prefix in prefixes if prefix in rank), own)
        are_layers = folder.startswith('ngrammer_jax/layers') and 'layers' in own
        if rank[folder] < rank[own] and not are_layers:
          upward.append((f'{path.relative_to(ROOT)}', folder))
  # `Run.state`, a public property that inference does not ask for, imports it when it is asked for.
  assert set(upward) == {('ngrammer_jax/runs/run.py', 'ngrammer_jax/training')}


CODE = '''"""One
two."""

x = """a
b"""  # why


def f():
  "Three."
  # four
  return (
    1
  )
'''


def test_only_lines_of_code_are_counted():
  assert code_lines.code_lines(CODE) == 6


def changed(folder):
  """Returns the text of each file that the example changes, after its changes, by path."""
  (diff,) = re.findall(r'^```diff\n(.*?)^```$', READING, re.S | re.M)
  texts = {}
  for part in diff.split('--- a/')[1:]:
    header, *hunks = re.split(r'^@@.*\n', part, flags=re.M)
    path, _ = header.split('\n', 1)
    text = (folder / path).read_text(encoding='utf-8')
    for hunk in hunks:
      lines = [line or ' ' for line in hunk.splitlines()]
      before, after = ('\n'.join(x[1:] for x in lines if x[0] != sign) for sign in '+-')
      assert text.count(before) == 1, (path, before)
      text = text.replace(before, after)
    texts[path] = text
  return texts


def test_the_example_applies():
  texts = changed(ROOT)
  assert len(texts) == 3
  for path, text in texts.items():
    assert 'moving_average' in text, path
    command = [sys.executable, '-m', 'ruff', 'format', '--check', '--stdin-filename', path, '-']
    ruff = subprocess.run(command, input=text, cwd=ROOT, capture_output=True, text=True)
    assert ruff.returncode == 0, ruff.stdout + ruff.stderr


@pytest.mark.slow
def test_the_example_works(tmp_path):
  """In a copy: its test, drawn models with it, training and decoding on the command line."""
  for name in COPIED:
    copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
    copy(ROOT / name, tmp_path / name)
  new = dict(re.findall(r'^`([\w/]+\.py)`:\n\n```python\n(.*?)^```$', READING, re.S | re.M))
  assert len(new) == 3 and not [path for path in new if (ROOT / path).exists()]
  for path, text in (new | changed(ROOT)).items():
    (tmp_path / path).write_text(text, encoding='utf-8')

  def run(*command):
    env = os.environ | {'NGRAMMER_JAX_CACHE': str(tmp_path / 'cache')}
    program = [sys.executable, '-m', *command]
    process = subprocess.run(program, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout

  (test,) = [path for path in new if path.startswith('tests/')]
  # The drawn models, slow ones too, and its own test.
  tests = test, 'tests/models/test_segmentation.py', '-k', 'loop or split_of_drawn_options'
  output = run('pytest', '-n0', '-m', '', *tests)
  assert re.search(r'\.{10,}', output), output
  text = tiny_run.write_text(tmp_path / 'text.txt')
  (flag,) = re.findall(r'`(--config\.model\.moving_average\.\S+)`', READING)
  data = {'corpus': 'text', 'path': text, 'vocabulary': 'bytes', 'vocabulary_size': None}
  data = [f'--config.data.{key}={value}' for key, value in data.items()]
  few = '--config.model.layers=1', '--config.training.steps=2', '--config.evaluation.max_tokens=64'
  flags = '--config=configs/quickstart.py', '--workdir=run', flag, *data, *few
  assert run('ngrammer_jax.train', *flags).startswith('finished: 2 steps')
  assert '"moving_average"' in (tmp_path / 'run' / 'config.json').read_text()
  run('ngrammer_jax.generate', '--workdir=run', '--prompt=the union', '--tokens=4')
