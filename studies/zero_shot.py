"""SuperGLUE by SmolLM2 without fine-tuning: answers to questions are ranked.

  python -m studies.zero_shot --data=/path/to/corpora

evaluates the validation split of each task from `superglue` in that folder. Writes zero_shot.jsonl,
and skips tasks with a line in it.
"""

import argparse
import dataclasses
import logging
import os
import pathlib
import time

from ngrammer_jax import flags, runs
from ngrammer_jax.config.finetune import FinetuneConfig
from ngrammer_jax.system import compilation_cache
from studies import results
from studies import run as study_run

MODEL = 'smollm2_135m_instruct'
# Examples of a task, the first ones; None: all. Those that cost least come first.
TASKS = {'copa': None, 'cb': None, 'wsc': None, 'rte': None, 'wic': None, 'boolq': 500}


def measure(run: runs.Run, task: str, max_examples: int | None) -> results.Result:
  """Returns the metrics of a task, its majority class, and the time that it took."""
  from ngrammer_jax.tasks.superglue import finetuning

  finetune = FinetuneConfig(task=task, format='question', targets_length=32)
  training = dataclasses.replace(run.config.training, batch_size=8)
  model = dataclasses.replace(run.config.model, dtype='float32')
  config = dataclasses.replace(run.config, model=model, finetune=finetune, training=training)
  run = dataclasses.replace(run, config=config)
  start = time.monotonic()
  cpu = time.process_time()
  result, *_ = finetuning.evaluate(run, 'validation', max_examples=max_examples)
  times = {'seconds': time.monotonic() - start, 'cpu_seconds': time.process_time() - cpu}
  names = 'n', 'accuracy', 'f1', 'majority_percent'
  scores = {name: round(result[name], 2) for name in names if name in result}
  line = {'task': task, **scores, **{name: round(value) for name, value in times.items()}}
  return line | {'hardware': study_run.hardware(os.cpu_count())}


def main(argv: list[str]) -> int:
  """Evaluates what has no line yet."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--data', type=pathlib.Path, required=True, help='folder of the corpora')
  parser.add_argument('--tasks', nargs='*', choices=TASKS, default=TASKS, help='these alone')
  options = parser.parse_args(argv)
  compilation_cache.enable(compilation_cache.DEFAULT)
  run = runs.load_pretrained(MODEL)
  data = dataclasses.replace(run.config.data, superglue_dir=str(options.data / 'superglue'))
  run = dataclasses.replace(run, config=dataclasses.replace(run.config, data=data))
  done = {line['task'] for line in results.read(results.ZERO_SHOT)}
  for task in options.tasks:
    if task not in done:
      line = measure(run, task, TASKS[task])
      results.append(results.ZERO_SHOT, line)
      logging.info('%s', line)
  return 0


if __name__ == '__main__':
  flags.run(main)
