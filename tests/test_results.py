"""No result is lost, and none replaces another."""

import errno
import io
import itertools
import json
import os
import pathlib
import re
import sys
import types

import pytest

from ngrammer_jax import analyze, errors, evaluate, export, flags, generate, runs
from ngrammer_jax.analysis import compare, gates, report, report_page, spans
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference import language_modeling, text
from ngrammer_jax.interop import safetensors
from ngrammer_jax.interop.huggingface import configs, families, tensors
from ngrammer_jax.runs import evaluation, model_source
from ngrammer_jax.system import file_errors, files, result_files
from ngrammer_jax.training import loop


class Scored(Exception):
  """A model was used."""


def refused(text):
  return pytest.raises(errors.BadInput, match=re.escape(text))


def forbid(monkeypatch, folder):
  """Forbids to write to a folder, also to root, as a read-only mount does."""
  access = lambda path, mode: not (mode & os.W_OK and folder in (path, *pathlib.Path(path).parents))
  monkeypatch.setattr(os, 'access', access)


def fill(monkeypatch, *names):
  """Files of these names find the disk full."""
  write = files.write

  def write_or_fail(path, content):
    if path.name in names:
      raise OSError(errno.ENOSPC, 'No space left on device', str(path))
    write(path, content)

  monkeypatch.setattr(files, 'write', write_or_fail)


def test_where_results_go_is_checked_before_a_model_is_used(trained_copy, tmp_path, monkeypatch):
  def use(*args):
    raise Scored

  for name in ('score_documents', 'prepare'):
    monkeypatch.setattr(inference.Engine, name, use)
  monkeypatch.setattr(evaluation, '_score', use)
  monkeypatch.setattr(gates, 'check_applicable', lambda run: None)
  run, prompts = trained_copy, tmp_path / 'prompts.txt'
  prompts.write_text('a\n')
  commands = {
    evaluate.main: ([], [f'--text={prompts}'], [f'--output={run}/new'], [f'--cloze={prompts}']),
    generate.main: ([f'--prompts={prompts}', f'--output={run}/new/a.jsonl'],),
    analyze.main: (['clusters'], ['report'], ['gates', f'--figure={run}/new/a.png']),
  }
  with monkeypatch.context() as patch:
    forbid(patch, run)
    for main, each in commands.items():
      for arguments in each:
        with refused(f'{run} cannot be written to; change its permissions, or name another'):
          main([*arguments, f'--workdir={run}'])
  (run / 'evaluation').touch()
  with refused(f'--output={run}/evaluation: {run}/evaluation is a file, expected a folder'):
    evaluate.main([f'--workdir={run}'])
  (tmp_path / 'a.jsonl').touch()
  forbid(monkeypatch, tmp_path / 'a.jsonl')
  with refused(f'--output={tmp_path}/a.jsonl: {tmp_path}/a.jsonl cannot be written to'):
    generate.main([f'--workdir={run}', f'--prompts={prompts}', f'--output={tmp_path}/a.jsonl'])


def test_what_finds_the_disk_full_is_printed(trained_copy, tmp_path, monkeypatch, capsys):
  result = {'step': 12, 'tokens': 4, 'protocol': {'name': 'streams'}}
  monkeypatch.setattr(runs.Run, 'evaluate', lambda *args: result)
  fill(monkeypatch, 'test.json', 'a.json')
  with refused('test.json cannot be written: No space left on device'):
    evaluate.main([f'--workdir={trained_copy}'])
  assert json.loads(capsys.readouterr().out) == result
  with refused('a.json cannot be written'):
    language_modeling.save(result, tmp_path / 'a.json', [{'é': 1}], tmp_path / 'a.jsonl')
  assert capsys.readouterr().out.endswith('{"é": 1}\n')


@pytest.fixture
def no_model(monkeypatch):
  """Every prompt is continued by one token."""

  def completions(run, prompts, config, tokens, seed, context, on_text, *rest):
    for row, prompt in enumerate(prompts):
      on_text(row, '!')
      yield text.Completion(prompt, '!', [33], ended=False, seed=seed + row)

  monkeypatch.setattr(runs.Run, 'completions', completions)


def test_completions_that_find_the_disk_full_are_printed(
  trained, tmp_path, monkeypatch, capsys, no_model
):
  (tmp_path / 'prompts.txt').write_text('a\nb\nc\n')
  opened, path = [], tmp_path / 'out.jsonl'
  open_file = pathlib.Path.open

  def open_or_fail(self, *args, **options):
    if self == path:
      opened.append(self)
      if len(opened) > 2:
        raise OSError(errno.ENOSPC, 'No space left on device', str(path))
    return open_file(self, *args, **options)

  arguments = [f'--prompts={tmp_path}/prompts.txt', f'--output={path}', '--tokens=2']
  with monkeypatch.context() as patch:
    patch.setattr(pathlib.Path, 'open', open_or_fail)
    with refused(f'--output={path} cannot be written: No space left on device; the results that'):
      generate.main([f'--workdir={trained}', *arguments])
  lines = path.read_text().splitlines() + capsys.readouterr().out.splitlines()
  assert [json.loads(line)['prompt'] for line in lines] == ['a', 'b', 'c'] and len(opened) == 3


@pytest.mark.parametrize('number', [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_any_command_says_which_place_is_unusable(number, capsys):
  def fail(argv):
    raise OSError(number, os.strerror(number), '/some/file')

  with pytest.raises(SystemExit) as stopped:
    flags.run(fail)
  assert stopped.value.code == 2
  reason = os.strerror(number)
  remedy = (
    'free some space, or use another path' if number in file_errors.FULL else 'use another path'
  )
  assert capsys.readouterr().err == f'error: /some/file cannot be used: {reason}; {remedy}\n'


def test_results_of_different_inputs_have_different_names(trained_copy, tmp_path, monkeypatch):
  run, evaluated = trained_copy, []

  def score(self, path, limit):
    text = pathlib.Path(path).read_text()
    evaluated.append(path)
    return {'text': str(path), 'step': 12, 'content': text, 'protocol': {'name': 'streams'}}

  monkeypatch.setattr(runs.Run, 'evaluate_file', score)
  monkeypatch.setattr(language_modeling, 'format_table', str)
  names = 'a/test.txt', 'b/test.txt', 'a/test.jsonl', 'a/[1] é.txt'
  for name in names:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(name)
  for name in (*names, *names):
    evaluate.main([f'--workdir={run}', f'--text={tmp_path / name}'])
  monkeypatch.chdir(tmp_path)
  evaluate.main([f'--workdir={run}', '--text=b/test.txt'])
  folder = run / 'evaluation'
  contents = {path.name: json.loads(path.read_text())['content'] for path in folder.iterdir()}
  assert contents['text_test.json'] == 'a/test.txt' and contents['text_[1] é.json'] == 'a/[1] é.txt'
  assert set(contents.values()) == set(names)


def test_the_result_of_another_step_is_kept(tmp_path, caplog, monkeypatch):
  caplog.set_level('INFO')
  path, answers = tmp_path / 'test.json', tmp_path / 'test_answers.jsonl'
  for step in (4, 8, 8, 12):
    language_modeling.save({'step': step}, path, [{'of': step}], answers)
  read = lambda name: json.loads((tmp_path / name).read_text())
  results = [read(f'test{number}.json') for number in ('.1', '.2', '')]
  assert results == [{'step': 4}, {'step': 8}, {'step': 12}]
  kept = [read(f'test_answers{number}.jsonl') for number in ('.1', '.2', '')]
  assert kept == [{'of': 4}, {'of': 8}, {'of': 12}]
  assert len(list(tmp_path.iterdir())) == 6
  with monkeypatch.context() as patch, refused('test_answers.jsonl cannot be written'):
    fill(patch, answers.name)
    language_modeling.save({'step': 16}, path, [{'of': 16}], answers)
  assert read('test.json') == {'step': 12} and read('test_answers.jsonl') == {'of': 12}
  assert len(list(tmp_path.iterdir())) == 6
  assert f'the previous {path} is now test.1.json' in caplog.messages


@pytest.mark.parametrize(
  'first, second, kept',
  [
    ({'a.json': '1', 'a.png': b'1'}, {'a.json': '2', 'a.png': b'1'}, ['a.1.json', 'a.1.png']),
    ({'a.json': '1', 'a.png': b'1'}, {'a.json': '1', 'a.png': b'2'}, ['a.1.json', 'a.1.png']),
    ({'a.json': '1', 'a.png': b'1'}, {'a.json': '1', 'a.png': b'1'}, []),
    ({'a.png': b'1'}, {'a.json': '1', 'a.png': b'2'}, ['a.1.png']),
    ({'a.zip': b'1'}, {'a.zip': b'2'}, ['a.1.zip']),
    ({'a.zip': b'1'}, {'a.zip': b'1'}, []),
  ],
)
def test_another_result_keeps_its_name(tmp_path, first, second, kept):
  for contents in (first, second):
    result_files.write_results({tmp_path / name: content for name, content in contents.items()})
  assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*second, *kept])
  for name in kept:
    assert (tmp_path / name).read_bytes() == files.encode(first[name.replace('.1.', '.')])


@pytest.mark.parametrize('method', ['read_bytes', 'rename'])
@pytest.mark.parametrize('is_named', [True, False])  # errors of remote storage name no file
def test_a_previous_result_that_cannot_be_kept_loses_no_new_one(
  tmp_path, monkeypatch, capsys, method, is_named
):
  paths = tmp_path / 'a.json', tmp_path / 'b.json'
  result_files.write_results(dict.fromkeys(paths, 'old'))
  original = getattr(pathlib.Path, method)

  def fail(self, *args):
    if self == paths[1]:
      arguments = (errno.EACCES, 'Permission denied', str(self)) if is_named else ('Forbidden',)
      raise PermissionError(*arguments)
    return original(self, *args)

  name = f'{paths[1]}' if is_named else f'{paths[0]}, {paths[1]}'
  reason = 'Permission denied' if is_named else 'Forbidden'
  message = f'{name}, which is another result, cannot be kept: {reason}'
  with monkeypatch.context() as patch, refused(message):
    patch.setattr(pathlib.Path, method, fail)
    result_files.write_results(dict.fromkeys(paths, 'new') | {paths[0]: 'old'})
  assert capsys.readouterr().out == 'oldnew'
  assert {path: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(paths, 'old')


ANALYSES = {  # their arguments, the file that finds the disk full, and all files
  'spans': (['spans'], 'spans.json', {'spans.json', 'spans.png'}),
  'gates': (['gates'], 'gates.html', {'gates.json', 'gates.png', 'gates.html'}),
  'figure': (['spans', '--figure={}/a.svg'], 'a.svg', {'a.json', 'a.svg'}),
  'report': (['report', '--figure={}/a.png'], 'report.html', {'report.html', 'a.png'}),
  'compare': (['compare', '--baseline={}', '--output={}/a.json'], 'a.json', {'a.json'}),
}


@pytest.mark.parametrize(
  'arguments, full, names',
  [
    case if name == 'spans' else pytest.param(*case, marks=pytest.mark.full)
    for name, case in ANALYSES.items()
  ],
  ids=ANALYSES,
)
def test_an_analysis_loses_and_replaces_nothing(
  tmp_path, monkeypatch, capsys, arguments, full, names
):
  opened = types.SimpleNamespace(split=lambda name: None, published=None)
  monkeypatch.setattr(runs, 'load_run', lambda *args: opened)
  source = types.SimpleNamespace(open=lambda step: opened)
  monkeypatch.setattr(model_source, 'resolve', lambda *args: source)
  result = {'step': 1}
  for analysis in (spans, gates, compare):
    monkeypatch.setattr(analysis, 'analyze', lambda *args: dict(result))
  for analysis in (spans, gates):
    monkeypatch.setattr(analysis, 'check_applicable', lambda run: None)
    monkeypatch.setattr(analysis, 'plot', lambda *args: None)
    monkeypatch.setattr(analysis, 'elements', lambda *args: [])
  monkeypatch.setattr(compare, 'format_table', str)
  monkeypatch.setattr(report, 'collect', lambda *args: [])
  monkeypatch.setattr(report_page, 'plot_curves', lambda *args: None)
  for format in ('format_page', 'format_gates'):
    monkeypatch.setattr(report_page, format, lambda *args: f'page {result["step"]}')
  arguments = [argument.format(tmp_path) for argument in arguments]
  run = lambda: analyze.main([*arguments, f'--workdir={tmp_path}'])
  with monkeypatch.context() as patch:
    fill(patch, full)
    with refused(f'{tmp_path / full} cannot be written: No space left on device'):
      run()
  printed = capsys.readouterr().out
  assert ('page 1' if 'html' in full else '"step": 1') in printed and 'wrote' not in printed
  for step in (1, 1, 2):
    result['step'] = step
    run()
  assert f'wrote {tmp_path}/' in capsys.readouterr().out
  numbered = {name.replace('.', '.1.') for name in names}
  assert {path.name for path in tmp_path.iterdir()} == names | numbered


@pytest.mark.full
def test_an_export_and_a_start_on_a_full_disk_name_the_folder(trained, tiny, tmp_path, monkeypatch):
  def full(*args):
    raise OSError(errno.ENOSPC, 'No space left on device')  # without a name

  for module, name, format in (
    (os, 'fsync', 'run'),
    (safetensors, 'save', 'run'),
    (tensors, 'save', 'huggingface'),
  ):
    folder = tmp_path / f'{module.__name__}'
    with monkeypatch.context() as patch:
      patch.setattr(module, name, full)
      patch.setattr(configs, 'write', lambda *args: (families.FAMILIES['llama'], {}))
      with refused(f'--output={folder}: the disk is full: delete what is there'):
        export.main([f'--workdir={trained}', f'--output={folder}', f'--format={format}'])
  config, workdir = tiny(), tmp_path / 'run'
  with monkeypatch.context() as patch:
    patch.setattr(os, 'write', full)
    with refused(f'--workdir={workdir} cannot be written: No space left on device; free some'):
      loop.train(config, workdir)


def test_characters_that_a_terminal_lacks_are_escaped(trained, tmp_path, monkeypatch, no_model):
  prompts = ['1 €', 'é', '🙂', 'a']
  (tmp_path / 'prompts.txt').write_text('\n'.join(prompts), encoding='utf-8')
  sources = f'--prompt={"".join(prompts)}', f'--prompts={tmp_path}/prompts.txt'
  for encoding, source in itertools.product(('latin-1', 'ascii', 'utf-8'), sources):
    out = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, 'stdout', out)
    monkeypatch.setattr(sys, 'argv', ['generate', f'--workdir={trained}', source])
    with pytest.raises(SystemExit) as stopped:
      flags.run(generate.main)
    assert stopped.value.code == 0
    out.flush()
    text = out.buffer.getvalue().decode(encoding)
    if 'prompts.txt' in source:
      assert [json.loads(line)['prompt'] for line in text.splitlines()] == prompts
    else:
      expected = ''.join(prompts).encode(encoding, 'backslashreplace').decode(encoding)
      assert text.startswith(expected)
