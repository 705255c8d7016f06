"""Kills trainings on corpora of all kinds, and checks that their results are bit-identical.

  python -m tests.campaigns.corpora --folder=/tmp/corpora --kills=5

Each combination of formats, place, shuffling and mixture is a small corpus that is repeated several
times in a training, with as many kills by SIGKILL as --kills says (see `kill_campaign`). A finished
combination is in results.json of the folder: rerun the same command to resume. The exit status is 1
if anything differs.
"""

import argparse
from collections.abc import Iterator
import contextlib
import json
import logging
import os
import pathlib
import random
import shutil
import sys
from typing import NamedTuple

import fsspec
from moto import server

from tests import fake_gcs
from tests.campaigns import kill_campaign
from tests.data import document_files

TRAINING = {
  'model.layers': 1,
  'model.width': 32,
  'model.heads': 2,
  'model.feed_forward_width': 64,
  'model.ngram': None,
  'model.memory.length': 16,
  'evaluation.max_tokens': 2000,
  'evaluation.streams': 4,
  'training.steps': 900,
  'training.batch_size': 6,
  'training.segment_length': 32,
  'training.segments_per_call': 5,
  'training.log_every': 50,
  'training.evaluate_every': 300,
  'training.checkpoint_every': 70,  # between the steps at which readers save their states
}
BUCKET = 'corpora'
BYTES = {'data.vocabulary': 'bytes', 'data.vocabulary_size': None}
LEARNED = {'data.vocabulary_size': 300}


class Corpus(NamedTuple):
  """A corpus: suffix of its files, `data.corpus`, weight in a mixture, and store; '': the disk."""

  suffix: str
  corpus: str = 'shards'
  weight: float = 1.0
  store: str = ''

  def write(self, folder: pathlib.Path) -> str:
    """Writes four shards for training, of different lengths, and one for each other split."""
    rng = random.Random(folder.name)
    words = [''.join(rng.choices('abcdefghij', k=rng.randint(1, 8))) for _ in range(50)]
    text = lambda: ' '.join(rng.choices(words, k=rng.randint(3, 80)))
    shards = {f'train-{i}': 12 + 9 * i for i in range(4 if self.corpus == 'shards' else 1)}
    for name, count in (shards | {'valid': 8, 'test': 8}).items():
      document_files.write(folder / f'{name}{self.suffix}', [text() for _ in range(count)])
    if not self.store:
      return str(folder)
    url = f'{self.store}://{BUCKET}/{folder.parent.parent.name}/{folder.name}'
    fsspec.filesystem(self.store).put(str(folder), url, recursive=True)
    return url


class Combination(NamedTuple):
  """One or several corpora and further keys of the config."""

  corpora: tuple[Corpus, ...]
  keys: dict[str, object] = BYTES

  def arguments(self, folder: pathlib.Path) -> list[str]:
    """Writes the corpora into a folder, and returns the arguments of the training."""
    keys = TRAINING | self.keys | {'data.cache_dir': folder / 'cache'}
    for index, corpus in enumerate(self.corpora):
      part = f'data.mixture.{index}.' if len(self.corpora) > 1 else 'data.'
      keys[f'{part}path'] = corpus.write(folder / f'corpus_{index}')
      keys[f'{part}corpus'] = corpus.corpus
      if len(self.corpora) > 1:
        keys[f'{part}weight'] = corpus.weight
    return ['--config=quickstart', *(f'--config.{key}={value}' for key, value in keys.items())]


COMBINATIONS = {
  'lines': Combination((Corpus('.jsonl'),)),
  'zst, shuffled, learned vocabulary': Combination(
    (Corpus('.jsonl.zst'),), LEARNED | {'data.shuffle': 1}
  ),
  'gzip, shuffled, gs': Combination((Corpus('.json.gz', store='gs'),), BYTES | {'data.shuffle': 1}),
  'Parquet, shuffled': Combination((Corpus('.parquet'),), BYTES | {'data.shuffle': 2}),
  'Arrow, s3': Combination((Corpus('.arrow', store='s3'),)),
  'mixture of Parquet in s3 and zst in gs, shuffled': Combination(
    (Corpus('.parquet', weight=3, store='s3'), Corpus('.jsonl.zst', store='gs')),
    BYTES | {'data.shuffle': 3},
  ),
  'mixture of a text and xz, learned vocabulary': Combination(
    (Corpus('.txt', 'text', 3), Corpus('.txt.xz')), LEARNED | {'data.mixture_block': 3}
  ),
  'mixture of three, shuffled': Combination(
    (Corpus('.parquet', 'text', 0.3), Corpus('.jsonl.bz2', weight=5), Corpus('.arrow')),
    BYTES | {'data.mixture_temperature': 2, 'data.shuffle': 4},
  ),
}


@contextlib.contextmanager
def emulated_stores() -> Iterator[None]:
  """Starts emulators of Google Cloud Storage and S3, with an empty bucket in each."""
  logging.getLogger('werkzeug').setLevel(logging.ERROR)
  s3 = server.ThreadedMotoServer(port=0, verbose=False)
  s3.start()
  host, port = s3.get_host_and_port()
  os.environ |= {
    'STORAGE_EMULATOR_HOST': fake_gcs.start(),
    'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',
    'AWS_ENDPOINT_URL': f'http://{host}:{port}',
    'AWS_ACCESS_KEY_ID': 'key',
    'AWS_SECRET_ACCESS_KEY': 'secret',
    'AWS_DEFAULT_REGION': 'us-east-1',
  }
  fsspec.filesystem('s3').mkdir(BUCKET)
  yield
  s3.stop()


def kill(folder: pathlib.Path, combination: Combination, kills: int) -> dict[str, list[str]]:
  """Returns the moments of the kills, and the names of what differs."""
  shutil.rmtree(folder, ignore_errors=True)
  arguments, moments, differences = combination.arguments(folder / 'data'), [], []
  for more, names in kill_campaign.campaign(folder / 'runs', arguments, kills):
    moments += more
    differences += names
  return {'moments': moments, 'differences': differences}


def main() -> None:
  """Tries all combinations that have no result yet."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--folder', type=pathlib.Path, required=True)
  parser.add_argument('--kills', type=int, default=5, help='kills of each combination')
  parser.add_argument('--only', choices=COMBINATIONS, help='one combination; default: all')
  parser.add_argument('--seed', type=int, default=0, help='random seed of the times')
  options = parser.parse_args()
  path = options.folder / 'results.json'
  results = json.loads(path.read_text()) if path.exists() else {}
  with emulated_stores():
    for name in COMBINATIONS if options.only is None else [options.only]:
      if name not in results:
        random.seed(f'{options.seed} {name}')
        folder = options.folder / name.replace(' ', '_').replace(',', '')
        results[name] = kill(folder, COMBINATIONS[name], options.kills)
        path.write_text(json.dumps(results, indent=2))
      found = results[name]['differences']
      moments = '; '.join(results[name]['moments'])
      print(f'{name}: {len(found)} differences {", ".join(found)} ({moments})', flush=True)
  kills = sum(len(result['moments']) for result in results.values())
  differences = sum(len(result['differences']) for result in results.values())
  print(f'{kills} kills, {len(results)} combinations, {differences} differences')
  sys.exit(bool(differences))


if __name__ == '__main__':
  main()
