"""The submission to the SuperGLUE leaderboard, with a fake evaluation."""

import errno
import json
import shutil
import zipfile

import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax import submit
from ngrammer_jax.checkpoints import reader
from ngrammer_jax.system import files
from ngrammer_jax.tasks.superglue import formats, submission
from tests.checks import bad_input
from tests.tasks import superglue_examples

FILES = {
  'BoolQ.jsonl',
  'CB.jsonl',
  'COPA.jsonl',
  'MultiRC.jsonl',
  'ReCoRD.jsonl',
  'RTE.jsonl',
  'WiC.jsonl',
  'WSC.jsonl',
  'AX-b.jsonl',
  'AX-g.jsonl',
}


@pytest.fixture
def folder(tmp_path, finetuning, monkeypatch):
  """Returns a folder with the examples, and runs of all tasks without arrays.

  A fake evaluation answers with the name of the run and of the task.
  """
  superglue_examples.write_folders(tmp_path / 'superglue')
  for task in formats.SUPERGLUE_TASKS:
    write_run(tmp_path / 'all' / task, task, tmp_path / 'moved')
  (tmp_path / 'all' / 'evaluation').mkdir()
  monkeypatch.setattr(reader, 'steps', lambda workdir: [4])

  def evaluate(run, split):
    assert split == 'test' and run.config.data.superglue_dir == str(tmp_path / 'superglue')
    task = run.config.finetune.task
    return {}, [], {submission.file_name(task): f'{run.workdir.name} {task} {run.step}'}

  monkeypatch.setattr(finetuning, 'evaluate', evaluate)
  return tmp_path


def write_run(workdir, task, superglue_dir):
  workdir.mkdir(parents=True)
  config = {'finetune': {'task': task}, 'data': {'superglue_dir': str(superglue_dir)}}
  experiment.save(experiment.resolve(config), workdir / 'config.json')


def run(folder, *workdirs, **flags):
  flags = {'config.data.superglue_dir': folder / 'superglue', 'output': folder / 'out'} | flags
  return submit.main(
    [f'--workdir={folder / name}' for name in workdirs]
    + [f'--{name}={value}' for name, value in flags.items()]
  )


def written(folder):
  with zipfile.ZipFile(folder / 'out' / 'submission.zip') as archive:
    assert archive.testzip() is None and set(archive.namelist()) == FILES
    texts = {name: archive.read(name).decode() for name in archive.namelist()}
  assert texts == {name: (folder / 'out' / name).read_text() for name in FILES}
  assert {path.name for path in (folder / 'out').iterdir()} == FILES | {'submission.zip'}
  return texts


def test_runs_of_all_tasks_in_one_folder(folder, capsys):
  assert run(folder, 'all', step='best') == 0
  texts = written(folder)
  assert texts['BoolQ.jsonl'] == 'boolq boolq best' and texts['WSC.jsonl'] == 'wsc wsc best'
  # The diagnostic sets are answered by the run of RTE.
  assert texts['AX-b.jsonl'] == 'rte axb best' and texts['AX-g.jsonl'] == 'rte axg best'
  assert capsys.readouterr().out == f'wrote 10 files to {folder / "out" / "submission.zip"}\n'
  first = (folder / 'out' / 'submission.zip').read_bytes()
  run(folder, 'all', step='best')
  assert (folder / 'out' / 'submission.zip').read_bytes() == first


def test_runs_of_single_tasks_and_of_the_mixture(folder):
  write_run(folder / 'joint', 'mixture', 'moved')
  assert run(folder, 'joint') == 0
  assert written(folder)['CB.jsonl'] == 'joint cb newest'
  assert written(folder)['AX-b.jsonl'] == 'joint axb newest'
  shutil.rmtree(folder / 'out')
  # Runs of single tasks, one of them in the format of T5.
  (folder / 'all' / 'wsc').rename(folder / 'old')
  write_run(folder / 'referents', 'wsc_simple', 'moved')
  assert run(folder, 'all', 'referents') == 0
  assert written(folder)['WSC.jsonl'] == 'referents wsc_simple newest'


def test_a_full_disk_and_other_answers_lose_nothing(folder, monkeypatch, capsys):
  write = files.write

  def write_or_fail(path, content):
    if path.name in full:
      raise OSError(errno.ENOSPC, 'No space left on device')
    write(path, content)

  monkeypatch.setattr(files, 'write', write_or_fail)
  out, full = folder / 'out', ('CB.jsonl', 'AX-b.jsonl')
  from ngrammer_jax.tasks.superglue import leaderboard  # imports TensorFlow

  others = [name for name in map(submission.file_name, leaderboard.TASKS) if name not in full]
  with bad_input(
    f'{out}/AX-b.jsonl cannot be written: No space left on device. CB.jsonl, AX-b.jsonl are on '
    f'standard output, in this order; {out} has {", ".join(others)}'
  ):
    run(folder, 'all')
  assert capsys.readouterr().out == 'cb cb newestrte axb newest'
  assert {path.name for path in out.iterdir()} == {*others}
  full = ()
  run(folder, 'all', step='best')
  written = {path.name: path.read_text() for path in out.glob('*.jsonl')}
  assert written['WiC.1.jsonl'] == 'wic wic newest' and written['WiC.jsonl'] == 'wic wic best'
  assert {*written} == FILES | {name.replace('.', '.1.') for name in others}
  run(folder, 'all')
  assert (out / 'submission.1.zip').exists()


def test_errors_are_found_before_any_task_is_answered(folder, monkeypatch):
  for name in ('cb', 'wsc'):
    (folder / 'all' / name).rename(folder / name)
  workdirs = f'--workdir={folder / "all"} --workdir={folder / "cb"}'
  with bad_input(
    f'{workdirs} has no run of wsc, but the leaderboard needs all of boolq, cb, copa, multirc, '
    'record, rte, wic, wsc: fine-tune the missing tasks, and add --workdir=DIR for each'
  ):
    run(folder, 'all', 'cb')
  write_run(folder / 'other', 'cb', 'moved')
  with bad_input(
    f'--workdir={folder / "cb"} and --workdir={folder / "other"} are both runs of cb: omit one of '
    'them'
  ):
    run(folder, 'all', 'cb', 'other', 'wsc')
  with pytest.raises(ValueError, match='holds no config.json: not a run'):
    run(folder, 'superglue')
  experiment.save(experiment.resolve({}), folder / 'config.json')
  with bad_input(
    f'--workdir={folder} is not fine-tuned on a task: expected a run of ngrammer_jax.finetune'
  ):
    run(folder, '.')
  with bad_input('--config.finetune.task: only data.superglue_dir can be changed here'):
    run(folder, 'all', 'cb', 'wsc', **{'config.finetune.task': 'rte'})
  with monkeypatch.context() as patch:
    patch.setattr(reader, 'steps', lambda workdir: [])
    with bad_input(f'--workdir={folder / "wsc"} has no checkpoint yet'):
      run(folder, 'wsc')
  (folder / 'superglue' / 'ReCoRD' / 'test.jsonl').unlink()
  with pytest.raises(ValueError, match='has no test split of SuperGLUE record: expected the file'):
    run(folder, 'all', 'cb', 'wsc')
  assert not (folder / 'out').exists()
  superglue_examples.write_folders(folder / 'superglue')
  (folder / 'out').write_text('a file')
  output = folder / 'out'
  with bad_input(f'--output={output}: {output} is a file, expected a folder'):
    run(folder, 'all', 'cb', 'wsc')


def check_files(output, superglue):
  """Checks that a submission has one answer of the right kind to every test example."""
  with zipfile.ZipFile(output / 'submission.zip') as archive:
    assert set(archive.namelist()) == FILES
  for name in FILES:
    task = name.removesuffix('.jsonl')
    split = task if task.startswith('AX') else 'test'
    questions = [json.loads(line) for line in (superglue / task / f'{split}.jsonl').open()]
    answers = [json.loads(line) for line in (output / name).open()]
    if task == 'ReCoRD':
      questions = [query for row in questions for query in row['qas']]
    assert [int(row['idx']) for row in questions] == [row['idx'] for row in answers]
    for question, answer in zip(questions, answers, strict=True):
      if task == 'MultiRC':
        assert shape(question['passage']) == shape(answer['passage'])
      elif task != 'ReCoRD':
        assert answer['label'] in LABELS.get(task, ('entailment', 'not_entailment'))


LABELS = {
  **dict.fromkeys(('BoolQ', 'WiC', 'WSC'), ('true', 'false')),
  'CB': ('entailment', 'contradiction', 'neutral'),
  'COPA': (0, 1),
}


def shape(passage):
  """The indices of the questions and of their answers."""
  return [(q['idx'], [a['idx'] for a in q['answers']]) for q in passage['questions']]
