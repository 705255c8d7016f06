"""What the README shows is what happens."""

import json
import pathlib
import re

import jax
import pytest

from ngrammer_jax import config, errors, flags, runs, sharding

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEXT = (ROOT / 'README.md').read_text(encoding='utf-8')


def test_python_examples_run(trained_copy, tmp_path, monkeypatch, capsys):
  run = trained_copy('ngrammer')
  fields = json.loads((run / 'config.json').read_text())
  fields['evaluation']['segment_length'] = 32  # room for the prompts
  (run / 'config.json').write_text(json.dumps(fields))
  (tmp_path / 'runs').mkdir()
  run.rename(tmp_path / 'runs' / 'quickstart')
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(runs.Run, 'mesh', sharding.make_mesh(devices=jax.devices()[:1]))
  of_a_run, of_a_layer = re.findall(r'```python\n(.*?)```', TEXT, re.S)
  exec(of_a_run, {})
  assert 'bits/byte  The state of the Union' in capsys.readouterr().out
  names: dict = {}
  jax.eval_shape(lambda: exec(of_a_layer, names))  # compiles nothing
  assert names['logits'].shape == (2, 16, 1000)
  assert capsys.readouterr().out == '(2, 16, 1000)\n'


def test_the_example_of_the_span_docs_runs(capsys):
  (example,) = re.findall(r'```python\n(.*?)```', (ROOT / 'docs' / 'spans.md').read_text(), re.S)
  exec(example, {})
  assert float(capsys.readouterr().out) == 0  # where all spans begin


def test_files_that_are_named_exist():
  named = re.findall(r'(?:configs|launch|notebooks|docs|ngrammer_jax)/[\w/]+\.\w+', TEXT)
  assert named and not [name for name in named if not (ROOT / name).exists()]


def test_errors_are_quoted_to_the_letter():
  settings = {'model.ngram.vocab': 8, 'model.ngram.dim': 64}
  quoted = re.findall(r'^error: (.*)$', TEXT, re.M)
  for (key, value), message in zip(settings.items(), quoted, strict=True):
    fields = flags.load_file(str(ROOT / 'configs' / 'quickstart.py'))
    fields['model']['ngram'][key.split('.')[-1]] = value
    with pytest.raises(errors.BadInput) as caught:
      config.resolve(fields)
    assert str(caught.value) == message


def test_every_config_resolves():
  found = sorted((ROOT / 'configs').glob('*.py'))
  assert found
  for path in found:
    rows = re.findall(r'^ROWS = \((.*)\)$', path.read_text(), re.M)
    specs = [str(path), *(f'{path}:{row}' for row in re.findall(r"'(\w+)'", ''.join(rows)))]
    resolved = [config.resolve(flags.load_file(spec)) for spec in specs]
    assert len({repr(r) for r in resolved}) == max(len(specs) - 1, 1), path  # the default is a row
