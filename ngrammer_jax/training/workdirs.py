"""What a workdir holds beside its checkpoints, and which changes a resume allows.

config.json    the resolved config
corpus.json    hash of the text and the vocabulary settings it was prepared with
vocabulary.*   enough to read and write text without the corpus
"""

import dataclasses
import json
import logging
import pathlib
from typing import Any

from ngrammer_jax import config as experiment
from ngrammer_jax import errors
from ngrammer_jax.data import token_cache

CONFIG, CORPUS = 'config.json', 'corpus.json'

# May differ on resume; the content of the corpus is compared by its hash.
FREE_SECTIONS = ('mesh', 'evaluation')
FREE_KEYS = (
  'data.path',
  'data.vocabulary_path',
  'data.cache_dir',
  'training.log_every',
  'training.evaluate_every',
  'training.checkpoint_every',
  'training.keep_checkpoints',
)


def open_or_create(
  workdir: pathlib.Path, config: experiment.Config, corpus: token_cache.TokenCorpus
) -> None:
  """Makes a workdir, or checks that this is the run that an existing one belongs to.

  Raises:
    BadInput: the workdir is of another config or corpus, or cannot be written.
  """
  path = workdir / CONFIG
  if path.exists():
    _check_same(workdir, experiment.load(path), config, corpus)
  elif workdir.exists() and any(workdir.iterdir()):
    raise errors.BadInput(
      f'--workdir={workdir} is not empty and holds no {CONFIG}: it is not a run. Use another folder'
    )
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    corpus.vocabulary.save(workdir)
    (workdir / CORPUS).write_text(json.dumps({'content_hash': corpus.content_hash}) + '\n')
    experiment.save(config, path)
  except OSError as error:
    raise errors.BadInput(f'--workdir={workdir} cannot be written: {error.strerror}') from error


def load_config(workdir: pathlib.Path) -> experiment.Config:
  """The config of a run. Raises BadInput where there is none."""
  path = workdir / CONFIG
  if not path.exists():
    raise errors.BadInput(
      f'--workdir={workdir} holds no {CONFIG}: not a run of ngrammer_jax.train, or none yet'
    )
  return experiment.load(path)


def _check_same(workdir, before, now, corpus) -> None:
  differences = [
    (key, old, new)
    for (key, old), (_, new) in zip(_flat(before), _flat(now), strict=True)
    if old != new and key not in FREE_KEYS and key.split('.')[0] not in FREE_SECTIONS
  ]
  for key, old, new in differences:
    if key == 'training.steps' and new > old and now.optimizer.schedule in ('constant', 'rsqrt'):
      logging.info('going on from %s to %s steps', f'{old:,}', f'{new:,}')
      continue
    hint = ''
    if key == 'training.steps':
      hint = f' (schedule {now.optimizer.schedule!r} depends on the number of steps)'
    raise errors.BadInput(
      f'--workdir={workdir} was started with {key}={old!r}, now it is {new!r}{hint}: '
      f'use the old value, or another workdir'
    )
  kept = json.loads((workdir / CORPUS).read_text())['content_hash']
  if kept != corpus.content_hash:
    raise errors.BadInput(
      f'--workdir={workdir} was started on another text: data.path={now.data.path} has the '
      f'content hash {corpus.content_hash[:12]}, expected {kept[:12]}'
    )


def _flat(config: Any) -> list[tuple[str, Any]]:
  """Leaves of a config by dotted key; an optional block that is None is a leaf."""
  leaves = []
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if dataclasses.is_dataclass(value) and field.name != 'ngram':
      leaves += [(f'{field.name}.{key}', v) for key, v in _flat(value)]
    else:
      leaves.append((field.name, value))
  return leaves
