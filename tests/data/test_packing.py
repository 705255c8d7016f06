"""Packed batches: no document is lost, and a segment is a function of its step alone."""

import json

import numpy as np
import pytest

from ngrammer_jax.data import packing, shards, vocabularies
from tests.checks import bad_input

BYTES = vocabularies.ByteVocabulary()
T, DOCUMENT_START = 7, BYTES.document_start
COUNTS = (5, 9, 4, 1, 6)  # documents per shard


def write_shards(folder, counts=COUNTS):
  random = np.random.default_rng(0)
  for shard, count in enumerate(counts):
    lengths = random.integers(0, 30, count)
    lines = [{'text': f'{shard} {i} ' + 'x' * length} for i, length in enumerate(lengths)]
    (folder / f'train-{shard}.jsonl').write_text('\n'.join(map(json.dumps, lines)) + '\n')
  (folder / 'valid.jsonl').write_text('{"text": "x"}\n')
  return shards.find(folder)['train']


def open_dataset(folder, batch_size, counts=COUNTS):
  return packing.PackedDataset(
    write_shards(folder, counts), BYTES, batch_size, T, folder / 'places'
  )


def expected_row(train_shards, row, batch_size, num_tokens):
  """The tokens of a row, computed at once from its own shards or its share of one shard."""
  num_shards = len(train_shards.files)
  shard_indices = range(row, num_shards, batch_size) or [row % num_shards]
  num_sharers = max(len(range(row % num_shards, batch_size, num_shards)), 1)
  ids, starts = [], []
  while len(ids) < num_tokens:
    for shard in shard_indices:
      for number, (record, _) in enumerate(train_shards.read(shard)):
        if number % num_sharers == row // num_shards or num_shards >= batch_size:
          text = [*BYTES.encode(train_shards.text(shard, number, record)), DOCUMENT_START]
          ids += text
          starts += [True] + [False] * (len(text) - 1)
  return np.array(ids[:num_tokens]), np.array(starts[:num_tokens])


@pytest.mark.parametrize('batch_size', [1, 2, 5, 8])
def test_a_row_concatenates_its_documents(tmp_path, batch_size):
  dataset, num_steps = open_dataset(tmp_path, batch_size), 60  # more than one epoch
  segments = [dataset.segment(step) for step in range(num_steps)]
  columns = list(zip(*segments, strict=True))[:4]
  inputs, targets, starts, valid = (np.concatenate(column, axis=1) for column in columns)
  assert valid.all()
  for row in range(batch_size):
    train_shards = shards.find(tmp_path)['train']
    expected_ids, expected_starts = expected_row(train_shards, row, batch_size, num_steps * T)
    np.testing.assert_array_equal(targets[row], expected_ids)
    np.testing.assert_array_equal(starts[row], expected_starts)
    np.testing.assert_array_equal(inputs[row], [DOCUMENT_START, *expected_ids[:-1]])


def test_a_segment_does_not_depend_on_earlier_calls(tmp_path):
  dataset = open_dataset(tmp_path, 3)
  segments = [dataset.segment(step) for step in range(12)]
  for step in (11, 0, 5, 6, 5):
    repeated = open_dataset(tmp_path, 3).segment(step)
    for actual, expected in zip(repeated[:4], segments[step][:4], strict=True):
      np.testing.assert_array_equal(actual, expected)
    for first, last in ((0, 1), (1, 3)):  # the rows of another host
      host_segment = dataset.segment(step, slice(first, last))
      np.testing.assert_array_equal(host_segment.tokens_BxT, segments[step].tokens_BxT[first:last])


def test_resuming_starts_from_the_last_saved_state(tmp_path, monkeypatch):
  monkeypatch.setattr(packing, 'SAVE_INTERVAL', 5)
  dataset = open_dataset(tmp_path, 2)
  segments = [dataset.segment(step) for step in range(23)]
  lines = (tmp_path / 'places' / '0-1.jsonl').read_text().split('\n')
  with (tmp_path / 'places' / '0-1.jsonl').open('a') as file:
    file.write('{"step": 25, "fir')  # the process was killed while it wrote a line
  encoded_texts, encode_all = [], vocabularies.ByteVocabulary.encode_all

  def recording_encode_all(vocabulary, texts):
    encoded_texts.extend(texts)
    return encode_all(vocabulary, texts)

  monkeypatch.setattr(vocabularies.ByteVocabulary, 'encode_all', recording_encode_all)
  resumed = open_dataset(tmp_path, 2)
  np.testing.assert_array_equal(resumed.segment(22).targets_BxT, segments[22].targets_BxT)
  assert len(encoded_texts) < 14  # 23 segments hold 38 documents
  for row in (0, 1):  # two hosts get the same rows
    host_segment = open_dataset(tmp_path, 2).segment(22, slice(row, row + 1))
    np.testing.assert_array_equal(host_segment.targets_BxT, segments[22].targets_BxT[row : row + 1])
  resumed.segment(23), resumed.segment(24), resumed.segment(25)
  saved = [json.loads(line) for line in lines if line]
  assert [line['step'] for line in saved] == [0, 5, 10, 15, 20]
  last = (tmp_path / 'places' / '0-1.jsonl').read_text().split('\n')[-2]
  assert json.loads(last)['step'] == 25


@pytest.mark.parametrize(
  'damage',
  [bytes([255, 254, 0, 200]) * 50, b'{"step": 3}\n', b'{"step": 3, "first": 0, "places": [[1]]}'],
)
def test_damaged_states_are_ignored(tmp_path, damage):
  expected = open_dataset(tmp_path, 2).segment(4)
  (tmp_path / 'places').mkdir()
  (tmp_path / 'places' / '0-1.jsonl').write_bytes(damage)
  actual = open_dataset(tmp_path, 2).segment(4)
  np.testing.assert_array_equal(actual.tokens_BxT, expected.tokens_BxT)


def test_more_rows_than_documents(tmp_path):
  dataset = open_dataset(tmp_path, 4, counts=(3,))
  with bad_input(
    f'{tmp_path}/train-0.jsonl has no document for one of the 4 rows that read it: reduce '
    f'training.batch_size to at most the number of documents, or add text'
  ):
    dataset.segment(0)
