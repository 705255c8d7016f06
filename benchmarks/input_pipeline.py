"""Tokens per second of the input pipeline on one core, compared with other pipelines.

  python benchmarks/input_pipeline.py --path=/path/to/c4 --vocabulary=/path/to/t5_32k.model \\
    --peers=/path/to/environment/bin/python

The process is pinned to one core. The pipelines make batches of 32 rows of 1,024 tokens from the
same texts, with a SentencePiece vocabulary and a byte-level BPE of 32,000 tokens, learned here:

  jsonl, json.gz, jsonl.zst, parquet   `streamed_rows` over shards of these formats
  datasets, grain                      the same files, read by `input_pipeline_peers.py` with the
                                       Python of --peers, an environment with its packages

and with the SentencePiece vocabulary alone

  tfds            `streamed_rows` over a data set prepared by TFDS, through seqio
  bare tf.data    the same records, parsed, tokenised by tensorflow-text, joined and cut
  seqio           a seqio task, trimmed and packed by its converter for language models

All compared pipelines start together, on the same core, each in its own process: a slow machine is
as slow for all of them. Each reads the files a whole number of times (about), from opening the
first file on; otherwise a pipeline with a long read-ahead would do part of its work outside of the
measurement. The results are medians over rounds: of the tokens per CPU second, and of their
ratio to this library. `floor` is only the tokenizer, on texts in memory. A training step of S
seconds needs batch * length / S / rate cores.
"""

import argparse
from concurrent import futures
import functools
import gzip
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import shutil
import subprocess
import tempfile
import time

from etils import epath
import numpy as np
import pyarrow as pa
from pyarrow import parquet
import tokenizers
import zstandard

from ngrammer_jax import errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.documents import shards
from ngrammer_jax.data.rows import mixture_schedule, streamed_rows
from ngrammer_jax.data.tokens import document_encoder

try:
  from ngrammer_jax.tasks import c4, tensorflow

  tf, seqio = tensorflow.load()
except errors.BadInput:
  tf = None

B, T, SHARDS, COPIES = 32, 1024, 32, 8
SENTENCEPIECE_PASSES = 10  # so that they take as long as one of byte pairs
KINDS = 'jsonl', 'json.gz', 'jsonl.zst', 'parquet'
TENSORFLOW = 'tfds', 'bare tf.data', 'seqio'


def write_shards(texts, root):
  """Writes the texts as shards of all formats, with one text for validation."""
  for kind in KINDS:
    (root / kind).mkdir()
    for shard in range(SHARDS):
      _write_shard(texts[shard::SHARDS], root / kind / f'train-{shard:02}.{kind}')
    (root / kind / 'valid.jsonl').write_text(json.dumps({'text': texts[0]}) + '\n')
  if tf is not None:
    _write_tfds(texts, epath.Path(root) / 'c4' / 'en' / '3.1.0')


def _write_shard(texts, path):
  if path.suffix == '.parquet':
    parquet.write_table(pa.table({'text': texts}), path, row_group_size=1000, compression='zstd')
    return
  data = ''.join(json.dumps({'text': text}) + '\n' for text in texts).encode()
  compress = {'.gz': gzip.compress, '.zst': zstandard.compress}.get(path.suffix, bytes)
  path.write_bytes(compress(data))


def learn_bpe(texts, path):
  """Writes a byte-level BPE of 32,000 tokens, learned from the texts."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=32_000,
    special_tokens=['<|endoftext|>'],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  tokenizer.save(str(path))


def _write_tfds(texts, folder):
  import tensorflow_datasets as tfds

  folder.mkdir(parents=True)
  infos = []
  for split, count, split_texts in (('train', SHARDS, texts), ('validation', 1, texts[:1])):
    files = tfds.core.ShardedFileTemplate(
      data_dir=folder, dataset_name='c4', split=split, filetype_suffix='tfrecord'
    )
    for shard, path in enumerate(files.sharded_filepaths(count)):
      with tf.io.TFRecordWriter(str(path)) as file:
        for text in split_texts[shard::count]:
          value = tf.train.BytesList(value=[text.encode()])
          feature = tf.train.Features(feature={'text': tf.train.Feature(bytes_list=value)})
          file.write(tf.train.Example(features=feature).SerializeToString())
    lengths = [len(split_texts[shard::count]) for shard in range(count)]
    infos.append(
      tfds.core.SplitInfo(name=split, shard_lengths=lengths, num_bytes=0, filename_template=files)
    )
  features = tfds.features.FeaturesDict({'text': tfds.features.Text()})
  tfds.folder_dataset.write_metadata(data_dir=folder, features=features, split_infos=infos)


def packed(split_shards, vocabulary, root):
  """Returns a function that makes the next batch and returns its number of tokens."""
  folder = root / 'positions' / str(time.monotonic_ns())
  schedule = mixture_schedule.PartSchedule(mixture_schedule.MixtureSchedule((1.0,), B), 0)
  dataset = streamed_rows.StreamedRows(
    split_shards, document_encoder.TextEncoder(vocabulary), schedule, T, folder, None, False
  )
  steps = itertools.count()
  return lambda: B * dataset.rows(next(steps), range(B))[0][0].size


def bare_tf_data(root, model):
  """The same with tf.data: records, texts, tokens, rows."""
  import tensorflow_text

  tokenizer = tensorflow_text.SentencepieceTokenizer(model=model, add_eos=True)
  files = sorted(str(path) for path in root.glob('c4/en/*/c4-train*'))
  spec = {'text': tf.io.FixedLenFeature([], tf.string)}
  dataset = (
    tf.data.TFRecordDataset(files)
    .repeat()
    .map(lambda record: tokenizer.tokenize(tf.io.parse_single_example(record, spec)['text']))
    .unbatch()
    .batch(T + 1, drop_remainder=True)
    .batch(B, drop_remainder=True)
    .prefetch(2)
  )
  batches = dataset.as_numpy_iterator()
  return lambda: next(batches)[:, 1:].size


def seqio_task(root, path):
  """The same with a seqio task, its vocabulary and its converter; padding is not counted."""
  seqio.TaskRegistry.remove('benchmark')
  seqio.TaskRegistry.add(
    'benchmark',
    source=seqio.TfdsDataSource('c4/en:3.1.0', tfds_data_dir=str(root)),
    preprocessors=[
      functools.partial(seqio.preprocessors.rekey, key_map={'targets': 'text'}),
      seqio.preprocessors.tokenize,
      seqio.preprocessors.append_eos_after_trim,
    ],
    output_features={'targets': seqio.Feature(seqio.SentencePieceVocabulary(str(path)))},
    metric_fns=[],
  )
  dataset = seqio.get_dataset(
    'benchmark',
    {'targets': T},
    dataset_split='train',
    shuffle=False,
    feature_converter=seqio.LMFeatureConverter(pack=True),
    num_epochs=None,
  )
  batches = dataset.batch(B).as_numpy_iterator()
  return lambda: int((next(batches)['decoder_target_tokens'] != 0).sum())


def measure(name, root, path, batches):
  """Returns the tokens per CPU second of the first batches of a pipeline."""
  os.sched_setaffinity(0, {0})
  os.cpu_count = lambda: 1
  os.environ['TOKENIZERS_PARALLELISM'] = 'false'
  vocabulary = read_vocabulary(path)
  make = {
    'floor': lambda: tokenizer_only(root, vocabulary),
    'tfds': lambda: packed(
      c4.open_corpus(data_config.DataConfig(corpus='c4/en', path=str(root))).train_shards,
      vocabulary,
      root,
    ),
    'bare tf.data': lambda: bare_tf_data(root, path.read_bytes()),
    'seqio': lambda: seqio_task(root, path),
  }
  for folder in KINDS:
    make[folder] = lambda folder=folder: packed(find(root / folder), vocabulary, root)
  start = time.process_time()
  next_batch = make[name]()
  tokens = sum(next_batch() for _ in range(batches))
  return tokens / (time.process_time() - start)


def measure_peer(python, name, root, path, batches):
  """The same of another pipeline, such as `grain parquet`."""
  peer, kind = name.split()
  script = pathlib.Path(__file__).with_name('input_pipeline_peers.py')
  command = [python, script, peer, kind, root / kind, path, str(batches)]
  process = subprocess.run(command, capture_output=True, text=True, check=True)
  return float(process.stdout.splitlines()[-1])


def measure_group(names, python, root, path, batches):
  """Returns the rates of pipelines that run at the same time."""
  peers = [name for name in names if name.startswith(('datasets', 'grain'))]
  own = [name for name in names if name not in peers]
  context = multiprocessing.get_context('spawn')
  with context.Pool(len(own)) as processes, futures.ThreadPoolExecutor() as threads:
    run_peer = lambda name: threads.submit(measure_peer, python, name, root, path, batches).result
    run = lambda name: processes.apply_async(measure, (name, root, path, batches)).get
    waiting = {name: run(name) for name in own} | {name: run_peer(name) for name in peers}
    return {name: wait() for name, wait in waiting.items()}


def read_vocabulary(path):
  """Returns the vocabulary of a file."""
  return vocabularies.read('tokenizer' if path.suffix == '.json' else 'sentencepiece', path)


def find(folder):
  """Returns the training shards of a folder."""
  return shards.find(folder)[0]['train']


def read_texts(split_shards):
  """Returns all texts of the shards of a split."""
  return [
    split_shards.text(shard, number, record)
    for shard in range(len(split_shards.files))
    for number, (record, _) in enumerate(split_shards.read(shard))
  ]


def tokenizer_only(root, vocabulary):
  """The same for tokenisation of texts in memory."""
  texts = read_texts(find(root / 'jsonl'))
  sizes = (sum(map(len, vocabulary.encode_all(texts[i : i + B]))) for i in itertools.count(0, B))
  return lambda: next(sizes)


def main() -> None:
  """Prints a table; with --json also writes the results of all rounds."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--path', type=pathlib.Path, required=True, help='folder with shards of texts'
  )
  parser.add_argument('--vocabulary', type=pathlib.Path, required=True, help='SentencePiece model')
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--json', type=pathlib.Path, help='output file')
  parser.add_argument('--peers', help='Python with datasets, grain, tokenizers and sentencepiece')
  options = parser.parse_args()
  texts = [text.decode() for text in read_texts(find(options.path))]
  root = pathlib.Path(tempfile.mkdtemp())
  rates = {}
  peers = ('datasets', 'grain') if options.peers else ()
  groups = [('floor',), *((kind, *(f'{peer} {kind}' for peer in peers)) for kind in KINDS)]
  try:
    copies = texts * COPIES
    # In order, a file would hold an eighth of the texts, and a pipeline that reads one file at a
    # time would find their words in the cache of its tokenizer.
    random.Random(0).shuffle(copies)
    write_shards(copies, root)
    learn_bpe(texts, root / 'bpe.json')
    for _ in range(options.rounds):
      for path in (options.vocabulary, root / 'bpe.json'):
        vocabulary = read_vocabulary(path)
        is_sentencepiece = vocabulary.kind == 'sentencepiece'
        tokens = COPIES * sum(len(vocabulary.encode(text.encode())) + 1 for text in texts)
        passes = SENTENCEPIECE_PASSES if is_sentencepiece else 1
        has_others = is_sentencepiece and tf is not None
        for names in (*groups, TENSORFLOW) if has_others else groups:
          is_floor = names == ('floor',)
          batches = len(copies) // B if is_floor else passes * tokens // (B * T)
          results = measure_group(names, options.peers, root, path, batches)
          rates.setdefault((names, path.name), []).append(results)
  finally:
    shutil.rmtree(root)
  for (names, vocabulary), rounds in rates.items():
    for name in names:
      rate = np.median([results[name] for results in rounds])
      ratio = np.median([results[name] / results[names[0]] for results in rounds])
      print(f'{vocabulary:<16}{name:<20}{rate:12,.0f} tokens/s{ratio:8.3f}')
  if options.json:
    groups = [{'vocabulary': name, 'rounds': rounds} for (_, name), rounds in rates.items()]
    options.json.write_text(json.dumps(groups, indent=2) + '\n')


if __name__ == '__main__':
  main()
