"""The files of a workdir other than checkpoints, and the config changes allowed on resume.

config.json    the resolved config
corpus.json    hash of the text and of the vocabulary settings; null: of an unknown text
published.json family, token ids and generation settings of the published model in init_from
vocabulary.*   vocabulary, to encode and decode text without the corpus
lock           held by the training process
"""

from collections.abc import Iterator
import contextlib
import fcntl
import json
import logging
import os
import pathlib
import socket
import time
from typing import Any, TextIO

from ngrammer_jax import config as experiment
from ngrammer_jax import errors
from ngrammer_jax.checkpoints import frozen, reader
from ngrammer_jax.config import conversion, fields, optimizer
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.vocabularies import Vocabulary
from ngrammer_jax.system import file_errors, files, hosts, json_files, storage

CONFIG = 'config.json'
CORPUS = 'corpus.json'
LOCK = 'lock'
ORIGIN = 'published.json'
EXPORTED = 'model.safetensors'  # the variables of an exported run, see `runs.exported`
# A killed start may leave these.
OWN_FILES = 'config', 'corpus', 'vocabulary', 'lock', frozen.FOLDER
SHARED_SECONDS = 60  # after which all processes see a file of the primary
# With `init_from` of this run, another run may change all keys in these sections.
INDEPENDENT_SECTIONS = 'optimizer', 'training', 'seed'
REMEDY = 'restore it from a backup, or use another workdir'


def check_workdir(workdir: pathlib.Path, config: experiment.Config) -> None:
  """Raises BadInput if a folder cannot be a workdir, or has a checkpoint of another config."""
  storage.check_reachable(workdir)
  files.check_writable(f'--workdir={workdir}', workdir)
  if is_exported(workdir):
    raise errors.BadInput(
      f'--workdir={workdir} is an exported run, which cannot be resumed: use another workdir, and '
      f'--config.init_from={workdir} to start from it'
    )
  if (workdir / CONFIG).exists():
    old_config = load_config(workdir)
    if reader.steps(workdir):
      _check_same(workdir, old_config, config)
  elif workdir.exists() and any(p.name.split('.')[0] not in OWN_FILES for p in workdir.iterdir()):
    raise errors.BadInput(
      f'--workdir={workdir} is not empty and holds no {CONFIG}: it is not a run. Use another folder'
    )


def with_kept_values(workdir: pathlib.Path, config: experiment.Config) -> experiment.Config:
  """Returns the config for resuming a run: some keys keep their stored values.

  See `config.fields.Key.kept_on_resume`. Raises BadInput if the stored config cannot be read.
  """
  storage.check_reachable(workdir)
  if not (workdir / CONFIG).exists() or not reader.steps(workdir):
    return config
  resumed = experiment.with_kept_values(load_config(workdir), config)
  for key, stored_value, _ in experiment.differences(resumed, config, may_differ=lambda key: False):
    message = f'{key.path}={stored_value}, as the run was started'
    if key.free_on_resume:
      message += f'; to change it, set another value than {key.default}'
    logging.info('%s', message)
  return resumed


def _log_changes(workdir: pathlib.Path, config: experiment.Config) -> None:
  """Logs the changed keys of a resumed run; `check_workdir` has accepted the changes."""
  stored = load_config(workdir)
  for key, old, new in experiment.differences(stored, config, may_differ=lambda key: False):
    if key.path == 'training.loss':  # the same loss: earlier versions stored no name
      continue
    logging.info(
      '%s was %s, now it is %s', key.path, fields.format_value(old), fields.format_value(new)
    )


def is_exported(workdir: pathlib.Path) -> bool:
  """Whether a folder is an exported run, with variables but no checkpoints."""
  return (workdir / EXPORTED).exists() and not (workdir / 'checkpoints').exists()


def check_loss(workdir: pathlib.Path, config: experiment.Config) -> None:
  """Raises BadInput if a workdir was started with another loss. Earlier versions stored no name."""
  if not reader.steps(workdir) or not (workdir / CONFIG).exists():
    return
  before = load_config(workdir).training.loss
  if before not in (None, config.training.loss):
    raise errors.BadInput(
      f'--workdir={workdir} was started with the loss {before!r}, now it is '
      f'{config.training.loss!r}: use the task with the old loss, or another workdir'
    )


def check_text(workdir: pathlib.Path, config: experiment.Config, content_hash: str) -> None:
  """Raises BadInput if a workdir was started with another text or vocabulary."""
  if not reader.steps(workdir) and not is_exported(workdir):
    return  # nothing was learned from a text
  previous = read_content_hash(workdir)
  if previous is not None and not content_hash.startswith(previous):  # see `mixture.Mixture`
    data = config.data
    if data.vocabulary_path is not None and (workdir / 'vocabulary.json').exists():
      vocabulary = vocabularies.load(workdir)
      vocabularies.check_path(data.vocabulary, data.vocabulary_path, vocabulary, workdir)
    if config.finetune is not None:
      text_key = f'data.superglue_dir={data.superglue_dir}'
    elif data.mixture:
      text_key = 'data.mixture'
    else:
      text_key = f'data.path={data.path}'
    raise errors.BadInput(
      f'--workdir={workdir} was started on another text: {text_key} has the content hash '
      f'{content_hash[-12:]}, expected {previous[-12:]}; use that text, or another workdir'
    )


def read_content_hash(workdir: pathlib.Path) -> str | None:
  """Returns the hash of the initial text of a workdir; None: unknown.

  Raises:
    BadInput: the file is missing or damaged.
  """
  path = workdir / CORPUS
  if not path.exists():
    raise errors.BadInput(
      f'--workdir={workdir} holds no {CORPUS}: its text is unknown; use another workdir'
    )
  with file_errors.translate_damage(path, REMEDY):
    content_hash = json_files.read(path)['content_hash']
    if content_hash is not None and not isinstance(content_hash, str):
      raise TypeError(f'content_hash is {content_hash!r}, expected text or null')
    return content_hash


def write(
  folder: pathlib.Path, config: experiment.Config, vocabulary: Vocabulary, content_hash: str | None
) -> None:
  """Writes the vocabulary, the hash of the text and the config."""
  vocabulary.save(folder)
  files.write(folder / CORPUS, json.dumps({'content_hash': content_hash}) + '\n')
  experiment.save(config, folder / CONFIG)


def write_config(workdir: pathlib.Path, config: experiment.Config) -> None:
  """Replaces the config written by `lock_workdir`, with values selected by the run."""
  experiment.save(config, workdir / CONFIG)


def read_origin(workdir: pathlib.Path) -> dict[str, Any]:
  """Returns the origin written by `write_origin`; {} if training had no published model."""
  path = workdir / ORIGIN
  with file_errors.translate_damage(path, REMEDY):
    if not path.exists():
      return {}
    return json_files.read(path)


def write_origin(folder: pathlib.Path, origin: dict[str, Any]) -> None:
  """Writes `PublishedModel.origin`, if any."""
  if origin:
    files.write(folder / ORIGIN, json.dumps(origin, indent=2) + '\n')


@contextlib.contextmanager
def lock_workdir(
  workdir: pathlib.Path, config: experiment.Config, vocabulary: Vocabulary, content_hash: str
) -> Iterator[None]:
  """Locks a workdir and writes its files other than checkpoints, in the primary process.

  The system releases the lock when the process ends, even if killed.

  Raises:
    BadInput: a lock of another process, a folder that cannot be written, or a folder that is not
      shared by the processes.
  """
  with contextlib.ExitStack() as stack:
    hosts.on_primary(_initialize, workdir, config, vocabulary, content_hash, stack)
    with hosts.collective_errors():
      _wait_for_config(workdir)
    yield


def _wait_for_config(workdir: pathlib.Path) -> None:
  """Waits for a file of the primary process: network file systems may show it late."""
  deadline = time.monotonic() + SHARED_SECONDS
  while not (workdir / CONFIG).exists():
    if time.monotonic() > deadline:
      raise errors.BadInput(
        f'--workdir={workdir} is not shared by all processes: they read files that process 0 '
        f'writes there; use a shared folder'
      )
    time.sleep(0.5)


def _initialize(
  workdir: pathlib.Path,
  config: experiment.Config,
  vocabulary: Vocabulary,
  content_hash: str,
  stack: contextlib.ExitStack,
) -> None:
  """Locks a workdir until the stack is left, checks it again, and writes its files."""
  try:
    files.make_folder(workdir)
    if storage.is_remote(workdir):
      logging.info('%s cannot be locked: do not start a second process', workdir)
    else:
      _lock(workdir, stack.enter_context((workdir / LOCK).open('a+', encoding='utf-8')))
    check_workdir(workdir, config)  # again: another run may have started meanwhile
    check_text(workdir, config, content_hash)
    if reader.steps(workdir):
      _log_changes(workdir, config)
    else:
      (workdir / ORIGIN).unlink(missing_ok=True)  # of an earlier start
    write(workdir, config, vocabulary, content_hash)
  except OSError as error:
    reason = error.strerror or error
    raise errors.BadInput(
      f'--workdir={workdir} cannot be written: {reason}; {file_errors.remedy(error)}'
    ) from error


def _lock(workdir: pathlib.Path, file: TextIO) -> None:
  """Locks the open lock file. Raises BadInput if another process holds the lock."""
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    file.seek(0)
    raise errors.BadInput(
      f'--workdir={workdir} is in use by {file.read().strip() or "another process"}: '
      f'wait for it, stop it, or use another workdir'
    ) from error
  except OSError as error:
    logging.warning(f'{workdir} cannot be locked: {error.strerror}; do not start a second process')
  os.truncate(file.fileno(), 0)
  # Without a buffer: on a full disk, closing the file would raise once more.
  os.write(file.fileno(), f'process {os.getpid()} on {socket.gethostname()}\n'.encode())


def load_config(workdir: pathlib.Path) -> experiment.Config:
  """Returns the config of a run. Raises BadInput without one."""
  storage.check_reachable(workdir)
  path = workdir / CONFIG
  if not path.exists():
    problem = 'does not exist'
    if workdir.exists():
      problem = f'holds no {CONFIG}: not a run directory'
    raise errors.BadInput(f'--workdir={workdir} {problem}; expected the folder of a training')
  unreadable = f'--workdir={workdir} has a {CONFIG} that this version of ngrammer_jax cannot read'
  with file_errors.translate_damage(path, REMEDY), errors.named(unreadable):
    return conversion.load_stored(path)


def _check_same(workdir: pathlib.Path, old_config: experiment.Config, config: experiment.Config):
  """Raises BadInput for a difference that is not allowed on resume."""
  for key, old, new in experiment.differences(old_config, config):
    reason = ''
    is_wsd = old_config.optimizer.schedule == config.optimizer.schedule == 'wsd'
    if is_wsd and key.path in optimizer.DECAY_KEYS:
      _check_decay(workdir, old_config, config)
      continue
    if key.path == 'training.steps' and new > old:
      o = config.optimizer
      if o.schedule in ('constant', 'rsqrt') and o.drop is None:
        continue
      cause = 'optimizer.drop' if o.drop else f'schedule {o.schedule!r}'
      reason = f' ({cause} depends on the number of steps)'
    remedy = 'use the old value, or another workdir'
    if config.finetune is None and key.path.split('.')[0] in INDEPENDENT_SECTIONS:
      remedy += f', with --config.init_from={workdir} to start from the parameters of this run'
    raise errors.BadInput(
      f'--workdir={workdir} was started with {key.path}={fields.format_value(old)}, now it is '
      f'{fields.format_value(new)}{reason}: {remedy}'
    )


def _check_decay(
  workdir: pathlib.Path, old_config: experiment.Config, config: experiment.Config
) -> None:
  """Raises BadInput if a trained step depends on the old or on the new decay of schedule `wsd`."""
  trained = reader.steps(workdir)[-1]
  old_start = old_config.optimizer.decay_start(old_config.training.steps)
  start = config.optimizer.decay_start(config.training.steps)
  if old_start < trained:
    raise errors.BadInput(
      f'--workdir={workdir} has a checkpoint of step {trained:,}, after its decay began at step '
      f'{old_start:,}, so training.steps and the decay cannot change: remove the checkpoints after '
      f'that step, or use another workdir with --config.init_from={workdir}'
    )
  if start < trained:
    raise errors.BadInput(
      f'--workdir={workdir} has a checkpoint of step {trained:,}, and the decay would begin at '
      f'step {start:,}: use optimizer.decay_from={trained} or later, or remove the checkpoints '
      f'after that step'
    )
