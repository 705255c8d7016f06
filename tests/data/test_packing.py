"""Rows packed with documents: nothing is lost, and a step is a function of its number alone."""

import json

import numpy as np
import pytest

from ngrammer_jax import errors
from ngrammer_jax.data import packing, shards
from ngrammer_jax.data import vocabulary as vocabularies
from tests.checks import bad_input

BYTES = vocabularies.ByteVocabulary()
T, END = 7, BYTES.document_start
COUNTS = (5, 9, 4, 1, 6)  # documents of the shards


def shards_of(folder, counts=COUNTS):
  random = np.random.default_rng(0)
  for shard, count in enumerate(counts):
    lengths = random.integers(0, 30, count)
    lines = [{'text': f'{shard} {i} ' + 'x' * length} for i, length in enumerate(lengths)]
    (folder / f'train-{shard}.jsonl').write_text('\n'.join(map(json.dumps, lines)) + '\n')
  (folder / 'valid.jsonl').write_text('{"text": "x"}\n')
  return shards.find(folder)['train']


def packed(folder, batch_size, counts=COUNTS):
  return packing.Packing(shards_of(folder, counts), BYTES, batch_size, T, folder / 'places')


def expected_row(found, row, batch_size, tokens):
  """All that a row sees, joined at once: its shards, or its documents of one."""
  own = range(row, len(found.names), batch_size) or [row % len(found.names)]
  turns = max(len(range(row % len(found.names), batch_size, len(found.names))), 1)
  ids, starts = [], []
  while len(ids) < tokens:
    for shard in own:
      for number, (stored, _) in enumerate(found.read(shard)):
        if number % turns == row // len(found.names) or len(found.names) >= batch_size:
          text = [*BYTES.encode(found.text(shard, number, stored)), END]
          ids += text
          starts += [True] + [False] * (len(text) - 1)
  return np.array(ids[:tokens]), np.array(starts[:tokens])


@pytest.mark.parametrize('batch_size', [1, 2, 5, 8])
def test_rows_are_their_documents_one_after_the_other(tmp_path, batch_size):
  rows, steps = packed(tmp_path, batch_size), 60  # more than once around
  parts = [rows.segment(step) for step in range(steps)]
  columns = list(zip(*parts, strict=True))[:4]
  inputs, targets, starts, valid = (np.concatenate(of, axis=1) for of in columns)
  assert valid.all()
  for row in range(batch_size):
    ids, begun = expected_row(shards.find(tmp_path)['train'], row, batch_size, steps * T)
    np.testing.assert_array_equal(targets[row], ids)
    np.testing.assert_array_equal(starts[row], begun)
    np.testing.assert_array_equal(inputs[row], [END, *ids[:-1]])


def test_a_step_does_not_depend_on_what_was_read_before(tmp_path):
  whole = packed(tmp_path, 3)
  parts = [whole.segment(step) for step in range(12)]
  for step in (11, 0, 5, 6, 5):
    again = packed(tmp_path, 3).segment(step)
    for one, other in zip(again[:4], parts[step][:4], strict=True):
      np.testing.assert_array_equal(one, other)
    for first, last in ((0, 1), (1, 3)):  # of another host
      part = whole.segment(step, slice(first, last))
      np.testing.assert_array_equal(part.tokens_BxT, parts[step].tokens_BxT[first:last])


def test_a_resume_begins_at_the_last_places(tmp_path, monkeypatch):
  monkeypatch.setattr(packing, 'EVERY', 5)
  rows = packed(tmp_path, 2)
  parts = [rows.segment(step) for step in range(23)]
  lines = (tmp_path / 'places' / '0-1.jsonl').read_text().split('\n')
  with (tmp_path / 'places' / '0-1.jsonl').open('a') as file:
    file.write('{"step": 25, "fir')  # killed in the middle of a line
  encoded, encode_all = [], vocabularies.encode_all

  def noted(vocabulary, texts, threads):
    encoded.extend(texts)
    return encode_all(vocabulary, texts, threads)

  monkeypatch.setattr(vocabularies, 'encode_all', noted)
  again = packed(tmp_path, 2)
  np.testing.assert_array_equal(again.segment(22).targets_BxT, parts[22].targets_BxT)
  assert len(encoded) < 14  # of 38 documents that 23 segments have
  for row in (0, 1):  # the same on two hosts
    alone = packed(tmp_path, 2).segment(22, slice(row, row + 1))
    np.testing.assert_array_equal(alone.targets_BxT, parts[22].targets_BxT[row : row + 1])
  again.segment(23), again.segment(24), again.segment(25)
  known = [json.loads(line) for line in lines if line]
  assert [line['step'] for line in known] == [0, 5, 10, 15, 20]
  last = (tmp_path / 'places' / '0-1.jsonl').read_text().split('\n')[-2]
  assert json.loads(last)['step'] == 25


@pytest.mark.parametrize(
  'damage',
  [bytes([255, 254, 0, 200]) * 50, b'{"step": 3}\n', b'{"step": 3, "first": 0, "places": [[1]]}'],
)
def test_places_that_are_damaged_are_not_known(tmp_path, damage):
  expected = packed(tmp_path, 2).segment(4)
  (tmp_path / 'places').mkdir()
  (tmp_path / 'places' / '0-1.jsonl').write_bytes(damage)
  np.testing.assert_array_equal(packed(tmp_path, 2).segment(4).tokens_BxT, expected.tokens_BxT)


def test_documents_without_tokens_for_a_row(tmp_path, monkeypatch):
  nothing = lambda vocabulary, texts, threads: [np.zeros(0, np.int32)] * len(texts)
  monkeypatch.setattr(vocabularies, 'encode_all', nothing)
  with pytest.raises(errors.BadInput, match='has no document for one of 1 rows'):
    packed(tmp_path, 2, counts=(3, 3)).segment(0)


def test_more_rows_than_documents(tmp_path):
  rows = packed(tmp_path, 4, counts=(3,))
  with bad_input(
    f'{tmp_path}/train-0.jsonl has no document for one of 4 rows: use a training.batch_size of at '
    f'most the documents, or more text'
  ):
    rows.segment(0)
