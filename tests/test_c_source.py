"""The text of C source: which files of an archive are in which split."""

import io
import json
import lzma
import tarfile

import numpy as np
import pytest

from ngrammer_jax import errors
from ngrammer_jax.config import data as data_config
from ngrammer_jax.data.documents import shards
from studies import c_source
from tests.data import document_files

TRAINING = {f'kernel/{number}.c': f'int x{number};\n' * 20 for number in range(40)}
HELD_OUT = {
  'drivers/rtc/rtc-a.c': 'int validated;\n',
  'fs/ubifs/deep/er.h': 'int deep;\n',
  'sound/usb/usb.c': 'int tested;\n',
}
LEFT_OUT = {
  'kernel/Makefile': 'obj-y += a.o\n',
  'kernel/registers.h': '#define A 1\n' * 10_000,
  'kernel/empty.c': '',
}


def write_tar(path, files, reverse=False):
  """Writes an archive with a top folder; one file is not UTF-8."""
  with tarfile.open(path, 'w:xz') as tar:
    contents = {name: text.encode() for name, text in files.items()}
    contents['kernel/latin.c'] = 'int caf\xe9;\n'.encode('latin-1')
    for name in sorted(contents, reverse=reverse):
      member = tarfile.TarInfo(f'linux-source-6.1/{name}')
      member.size = len(contents[name])
      tar.addfile(member, io.BytesIO(contents[name]))
  return path


def read(folder, split):
  """Returns the text of each path."""
  with lzma.open(folder / f'{split}.jsonl.xz', 'rt') as lines:
    return {line['path']: line['text'] for line in map(json.loads, lines)}


@pytest.fixture(scope='module')
def archive(tmp_path_factory):
  folder = tmp_path_factory.mktemp('archive')
  return write_tar(folder / 'linux.tar.xz', TRAINING | HELD_OUT | LEFT_OUT)


def run(archive, folder, *flags):
  return c_source.main([f'--archive={archive}', f'--folder={folder}', *flags])


def test_folders_are_held_out_whole(archive, tmp_path, capsys):
  assert run(archive, tmp_path) == 0
  assert read(tmp_path, 'train') == TRAINING
  names = list(HELD_OUT)
  assert read(tmp_path, 'validation') == {name: HELD_OUT[name] for name in names[:2]}
  assert read(tmp_path, 'test') == {names[2]: HELD_OUT[names[2]]}
  _, train, validation, test = capsys.readouterr().out.splitlines()
  assert train.split()[:4] == ['train', '40', '1', f'{sum(map(len, TRAINING.values())):,}']
  assert validation.split()[:4] == ['validation', '2', '2', '25']
  assert int(test.split()[4]) == (tmp_path / 'test.jsonl.xz').stat().st_size


def test_training_has_the_first_files_in_the_order_of_their_hashes(archive, tmp_path, capsys):
  assert run(archive, tmp_path / 'all') == 0
  assert run(archive, tmp_path / 'some', '--megabytes=0.003') == 0
  ordered, some = (list(read(tmp_path / name, 'train')) for name in ('all', 'some'))
  assert ordered != sorted(ordered)
  assert some == ordered[: len(some)]
  sizes = [len(TRAINING[path]) for path in some]
  assert sum(sizes) >= 3000 > sum(sizes[:-1])
  assert read(tmp_path / 'all', 'test') == read(tmp_path / 'some', 'test')
  capsys.readouterr()
  # The order of the archive does not matter.
  reversed_archive = write_tar(tmp_path / 'reversed.tar.xz', TRAINING | HELD_OUT, reverse=True)
  run(archive, tmp_path / 'a', '--megabytes=0.003')
  run(reversed_archive, tmp_path / 'b', '--megabytes=0.003')
  first, second = np.array(capsys.readouterr().out.splitlines()).reshape(2, -1)
  assert list(first) == list(second)


def test_every_file_is_a_document(archive, tmp_path, cache):
  folder = tmp_path / 'c_source'
  run(archive, folder)
  options = data_config.DataConfig(corpus='text', path=str(folder), vocabulary='bytes')
  corpus = document_files.prepare(options)
  validation = corpus.splits['validation']
  assert validation.text_bytes == sum(len(HELD_OUT[name]) for name in list(HELD_OUT)[:2])
  assert len(validation.starts) == 2
  assert len(corpus.splits['train'].starts) == len(TRAINING)
  # No held-out file is in the training text of a streamed corpus.
  by_split, others = shards.find(folder)
  names = {split: [file.name for file in found.files] for split, found in by_split.items()}
  assert names == {split: [f'{split}.jsonl.xz'] for split in c_source.SPLITS} and not others


def test_bad_archives_are_refused(tmp_path):
  missing = tmp_path / 'missing.tar.xz'
  with pytest.raises(errors.BadInput, match='missing.tar.xz cannot be read as a tar archive'):
    run(missing, tmp_path)
  broken = tmp_path / 'broken.tar.xz'
  broken.write_bytes(b'no archive')
  with pytest.raises(errors.BadInput, match='apt-get install linux-source'):
    run(broken, tmp_path)
  without = write_tar(tmp_path / 'without.tar.xz', TRAINING)
  with pytest.raises(errors.BadInput, match='has no files for validation: .* in arch/alpha, '):
    run(without, tmp_path)
