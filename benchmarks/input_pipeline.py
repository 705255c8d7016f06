"""Tokens per second of one core, from texts to batches, beside tf.data and seqio.

  python benchmarks/input_pipeline.py --path=/path/to/c4 --vocabulary=/path/to/t5_32k.model

The process is kept to one core. Rows of 1,024 tokens, 32 of them, of the same texts:

  jsonl, gzip     `data.packing` over shards of JSON lines
  tfds            `data.packing` over what TFDS has prepared, through seqio
  bare tf.data    the same records: read, parsed, tokenised by tensorflow-text, joined, cut
  seqio           its task, trimmed and packed by seqio's converter for language models

Each runs in a process of its own; the median of its turns counts. `floor` is SentencePiece alone
on texts in memory, in one call.
Keeping up with a step of S seconds takes batch * length / S / rate cores.
"""

import argparse
import functools
import gzip
import json
import multiprocessing
import os
import pathlib
import shutil
import tempfile
import time

from etils import epath
import numpy as np

from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import packing, shards
from ngrammer_jax.data import vocabulary as vocabularies
from ngrammer_jax.tasks import c4, tensorflow

tf, seqio = tensorflow.load()

B, T, SHARDS, COPIES = 32, 1024, 32, 32


def write(texts, root):
  """The texts as shards of all kinds; one text for validation."""
  for kind, file in (('jsonl', open), ('json.gz', gzip.open)):
    (root / kind).mkdir()
    for shard in range(SHARDS):
      with file(root / kind / f'train-{shard:02}.{kind}', 'wt', encoding='utf-8') as out:
        out.writelines(json.dumps({'text': text}) + '\n' for text in texts[shard::SHARDS])
    (root / kind / 'valid.jsonl').write_text(json.dumps({'text': texts[0]}) + '\n')
  _write_tfds(texts, epath.Path(root) / 'c4' / 'en' / '3.1.0')


def _write_tfds(texts, folder):
  import tensorflow_datasets as tfds

  folder.mkdir(parents=True)
  infos = []
  for split, count, given in (('train', SHARDS, texts), ('validation', 1, texts[:1])):
    files = tfds.core.ShardedFileTemplate(
      data_dir=folder, dataset_name='c4', split=split, filetype_suffix='tfrecord'
    )
    for shard, path in enumerate(files.sharded_filepaths(count)):
      with tf.io.TFRecordWriter(str(path)) as file:
        for text in given[shard::count]:
          value = tf.train.BytesList(value=[text.encode()])
          feature = tf.train.Features(feature={'text': tf.train.Feature(bytes_list=value)})
          file.write(tf.train.Example(features=feature).SerializeToString())
    lengths = [len(given[shard::count]) for shard in range(count)]
    infos.append(
      tfds.core.SplitInfo(name=split, shard_lengths=lengths, num_bytes=0, filename_template=files)
    )
  features = tfds.features.FeaturesDict({'text': tfds.features.Text()})
  tfds.folder_dataset.write_metadata(data_dir=folder, features=features, split_infos=infos)


def ours(found, vocabulary, root):
  """A function that makes the next batch, and says how many tokens it has."""
  rows = packing.PackedDataset(found, vocabulary, B, T, root / 'places' / str(time.monotonic_ns()))
  step = iter(range(1 << 30))
  return lambda: rows.segment(next(step)).tokens_BxT.size


def bare(root, model):
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


def of_seqio(root, path):
  """The task of seqio with its own vocabulary and converter; the tokens that are no padding."""
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


def rate(name, root, path, rounds, seconds):
  """Tokens per second of a pipeline, the median of some turns."""
  os.sched_setaffinity(0, {0})
  os.cpu_count = lambda: 1
  model = path.read_bytes()
  vocabulary = vocabularies.SentencePieceVocabulary(model)
  make = {
    'floor': lambda: alone(root, vocabulary),
    'jsonl': lambda: ours(shards.find(root / 'jsonl')['train'], vocabulary, root),
    'gzip': lambda: ours(shards.find(root / 'json.gz')['train'], vocabulary, root),
    'tfds': lambda: ours(
      c4.open_corpus(data_config.DataConfig(corpus='c4/en', path=str(root))).train_shards,
      vocabulary,
      root,
    ),
    'bare tf.data': lambda: bare(root, model),
    'seqio': lambda: of_seqio(root, path),
  }
  batch, found = make[name](), []
  for turn in range(rounds + 1):
    began, tokens = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
      tokens += batch()
    if turn:  # the first one warms up
      found.append(tokens / (time.perf_counter() - began))
  return float(np.median(found))


def texts_of(found):
  """All texts of some shards."""
  return [
    found.text(shard, number, stored)
    for shard in range(len(found.files))
    for number, (stored, _) in enumerate(found.read(shard))
  ]


def alone(root, vocabulary):
  """Nothing but SentencePiece."""
  texts = texts_of(shards.find(root / 'jsonl')['train'])[:2000]
  return lambda: sum(map(len, vocabulary.encode_all(texts, 1)))


def main() -> None:
  """Prints a table, and writes it as JSON where asked."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--path', type=pathlib.Path, required=True, help='shards of texts')
  parser.add_argument('--vocabulary', type=pathlib.Path, required=True, help='of SentencePiece')
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--seconds', type=float, default=3.0, help='of each turn')
  parser.add_argument('--json', type=pathlib.Path, help='where to write the result')
  options = parser.parse_args()
  texts = [text.decode() for text in texts_of(shards.find(options.path)['train'])]
  root = pathlib.Path(tempfile.mkdtemp())
  context, result = multiprocessing.get_context('spawn'), {}
  try:
    write(texts * COPIES, root)
    for name in ('floor', 'jsonl', 'gzip', 'tfds', 'bare tf.data', 'seqio'):
      with context.Pool(1) as process:
        given = name, root, options.vocabulary, options.rounds, options.seconds
        result[name] = process.apply(rate, given)
  finally:
    shutil.rmtree(root)
  for name, tokens in result.items():
    print(f'{name:<14}{tokens:12,.0f} tokens/s{tokens / result["bare tf.data"]:8.2f}')
  if options.json:
    options.json.write_text(json.dumps(result, indent=2) + '\n')


if __name__ == '__main__':
  main()
