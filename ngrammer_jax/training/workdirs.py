"""What a workdir holds beside its checkpoints, and which changes a resume allows.

config.json    the resolved config
corpus.json    hash of the text and the vocabulary settings it was prepared with
vocabulary.*   enough to read and write text without the corpus
lock           held by the process that trains
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import pathlib
import socket
import time
from typing import TYPE_CHECKING, Any, TextIO

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, files, hosts

if TYPE_CHECKING:
  from ngrammer_jax.training import material

CONFIG, CORPUS, LOCK = 'config.json', 'corpus.json', 'lock'
OURS = ('config', 'corpus', 'vocabulary', 'lock')  # all that a start which was killed leaves behind

# May differ on resume; the content of the corpus is compared by its hash.
FREE_SECTIONS = ('mesh', 'evaluation')
FREE_KEYS = (
  'data.path',
  'data.vocabulary_path',
  'data.cache_dir',
  'data.superglue_dir',
  'finetune.tfds_dir',
  'finetune.download',
  'training.log_every',
  'training.evaluate_every',
  'training.checkpoint_every',
  'training.keep_checkpoints',
  # How the same numbers are computed.
  'model.scan_layers',
  'model.remat',
  'model.vocabulary_chunk',
  'model.kernel',
  'model.ngram.exchange',
)


def check(workdir: pathlib.Path, config: experiment.Config) -> None:
  """Raises BadInput where a workdir is of another config, or is not one of ours."""
  files.reach(workdir)
  if not files.stored(workdir):
    _check_folder(workdir)
  if (workdir / CONFIG).exists():
    _check_same(workdir, load_config(workdir), config)
  elif workdir.exists() and any(p.name.split('.')[0] not in OURS for p in workdir.iterdir()):
    raise errors.BadInput(
      f'--workdir={workdir} is not empty and holds no {CONFIG}: it is not a run. Use another folder'
    )


def _check_folder(workdir: pathlib.Path) -> None:
  place = workdir.absolute()
  while not place.exists():
    place = place.parent
  if not place.is_dir():
    raise errors.BadInput(f'--workdir={workdir}: {place} is a file, expected a folder')
  if not os.access(place, os.W_OK):
    raise errors.BadInput(f'--workdir={workdir}: {place} cannot be written to')


def check_text(workdir: pathlib.Path, config: experiment.Config, text: str) -> None:
  """Raises BadInput where a workdir was started on a corpus of another content hash."""
  path = workdir / CORPUS
  before = json.loads(path.read_text())['content_hash'] if path.exists() else None
  if before is None and not (workdir / CONFIG).exists():
    return  # not begun
  if before is None:
    raise errors.BadInput(
      f'--workdir={workdir} holds no {CORPUS}: which text it was started on is not known; '
      f'use another workdir'
    )
  if before != text:
    key = 'path' if config.finetune is None else 'superglue_dir'
    raise errors.BadInput(
      f'--workdir={workdir} was started on another text: data.{key}='
      f'{getattr(config.data, key)} has the content hash {text[:12]}, expected {before[:12]}; '
      f'give that text, or use another workdir'
    )


@contextlib.contextmanager
def occupy(
  workdir: pathlib.Path, config: experiment.Config, given: 'material.Material'
) -> Iterator[None]:
  """Keeps a workdir to this process, and writes what it holds beside its checkpoints.

  The lock goes with the process, however that ends. Of several processes the first one has it.

  Raises:
    BadInput: another process trains there, or the folder cannot be written, or it is not the
      same folder for all processes.
  """
  with contextlib.ExitStack() as held:
    hosts.by_first(_begin, workdir, config, given, held)
    with hosts.together():
      _wait_for(workdir / CONFIG)
      check(workdir, config)
      if not (workdir / CONFIG).exists():
        raise errors.BadInput(
          f'--workdir={workdir} is not the same folder for all processes: the first one writes '
          f'there what all read; use a folder that they share'
        )
    yield


def _wait_for(path: pathlib.Path, seconds: float = 60) -> None:
  """A network file system may not show at once what another host has written."""
  until = time.monotonic() + seconds * (not hosts.first())
  while not path.exists() and time.monotonic() < until:
    time.sleep(0.5)


def _begin(workdir, config, given, held) -> None:
  try:
    files.make(workdir)
    if files.stored(workdir):
      logging.info('%s cannot be locked: start no second process', workdir)
    else:
      _lock(workdir, held.enter_context((workdir / LOCK).open('a+', encoding='utf-8')))
    check(workdir, config)  # again: another run may have been here meanwhile
    check_text(workdir, config, given.content_hash)
    given.vocabulary.save(workdir)
    files.write(workdir / CORPUS, json.dumps({'content_hash': given.content_hash}) + '\n')
    experiment.save(config, workdir / CONFIG)
  except OSError as error:
    why = error.strerror or error
    raise errors.BadInput(f'--workdir={workdir} cannot be written: {why}') from error


def _lock(workdir: pathlib.Path, file: TextIO) -> None:
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    file.seek(0)
    raise errors.BadInput(
      f'--workdir={workdir} is in use by {file.read().strip() or "another process"}: '
      f'wait for it, stop it, or use another workdir'
    ) from error
  except OSError as error:
    logging.warning('%s cannot be locked: %s; start no second process', workdir, error.strerror)
  file.seek(0)
  file.truncate()
  file.write(f'process {os.getpid()} on {socket.gethostname()}\n')
  file.flush()


def load_config(workdir: pathlib.Path) -> experiment.Config:
  """The config of a run. Raises BadInput where there is none."""
  files.reach(workdir)
  path = workdir / CONFIG
  if not path.exists():
    raise errors.BadInput(
      f'--workdir={workdir} holds no {CONFIG}: not a run of ngrammer_jax.train, or none yet'
    )
  try:
    return experiment.load(path)
  except errors.BadInput as error:
    raise errors.BadInput(
      f'--workdir={workdir} has a {CONFIG} that this version of ngrammer_jax cannot read: {error}'
    ) from error
  except json.JSONDecodeError as error:
    raise errors.BadInput(
      f'--workdir={workdir} has a damaged {CONFIG}, line {error.lineno}: {error.msg}'
    ) from error


def _check_same(workdir: pathlib.Path, before: experiment.Config, now: experiment.Config) -> None:
  for key, old, new in _differences(before, now):
    if key in FREE_KEYS or key.split('.')[0] in FREE_SECTIONS:
      continue
    hint = ''
    if key == 'training.steps' and new > old:
      if now.optimizer.schedule in ('constant', 'rsqrt') and now.optimizer.drop is None:
        logging.info('going on from %s to %s steps', f'{old:,}', f'{new:,}')
        continue
      what = 'optimizer.drop' if now.optimizer.drop else f'schedule {now.optimizer.schedule!r}'
      hint = f' ({what} depends on the number of steps)'
    raise errors.BadInput(
      f'--workdir={workdir} was started with {key}={old!r}, now it is {new!r}{hint}: '
      f'use the old value, or another workdir'
    )


def _differences(before: Any, now: Any, path: str = '') -> list[tuple[str, Any, Any]]:
  """Dotted key, old and new value of every difference; a block that comes or goes is one."""
  found = []
  for field in dataclasses.fields(before):
    key, old, new = path + field.name, getattr(before, field.name), getattr(now, field.name)
    if dataclasses.is_dataclass(old) and dataclasses.is_dataclass(new):
      found += _differences(old, new, f'{key}.')
    elif old != new:
      found.append((key, old, new))
  return found
