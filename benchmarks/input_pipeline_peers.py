"""Other input pipelines on the files of `input_pipeline.py`, in an environment of their own.

  pip install datasets grain tokenizers sentencepiece zstandard
  python benchmarks/input_pipeline_peers.py NAME FORMAT FOLDER VOCABULARY BATCHES

It prints the tokens per CPU second of so many batches, on one core. NAME is `datasets` or `grain`,
FORMAT `jsonl`, `json.gz`, `jsonl.zst` or `parquet`, VOCABULARY a SentencePiece model or a
tokenizer.json.
"""

import builtins
import gzip
import importlib
import json
import os
import pathlib
import sys
import time

import numpy as np

B, T = 32, 1024
LOADERS = {'jsonl': 'json', 'json.gz': 'json', 'jsonl.zst': 'json', 'parquet': 'parquet'}


def encoder(path):
  """Returns a function from texts to lists of ids, each with a document start."""
  if path.suffix == '.json':
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    encode = lambda texts: [
      encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ]
  else:
    import sentencepiece

    encode = sentencepiece.SentencePieceProcessor(model_file=str(path)).encode
  return lambda texts: [[*ids, 1] for ids in encode(texts)]


def with_datasets(files, kind, encode):
  """Batches of a streamed data set, mapped in batches, joined and cut as its examples do."""
  import datasets

  def join(batch):
    ids = np.concatenate([np.array(ids, np.int32) for ids in encode(batch['text'])])
    return {'ids': list(ids[: len(ids) // T * T].reshape(-1, T))}

  data = datasets.load_dataset(LOADERS[kind], data_files=files, split='train', streaming=True)
  data = data.map(join, batched=True, batch_size=1000, remove_columns=data.column_names)
  while True:
    for batch in data.iter(B, drop_last_batch=True):
      yield np.stack(batch['ids'])


def with_grain(files, kind, encode):
  """Batches of its own packing; a file of lines is read by Python, Parquet by grain."""
  import grain
  from grain import experimental
  import zstandard

  def read(path):
    kind = {'.gz': gzip, '.zst': zstandard}.get(pathlib.Path(path).suffix, builtins)
    return (json.loads(line)['text'] for line in kind.open(path, 'rt', encoding='utf-8'))

  if kind == 'parquet':
    sources = [experimental.ParquetIterDataset(path).map(lambda row: row['text']) for path in files]
  else:
    sources = [grain.MapDataset.source(list(read(path))).to_iter_dataset() for path in files]
  data = grain.IterDataset.mix(sources) if len(sources) > 1 else sources[0]
  data = data.map(lambda text: {'ids': np.array(encode([text])[0], np.int32)})
  data = experimental.ConcatThenSplitIterDataset(data, length_struct={'ids': T})
  while True:
    yield from (batch['ids'] for batch in data.batch(B, drop_remainder=True))


def main(name, kind, folder, vocabulary, batches):
  """Prints the tokens per CPU second of the first batches."""
  os.sched_setaffinity(0, {0})
  os.environ['TOKENIZERS_PARALLELISM'] = 'false'
  files = sorted(map(str, pathlib.Path(folder).glob('train-*')))
  for module in (name, 'zstandard'):  # imports are not measured
    importlib.import_module(module)
  make = {'datasets': with_datasets, 'grain': with_grain}[name]
  stream = make(files, kind, encoder(pathlib.Path(vocabulary)))
  start = time.process_time()
  tokens = sum(next(stream).size for _ in range(int(batches)))
  print(tokens / (time.process_time() - start))


if __name__ == '__main__':
  main(*sys.argv[1:])
