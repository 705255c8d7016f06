"""Packed batches: no document is lost, and a segment is a function of its step alone."""

import itertools
import json

import numpy as np
import pytest

from ngrammer_jax import errors
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.documents import shards
from ngrammer_jax.data.files import fingerprints, text_files
from ngrammer_jax.data.rows import document_blocks, row_reader, saved_places, streamed_rows
from ngrammer_jax.system import json_files, synced_folder
from tests.checks import bad_input
from tests.data import document_files
from tests.loops import each

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
  return shards.find(folder)[0]['train']


def open_dataset(folder, batch_size, counts=COUNTS):
  return document_files.Packed(
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
          text = [*BYTES.encode(train_shards.text(shard, number, record).text), DOCUMENT_START]
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
    train_shards = shards.find(tmp_path)[0]['train']
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


def record_steps(monkeypatch):
  """The list of the steps that are read from now on."""
  next_segments, steps = streamed_rows._BatchReader.next_segments, []
  note = lambda reader: steps.append(reader.step) or next_segments(reader)
  monkeypatch.setattr(streamed_rows._BatchReader, 'next_segments', note)
  return steps


@pytest.mark.parametrize('shuffle', [None, 3])
def test_a_restored_run_reads_on(tmp_path, monkeypatch, shuffle):
  """From the states of one or several hosts, on one or several hosts, nothing is read again."""
  source = write_shards(tmp_path)
  whole = packed(tmp_path, source, 4, shuffle)
  expected = [whole.segment(step).targets_BxT for step in range(40)]
  one, two, steps = [slice(0, 4)], [slice(0, 1), slice(1, 4)], record_steps(monkeypatch)
  for hosts_before, hosts_after in itertools.product((one, two), repeat=2):
    saved = {}
    for host in hosts_before:
      dataset = packed(tmp_path, source, 4, shuffle)
      for step in range(23):
        dataset.segment(step, host)
        states = dataset.states(step + 1)
      assert len(states['rows']) == host.stop - host.start and not dataset.states(22)['rows']
      saved |= states['rows']
    states = json.loads(json.dumps(states | {'rows': saved}))
    del steps[:]
    for host in hosts_after:
      dataset = packed(tmp_path, source, 4, shuffle)
      dataset.restore(23, states)
      for step in range(23, 40):
        np.testing.assert_array_equal(dataset.segment(step, host).targets_BxT, expected[step][host])
      assert steps == list(range(23, 40))
      del steps[:]
  for step in (30, 5):  # after and before the restored one
    np.testing.assert_array_equal(dataset.segment(step).targets_BxT, expected[step])


def save_places(dataset, path, step, rows=range(2), order=(None, False)):
  """Appends a line as version 0.3.0 did."""
  states = [dataset.states(step)['rows'][str(row)] for row in rows]
  json_files.append_line(
    path, {'step': step, 'first': rows[0], 'places': states, 'order': list(order)}
  )


def test_places_of_earlier_versions_are_read(tmp_path, monkeypatch):
  """Those of a host may be newer; a line may be incomplete; another order has places of its own."""
  monkeypatch.setattr(saved_places, 'MAX_STEPS', 3)
  dataset = open_dataset(tmp_path, 2)
  places, segments = tmp_path / 'places', []
  for step in range(60):
    segments.append(dataset.segment(step).targets_BxT)
    if step % 5 == 4:
      for row in (0, 1):
        if (row, step) != (1, 54):  # this host was ended before
          path = places / f'{row}-{row}.{step // 25}.jsonl'
          save_places(dataset, path, step + 1, range(row, row + 1))
  with (places / '0-0.0.jsonl').open('a') as file:
    file.write('{"step": 25, "fir')  # the process was killed while it wrote a line
  steps = record_steps(monkeypatch)
  for step, first in ((57, 50), (51, 50), (22, 20), (4, 0)):
    np.testing.assert_array_equal(
      open_dataset(tmp_path, 2).segment(step).targets_BxT, segments[step]
    )
    assert steps == list(range(first, step + 1))
    del steps[:]
    for row in (0, 1):  # two hosts get the same rows
      host_segment = open_dataset(tmp_path, 2).segment(step, slice(row, row + 1))
      np.testing.assert_array_equal(host_segment.targets_BxT, segments[step][row : row + 1])
    del steps[:]
  packed(tmp_path, write_shards(tmp_path), 2, shuffle=3).segment(7)
  assert steps == list(range(8))
  for path in places.glob('0-*'):  # the oldest versions wrote no order
    lines = [line for line in json_files.read_lines(path) if line.pop('order')]
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
  del steps[:]
  open_dataset(tmp_path, 2).segment(57)
  assert steps == list(range(50, 58))


@pytest.mark.parametrize(
  'damage',
  [bytes([255, 254, 0, 200]) * 50, b'{"step": 3}\n', b'{"step": 3, "first": 0, "places": [[1]]}'],
)
def test_damaged_states_are_ignored(tmp_path, damage):
  expected = open_dataset(tmp_path, 2).segment(4)
  (tmp_path / 'places').mkdir(exist_ok=True)
  (tmp_path / 'places' / '0-1.jsonl').write_bytes(damage)
  actual = open_dataset(tmp_path, 2).segment(4)
  np.testing.assert_array_equal(actual.tokens_BxT, expected.tokens_BxT)


def test_a_tokenizer_that_gives_fewer_tokens_than_before_is_named(tmp_path):
  dataset = open_dataset(tmp_path, 2)
  dataset.segment(0)
  states = dataset.states(1)
  states['rows']['0'][row_reader.RowState._fields.index('tokens')] = 99
  dataset.restore(1, states)
  again = open_dataset(tmp_path, 2)
  again.restore(1, states)
  with pytest.raises(
    errors.BadInput, match='^a row was at token 99 of a document that has [0-9]+ now'
  ):
    again.segment(1)


def test_more_rows_than_documents(tmp_path):
  dataset = open_dataset(tmp_path, 4, counts=(3,))
  with bad_input(
    f'{tmp_path}/train-0.jsonl has no document for one of the 4 rows that read it: reduce '
    f'training.batch_size to at most the number of documents, or add text'
  ):
    dataset.segment(0)


# All formats, shuffled or not.


def write_files(folder, name, counts=(30, 17, 41)):
  suffix = name[1:]
  for shard, count in enumerate(counts):
    texts = [f'{shard}/{i} of some text' + ' more' * (i % 9) for i in range(count)]
    document_files.write(folder / f'train-{shard}{suffix}', texts)
  document_files.write(folder / f'valid{suffix}', ['x'])
  return shards.find(folder)[0]['train']


def packed(folder, source, batch_size, shuffle=None, places='places'):
  return document_files.Packed(source, BYTES, batch_size, T, folder / places, shuffle)


def documents_of(dataset, steps, row=0):
  """The documents of a row, in order."""
  ids = np.concatenate([dataset.segment(step).targets_BxT[row] for step in range(steps)])
  return bytes(np.where(ids < 256, ids, 0).astype(np.uint8)).split(b'\0')[:-1]


@each('name', document_files.NAMES)
def test_every_format_resumes_shuffled_or_not(tmp_path, monkeypatch, name):
  monkeypatch.setattr(document_blocks, 'BLOCK_DOCUMENTS', 8)
  folder = tmp_path / name
  source = write_files(folder, name)
  for batch_size, shuffle in ((2, None), (4, None), (2, 1), (4, 1)):
    whole = packed(folder, source, batch_size, shuffle)
    expected = [whole.segment(step).targets_BxT for step in range(70)]
    states, begin = None, 0
    for stop in (23, 24, 61):  # killed there
      dataset = packed(folder, shards.find(folder)[0]['train'], batch_size, shuffle)
      if states is not None:
        dataset.restore(begin, states)
      for step in range(begin, stop):
        np.testing.assert_array_equal(dataset.segment(step).targets_BxT, expected[step])
        if step == stop - 3:  # the checkpoint of some steps before
          next_states = json.loads(json.dumps(dataset.states(step + 1)))
      if stop != 24:
        states, begin = next_states, stop - 2
    # Two and four hosts, which take turns in one process.
    hosts = slice(0, 1), slice(1, batch_size), *(slice(row, row + 1) for row in range(batch_size))
    dataset = packed(folder, source, batch_size, shuffle)
    dataset.restore(begin, states)
    for step in (67, 68, 69):
      for rows in hosts:
        np.testing.assert_array_equal(dataset.segment(step, rows).targets_BxT, expected[step][rows])


def test_a_shuffled_epoch_has_each_document_once(tmp_path, monkeypatch):
  monkeypatch.setattr(document_blocks, 'BLOCK_DOCUMENTS', 8)
  source = write_files(tmp_path, 'x.jsonl')
  num_documents = 30 + 17 + 41
  orders = []
  for seed in (None, 0, 1):
    documents = documents_of(packed(tmp_path, source, 1, seed, f'{seed}'), 1400)
    epochs = [documents[i : i + num_documents] for i in (0, num_documents)]
    assert sorted(epochs[0]) == sorted(epochs[1]) and len({*epochs[0]}) == num_documents
    orders += epochs
  assert orders[0] == orders[1]  # as stored
  assert len({tuple(order) for order in orders}) == 5  # of each seed and epoch
  shard_orders = []
  for order in orders[2:]:
    shard_of = [document[:1] for document in order]
    shard_orders.append([shard for i, shard in enumerate(shard_of) if shard != shard_of[i - 1]])
    assert sorted(shard_orders[-1]) == [b'0', b'1', b'2']  # shards are read one after another
    for begin in range(0, 30, 8):  # and documents stay in their block
      block = [f'0/{i} '.encode() for i in range(begin, min(begin + 8, 30))]
      numbers = [i for i, document in enumerate(order) if document.startswith(tuple(block))]
      assert numbers == list(range(numbers[0], numbers[0] + len(block)))
  assert len({tuple(order) for order in shard_orders}) > 1


@each('name', ['x.parquet', 'x.jsonl.gz'])
def test_rows_that_share_a_shard_read_it_once(tmp_path, monkeypatch, name):
  """Also after a resume; a row that is far behind, here because of long documents, reads alone."""
  reads, read = [], shards.FileShards.read
  monkeypatch.setattr(
    shards.FileShards, 'read', lambda *arguments: reads.append(arguments) or read(*arguments)
  )
  monkeypatch.setattr(document_blocks, 'BLOCK_DOCUMENTS', 3)
  texts = [f'{i} ' + 'some text ' * (1, 1, 1, 5, 1, 3, 1, 2)[i % 8] for i in range(300)]
  document_files.write(tmp_path / f'train{name[1:]}', texts)
  document_files.write(tmp_path / f'valid{name[1:]}', ['x'])
  source = shards.find(tmp_path / f'train{name[1:]}')[0]['train']
  segments, num_reads, states = [], [], None
  for shared_bytes, steps in ((1 << 20, range(60)), (1 << 20, range(40, 60)), (1500, range(60))):
    monkeypatch.setattr(document_blocks, 'SHARED_BYTES', shared_bytes)
    dataset = packed(tmp_path, source, 8, places=f'{name}-{shared_bytes}')
    if steps[0]:
      dataset.restore(40, states)
    segments.append([])
    for step in steps:
      if step == 40 and not steps[0]:
        states = dataset.states(40)
      segments[-1].append(dataset.segment(step))
    num_reads.append(len(reads))
    np.testing.assert_equal(dataset.segment(steps[0]), segments[-1][0])  # an earlier step again
    del reads[:]
  assert num_reads[:2] == [1, 1] and 1 < num_reads[2] < 9
  np.testing.assert_equal(segments[1], segments[0][40:])
  np.testing.assert_equal(segments[2], segments[0])


def test_only_what_rows_here_wait_for_is_kept(tmp_path, monkeypatch):
  """Of the other rows, which another host reads, nothing is."""
  monkeypatch.setattr(document_blocks, 'BLOCK_DOCUMENTS', 3)
  texts = [f'{i} ' + 'some text ' * (1, 1, 1, 5, 1, 3, 1, 2)[i % 8] for i in range(300)]
  for name in ('train.jsonl', 'valid.jsonl'):
    document_files.write(tmp_path / name, texts)
  dataset, rows = packed(tmp_path, shards.find(tmp_path)[0]['train'], 8), range(2, 4)
  for step in range(40):
    dataset.rows(step, rows)
  reader = dataset._readers[rows]
  blocks = reader._row_readers[2]._blocks._shared_blocks
  assert blocks
  slowest = min(state.document for state in reader.states().values())
  for block in blocks.values():
    assert block.position.document >= slowest and block.size == sum(map(len, block.records))
    owners = {(block.position.document + i) % 8 for i, record in enumerate(block.records) if record}
    assert owners <= set(rows)


def test_old_states_and_blank_documents(tmp_path):
  """A run of a version that took white space for a document goes on with it; others skip it."""
  document_files.write(tmp_path / 'train.jsonl', ['a b', '   ', '', 'c d'] * 10)
  document_files.write(tmp_path / 'valid.jsonl', ['x'])
  source = shards.find(tmp_path)[0]['train']
  assert documents_of(packed(tmp_path, source, 1), 6)[:4] == [b'a b', b'c d', b'a b', b'c d']
  (tmp_path / 'old').mkdir()
  line = {'step': 0, 'first': 0, 'places': [[0, 0, 0, 0, 0]]}
  (tmp_path / 'old' / '0-0.jsonl').write_text(json.dumps(line) + '\n')
  old = documents_of(packed(tmp_path, source, 1, places='old'), 6)
  assert old[:4] == [b'a b', b'   ', b'c d', b'a b']


def test_begin_and_end_separate_documents(tmp_path, monkeypatch):
  document_files.write(tmp_path / 'train.jsonl', ['ab', 'c'])
  document_files.write(tmp_path / 'valid.jsonl', ['x'])
  source = shards.find(tmp_path)[0]['train']
  with bad_input(
    'data.begin_of_text=True needs a vocabulary with a begin token and another end token: the '
    'folder of a published model that has them, as data.vocabulary_path'
  ):
    document_files.Packed(source, BYTES, 1, 8, tmp_path / 'places', begin=True)
  monkeypatch.setattr(vocabularies.ByteVocabulary, 'document_end', 257)
  dataset = document_files.Packed(source, BYTES, 1, 8, tmp_path / 'places', begin=True)
  segment = dataset.segment(0)
  assert segment.targets_BxT[0].tolist() == [97, 98, 257, 256, 99, 257, 256, 97]
  assert segment.starts_BxT[0].tolist() == [True, *[False] * 3, True, False, False, True]
  assert segment.tokens_BxT[0, 0] == 256


# Files that change.


def change(path):
  content = path.read_bytes()
  path.write_bytes(content.replace(b'some', b'more'))
  assert len(path.read_bytes()) == len(content)


def test_a_file_that_has_changed_is_refused_before_it_is_read(tmp_path):
  source = write_files(tmp_path, 'x.jsonl')
  first = packed(tmp_path, source, 1)
  documents_of(first, 70)
  change(tmp_path / 'train-2.jsonl')  # not yet read
  change(tmp_path / 'train-0.jsonl')
  again = packed(tmp_path, shards.find(tmp_path)[0]['train'], 1)
  with bad_input(
    f'{tmp_path}/train-0.jsonl has changed since this run first read it: put the old file back, '
    f'or use another workdir'
  ):
    again.segment(0)


def fingerprint(folder, paths):
  return fingerprints.ShardFingerprints(synced_folder.SyncedFolder(folder, '*.jsonl'), paths)


def test_only_damage_and_only_damaged_content_may_be_replaced(tmp_path):
  """Also of shards of equal names, and if another process read the damaged file too."""
  paths = [tmp_path / folder / 'x.jsonl' for folder in 'ab']
  for path in paths:
    path.parent.mkdir()
    path.write_bytes(b'first')
  folder = tmp_path / 'places' / 'run'
  open_again = lambda: fingerprint(folder, paths)
  first = open_again()
  first.check(0), first.check(1)
  with pytest.raises(errors.BadInput), first.record_damage(0):
    raise errors.BadInput('cannot be read') from PermissionError(13, 'Permission denied')
  assert fingerprints.first_sizes(tmp_path, '*') == {}
  with pytest.raises(errors.BadInput), first.record_damage(1):
    raise errors.BadInput('is damaged') from EOFError()
  line = (folder / 'files-0.jsonl').read_text().splitlines()[2]
  (folder / 'files-1.jsonl').write_text(line + '\n')  # of a process that did not see the damage
  assert fingerprints.first_sizes(tmp_path, '*') == {(1, 'x.jsonl'): 5}
  for path in paths:
    path.write_bytes(b'the second')
  second = open_again()
  second.check(1)
  with bad_input(
    f'{paths[0]} has changed since this run first read it: put the old file back, or use another '
    f'workdir'
  ):
    second.check(0)
  for content in (b'the third', b'first'):  # the second one was not damaged
    paths[1].write_bytes(content)
    for checked in (second, open_again()):
      with pytest.raises(errors.BadInput, match='has changed'):
        checked.check(1)
  paths[1].write_bytes(b'the second')
  again = open_again()
  again.check(1)
  with pytest.raises(errors.BadInput), again.record_damage(1):
    raise errors.BadInput('is damaged')
  paths[1].write_bytes(b'the third')
  open_again().check(1)
  assert fingerprints.first_sizes(tmp_path, '*') == {(1, 'x.jsonl'): 5}


def test_a_shard_is_checked_each_time_that_it_begins(tmp_path):
  source = write_files(tmp_path, 'x.jsonl', (5,))
  dataset = packed(tmp_path, source, 1)
  documents_of(dataset, 1)
  change(tmp_path / 'train-0.jsonl')
  with pytest.raises(errors.BadInput, match='has changed since this run first read it'):
    for step in range(1, 60):
      dataset.segment(step)


def test_files_that_rows_read_for_themselves_are_closed(tmp_path, monkeypatch):
  monkeypatch.setattr(document_blocks, 'BLOCK_DOCUMENTS', 3)
  monkeypatch.setattr(document_blocks, 'SHARED_BYTES', 0)
  monkeypatch.setattr(document_blocks, 'MAX_ROW_FILES', 2)
  texts = [f'{i} ' + 'some text ' * (1, 1, 1, 5, 1, 3, 1, 2)[i % 8] for i in range(60)]
  for name in ('train-0.jsonl', 'train-1.jsonl', 'valid.jsonl'):
    document_files.write(tmp_path / name, texts)
  open_readers, read = set(), shards.FileShards.read

  def recording_read(*arguments):
    number = object()
    open_readers.add(number)
    try:
      yield from read(*arguments)
    finally:
      open_readers.remove(number)

  monkeypatch.setattr(shards.FileShards, 'read', recording_read)
  dataset, most = packed(tmp_path, shards.find(tmp_path)[0]['train'], 6, shuffle=0), 0
  for step in range(400):
    dataset.rows(step, range(6))
    most = max(len(open_readers), most)
  assert 2 < most <= 2 + 2 + 1  # two of shards, two of rows, and one that is just opened


@pytest.mark.full
def test_rows_in_another_epoch_of_a_file_do_not_open_it_each(tmp_path, monkeypatch):
  """Rows that have finished their file begin one that others still read."""
  monkeypatch.setattr(document_blocks, 'BLOCK_DOCUMENTS', 3)
  for number, count in enumerate((30, 300)):
    texts = [f'{number} {i} some text' for i in range(count)]
    document_files.write(tmp_path / f'train-{number}.jsonl.gz', texts)
  document_files.write(tmp_path / 'valid.jsonl', ['x'])
  reads, read = [], shards.FileShards.read
  monkeypatch.setattr(
    shards.FileShards, 'read', lambda *arguments: reads.append(arguments) or read(*arguments)
  )
  dataset = packed(tmp_path, shards.find(tmp_path)[0]['train'], 8, shuffle=0)
  for step in range(300):
    dataset.rows(step, range(8))
  (reader,) = dataset._readers.values()
  epochs = [state.epoch for state in reader.states().values()]
  assert 2 <= max(epochs) and len(reads) <= 2 * (1 + max(epochs))


def test_documents_of_the_other_split_are_not_counted_as_empty(tmp_path, caplog):
  caplog.set_level('INFO')
  texts = ['a', ''] + ['b'] * 400  # of which 20 are held out
  source = shards.find(document_files.write(tmp_path / 'x.jsonl', texts))[0]['train']
  documents = shards.ShardDocuments(source)
  assert len(list(documents)) == 381 and documents.counts.empty == 1
  documents_of(packed(tmp_path, source, 1), 100)
  assert [m for m in caplog.messages if 'empty' in m] == [
    'number of empty documents that were skipped so far: 1'
  ]


def test_a_damaged_file_may_be_replaced(tmp_path, monkeypatch):
  monkeypatch.setattr(document_blocks, 'BLOCK_DOCUMENTS', 8)
  write_files(tmp_path, 'x.jsonl.zst')
  path = tmp_path / 'train-0.jsonl.zst'
  good = path.read_bytes()
  open_again = lambda: packed(tmp_path, shards.find(tmp_path)[0]['train'], 1, places='places/run')
  expected = documents_of(packed(tmp_path, shards.find(tmp_path)[0]['train'], 1, places='x'), 150)
  path.write_bytes(good[:-20])
  assert fingerprints.first_sizes(tmp_path, '*') == {}
  with pytest.raises(errors.BadInput, match=f'{path} is damaged: Compressed file ended'):
    documents_of(open_again(), 150)
  assert fingerprints.first_sizes(tmp_path, '*') == {(0, path.name): len(good) - 20}
  path.write_bytes(good)
  assert documents_of(open_again(), 150) == expected


def test_a_long_document_is_tokenised_in_pieces(tmp_path, monkeypatch):
  source = write_files(tmp_path, 'x.jsonl')
  whole = [packed(tmp_path, source, 2, places='a').segment(step).targets_BxT for step in range(9)]
  sizes, encode_all = [], vocabularies.ByteVocabulary.encode_all

  def recording(vocabulary, texts, special):
    sizes.extend(map(len, texts))
    return encode_all(vocabulary, texts, special)

  monkeypatch.setattr(vocabularies.ByteVocabulary, 'encode_all', recording)
  monkeypatch.setattr(text_files, 'LONG', 30)
  monkeypatch.setattr(text_files, 'CHUNK_SIZE', 20)
  pieces = [packed(tmp_path, source, 2, places='b').segment(step).targets_BxT for step in range(9)]
  np.testing.assert_array_equal(pieces, whole)
  assert max(sizes) <= 30 and sum(15 < size <= 20 for size in sizes) > 5
