"""Writes a SuperGLUE submission: python -m ngrammer_jax.submit --workdir=DIR --output=DIR.

--workdir=DIR is a run of the task `all` or `mixture`; or repeat it for the runs of single tasks.
--config.data.superglue_dir=DIR replaces the folder of tasks of the fine-tuning.
"""

from ngrammer_jax import command_line, errors, flags
from ngrammer_jax.runs import model_source
from ngrammer_jax.system import compilation_cache, hosts, result_files, storage


def main(argv: list[str]) -> int:
  """Answers the test splits of the ten tasks, and writes their files and submission.zip."""
  parser = flags.make_parser('submit', __doc__)
  text = 'run directory of a fine-tuning, or a folder of several; can be repeated'
  parser.add_argument('--workdir', type=storage.path, required=True, action='append', help=text)
  parser.add_argument('--output', type=storage.path, required=True, help='folder of the ten files')
  parser.add_argument('--step', default='newest', help="step number, 'newest' or 'best'")
  compilation_cache.add_flag(parser)
  hosts.add_flags(parser)
  overrides, plain = command_line.split(argv)
  options = parser.parse_args(plain)
  step = model_source.read_step(options.step)
  flags.start_evaluation(options)

  from ngrammer_jax.tasks.superglue import finetuning, leaderboard

  with hosts.collective_errors():  # everything is checked before any task is answered
    storage.check_reachable(options.output)
    run_by_task = leaderboard.find_runs(options.workdir, step)
    for task in leaderboard.TASKS:
      run_by_task[task] = leaderboard.with_task(run_by_task[task], task, overrides)
    result_files.make_output_folder(options.output)
  written = []
  unwritten = []
  for run in run_by_task.values():
    if not overrides:
      run.log_paths('superglue_dir')
    *_, submissions = finetuning.evaluate(run, 'test')
    if not hosts.is_primary():
      continue
    for name, text in submissions.items():
      try:
        result_files.write_results({options.output / name: text})
        written.append(name)
      except errors.BadInput as error:  # the other tasks are answered all the same
        unwritten.append(name)
        failure = error
  if unwritten:
    raise errors.BadInput(
      f'{failure}. {", ".join(unwritten)} are on standard output, in this order; {options.output} '
      f'has {", ".join(written) or "none"}'
    )
  if hosts.is_primary():
    print(f'wrote {len(run_by_task)} files to {leaderboard.write_zip(options.output)}')
  return 0


if __name__ == '__main__':
  flags.run(main)
