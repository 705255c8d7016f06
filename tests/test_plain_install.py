"""An installation without the extra `tasks`: what needs it says so before anything is written."""

import json
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Runs commands, which are given as JSON, in one process without what the extra brings, and writes
# the status and the output of errors of each as JSON.
COMMANDS = """
import contextlib, io, json, sys

MISSING = {'tensorflow', 'seqio', 'tensorflow_datasets', 'tensorflow_text', 'importlib_resources'}

class Missing:
  def find_spec(self, name, path=None, target=None):
    if name in MISSING:
      raise ModuleNotFoundError(f'No module named {name!r}', name=name)

sys.meta_path.insert(0, Missing())
from ngrammer_jax import __main__, flags

results = []
for argv in json.loads(sys.argv[1]):
  sys.argv, said = ['ngrammer_jax', *argv], io.StringIO()
  with contextlib.redirect_stderr(said):
    try:
      flags.run(__main__.main)
    except SystemExit as error:
      results.append([error.code, said.getvalue()])
print(json.dumps(results))
"""

MESSAGE = (
  "error: SuperGLUE and C4 of TFDS need seqio and TensorFlow (No module named 'tensorflow'): "
  "pip install 'ngrammer_jax[tasks]', on Python 3.11 to 3.13 and not Windows\n"
)


def test_superglue_and_c4_without_tensorflow_end_with_how_to_install_it(trained, tmp_path):
  run, c4_run, new = str(trained), tmp_path / 'c4', tmp_path / 'new'
  shutil.copytree(trained, c4_run)
  config = json.loads((c4_run / 'config.json').read_text())
  config['data'] |= {'corpus': 'c4/en', 'path': None}
  (c4_run / 'config.json').write_text(json.dumps(config))
  before = sorted(tmp_path.rglob('*'))
  quickstart = ['train', '--config=configs/quickstart.py', f'--workdir={new}']
  rte = ['finetune', '--config=configs/superglue.py:rte', f'--config.init_from={run}']
  commands = [
    ['train', '--config=configs/ngrammer_c4.py', f'--workdir={new}'],
    [*quickstart, '--config.data.corpus=c4/en'],
    [*quickstart, '--config.data.mixture.0.corpus=c4/en'],
    [*rte, f'--workdir={new}'],
    [*rte, f'--workdir={new}', '--dry_run'],
    ['submit', f'--workdir={run}', f'--output={new}'],
    ['evaluate', f'--workdir={run}', '--config.finetune.task=rte', f'--output={new}'],
    ['evaluate', f'--workdir={c4_run}', f'--output={new}'],
  ]
  process = subprocess.run(
    [sys.executable, '-c', COMMANDS, json.dumps(commands)], cwd=ROOT, capture_output=True, text=True
  )
  assert process.returncode == 0, process.stderr
  for command, (status, said) in zip(commands, json.loads(process.stdout), strict=True):
    assert (status, said) == (2, MESSAGE), command
  assert sorted(tmp_path.rglob('*')) == before
