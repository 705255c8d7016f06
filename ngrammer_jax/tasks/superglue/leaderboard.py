"""The submission to the SuperGLUE leaderboard: ten files of answers, and a zip of them."""

from collections.abc import Sequence
import dataclasses
import io
import pathlib
import zipfile

from ngrammer_jax import command_line, errors, runs
from ngrammer_jax.checkpoints import reader
from ngrammer_jax.system import result_files
from ngrammer_jax.tasks.superglue import finetuning, formats, submission

ZIP = 'submission.zip'
DIAGNOSTICS = ('axb', 'axg')  # answered by the run of RTE
TASKS = (*formats.SUPERGLUE_TASKS, *DIAGNOSTICS)


def find_runs(workdirs: Sequence[pathlib.Path], step: int | str) -> dict[str, runs.Run]:
  """Returns the run for each of the ten tasks. Touches no device.

  Args:
    workdirs: run directories, of single tasks or of `mixture`; or folders of the task `all`.
    step: checkpoint: a step number, `newest`, or `best`.

  Raises:
    BadInput: a task has no run or two runs, or a folder is no fine-tuned run with a checkpoint.
  """
  run_by_task: dict[str, runs.Run] = {}
  for workdir in workdirs:
    for folder in _run_folders(workdir):
      run = runs.load_run(folder, step)
      for task in _check_run(run):
        if task == 'wsc_simple':
          task = 'wsc'
        if task in run_by_task:
          raise errors.BadInput(
            f'--workdir={run_by_task[task].workdir} and --workdir={folder} are both runs of '
            f'{task}: omit one of them'
          )
        run_by_task[task] = run
  missing = [task for task in formats.SUPERGLUE_TASKS if task not in run_by_task]
  if missing:
    raise errors.BadInput(
      f'--workdir={" --workdir=".join(map(str, workdirs))} has no run of {", ".join(missing)}, but '
      f'the leaderboard needs all of {", ".join(formats.SUPERGLUE_TASKS)}: fine-tune the missing '
      f'tasks, and add --workdir=DIR for each'
    )
  return run_by_task | dict.fromkeys(DIAGNOSTICS, run_by_task['rte'])


def _run_folders(workdir: pathlib.Path) -> list[pathlib.Path]:
  """Returns a run directory itself, or the run directories in a folder of the task `all`."""
  folders = [workdir / task for task in formats.SUPERGLUE_TASKS]
  folders = [folder for folder in folders if (folder / 'config.json').exists()]
  is_run = (workdir / 'config.json').exists()
  if is_run or not folders:
    return [workdir]
  return folders


def _check_run(run: runs.Run) -> tuple[str, ...]:
  """Returns the tasks of a run. Raises BadInput if it cannot answer any."""
  if run.config.finetune is None:
    raise errors.BadInput(
      f'--workdir={run.workdir} is not fine-tuned on a task: expected a run of '
      f'ngrammer_jax.finetune'
    )
  if not reader.steps(run.workdir):
    raise errors.BadInput(f'--workdir={run.workdir} has no checkpoint yet')
  return finetuning.task_names(run.config)


def with_task(run: runs.Run, task: str, overrides: list[tuple[str, str]]) -> runs.Run:
  """Returns the run for one of the ten tasks, with the local paths of the examples.

  Raises BadInput if another key is overridden, or the test examples are missing or damaged.
  """
  config = command_line.override(run.config, overrides, 'data.superglue_dir')
  if config.finetune.task != 'wsc_simple':
    config = dataclasses.replace(config, finetune=dataclasses.replace(config.finetune, task=task))
  finetuning.check_examples(config, ('test',))
  return dataclasses.replace(run, config=config)


def write_zip(folder: pathlib.Path) -> pathlib.Path:
  """Writes a zip of the ten files in a folder, and returns its path."""
  path = folder / ZIP
  content = io.BytesIO()
  with zipfile.ZipFile(content, 'w') as archive:
    for task in TASKS:
      name = submission.file_name(task)
      # ZipInfo has a fixed time, so equal answers are equal files.
      archive.writestr(zipfile.ZipInfo(name), (folder / name).read_bytes(), zipfile.ZIP_DEFLATED)
  result_files.write_results({path: content.getvalue()})
  return path
