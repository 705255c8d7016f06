"""The training corpus of a run: its splits, located and tokenised."""

import logging

from ngrammer_jax import errors
from ngrammer_jax.checkpoints import workdirs
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import mixture
from ngrammer_jax.data.documents import corpora
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.runs.opened_run import OpenedRun
from ngrammer_jax.system import hosts


def open_corpus(config: data_config.DataConfig) -> corpora.Corpus:
  """Opens the corpus of a config, a TFDS corpus through seqio."""
  if not config.is_tfds_corpus:
    return corpora.open_corpus(config)
  from ngrammer_jax.tasks import c4  # imports TensorFlow

  return c4.open_corpus(config)


def check_split_name(name: str) -> None:
  """Raises BadInput unless a name is a split, or a split of a part of a mixture."""
  if name.partition('/')[0] not in corpora.SPLITS:
    raise errors.BadInput(f'--split={name} is not one of: {", ".join(corpora.SPLITS)}')


def find_split(run: OpenedRun, name: str) -> token_split.TokenSplit:
  """Returns a split of the corpus; see `Run.split`."""
  check_split_name(name)
  prepared = run.mixture
  names = prepared.split_names()
  if name not in names:
    data = run.config.data
    corpus = 'data.mixture' if data.mixture else f'data.corpus={data.corpus!r}'
    raise errors.NotApplicable(
      f'--split={name}: {corpus} has no such split to evaluate; available: {", ".join(names)}'
    )
  return prepared.split(name)


def prepare(run: OpenedRun) -> mixture.Mixture:
  """Tokenises the corpora of a run. Raises BadInput if they differ from the training corpora."""
  data = run.config.data
  log_paths(run, 'path', 'cache_dir', 'vocabulary_path')
  with hosts.collective_errors():
    # Of a foreign run: the user has not said that anything may be deleted there.
    may_delete = data.cache_dir is None
    # Where a run was exported to, its vocabulary need not be learned again;
    # `conversion.load_stored` names it where that of the training is gone.
    has_only_own = str(data.vocabulary_path).startswith(f'{run.workdir}/')
    is_given = run.is_exported or has_only_own
    vocabulary = run.vocabulary if is_given else None
    prepared = mixture.prepare(data, open_corpus, may_delete, vocabulary, run.workdir)
    workdirs.check_text(run.workdir, run.config, prepared.content_hash)
  return prepared


def log_paths(run: OpenedRun, *names: str) -> None:
  """Logs the paths read by the data section, since the run may come from someone else."""
  data = run.config.data
  paths = [f'data.{name}={getattr(data, name)}' for name in names if getattr(data, name)]
  if 'path' in names:
    for index, part in enumerate(data.mixture):
      paths.append(f'data.mixture.{index}.path={part.path}')
  if paths:
    logging.info('using %s, from the config of --workdir=%s', ', '.join(paths), run.workdir)
