"""What the README shows is what happens."""

import pathlib
import re

import pytest

from ngrammer_jax import config, errors, flags
from ngrammer_jax.training import loop

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEXT = (ROOT / 'README.md').read_text(encoding='utf-8')


def test_python_examples_run(tiny, tmp_path, monkeypatch, capsys):
  training = {'steps': 2, 'evaluate_every': 0, 'segment_length': 32}
  loop.train(tiny(training=training), tmp_path / 'runs' / 'quickstart')
  monkeypatch.chdir(tmp_path)
  examples = re.findall(r'```python\n(.*?)```', TEXT, re.S)
  names: dict = {}
  for example in examples:
    exec(example, names)
  assert names['logits'].shape == (2, 16, 1000)
  assert 'bits/byte  The state of the Union' in capsys.readouterr().out


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


@pytest.mark.parametrize('path', sorted((ROOT / 'configs').glob('*.py')), ids=lambda p: p.stem)
def test_every_config_resolves(path):
  rows = re.findall(r'^ROWS = \((.*)\)$', path.read_text(), re.M)
  specs = [str(path), *(f'{path}:{row}' for row in re.findall(r"'(\w+)'", ''.join(rows)))]
  resolved = [config.resolve(flags.load_file(spec)) for spec in specs]
  assert len({repr(r) for r in resolved}) == max(len(specs) - 1, 1)  # the default is a row
