"""Only what is proven is believed: damage is found, named, and costs one checkpoint at most."""

import dataclasses
import errno
import pathlib
import shutil
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import errors, host_arrays, sharding
from ngrammer_jax.checkpoints import arrays as checkpoint_arrays
from ngrammer_jax.checkpoints import manifest, pieces, reader
from ngrammer_jax.checkpoints import writer as checkpoint_writer
from ngrammer_jax.layers import document_masks
from ngrammer_jax.system import storage
from ngrammer_jax.training import state as train_state
from tests.campaigns import damages
from tests.checks import bad_input, full, mesh_of
from tests.training.helpers import cut, flip


def state(step):
  """A small train state, another one at every step."""
  kernel = np.random.default_rng(step).normal(size=(3, 4))
  return {
    'params': {'kernel': jnp.asarray(kernel, 'float32'), 'bias': jnp.ones(8, 'bfloat16')},
    'step': jnp.int32(step),
  }


def abstract():
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0)
  )


def same(a, b):
  return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and bool((x == y).all()), a, b))


def save(workdir, *steps, keep=3, **values):
  with checkpoint_writer.CheckpointWriter(workdir, keep) as saved:
    for step in steps:
      saved.save(step, state(step), **values)


@pytest.fixture
def workdir(tmp_path):
  """With good checkpoints of steps 4, 8 and 12."""
  save(tmp_path / 'run', 4, 8, 12)
  return tmp_path / 'run'


@pytest.fixture
def newest(workdir):
  return workdir / 'checkpoints' / '12'


def warnings(caplog):
  return [record.getMessage() for record in caplog.records if record.levelname == 'WARNING']


@pytest.mark.parametrize('damage', [full(cut), full(flip), pathlib.Path.unlink])
def test_any_damage_to_any_file_is_found_and_named(workdir, newest, damage, caplog):
  intact = shutil.copytree(newest, workdir / 'intact')
  names = sorted(str(path.relative_to(intact)) for path in intact.rglob('*') if path.is_file())
  assert 'manifest.json' in names and any('/d/' in name for name in names) and len(names) > 8
  for name in names:
    caplog.clear()
    damage(newest / name)
    step, restored = reader.restore_newest(workdir, abstract())
    assert step == 8 and same(restored, state(8))
    (warning,) = warnings(caplog)
    assert warning.startswith(f'checkpoint {newest} is corrupt: {name} ')
    assert warning.endswith('; falling back to the previous')
    shutil.copy(intact / name, newest / name)
  step, restored = reader.restore_newest(workdir, abstract())
  assert step == 12 and same(restored, state(12))


def test_variables_are_restored_without_the_rest(tmp_path, caplog):
  """Damage to what they do not need is no damage to them."""
  workdir = tmp_path / 'run'
  with checkpoint_writer.CheckpointWriter(workdir) as saved:
    for step in (4, 8):
      # Large enough to have files of its own.
      moments = jax.random.normal(jax.random.key(step), (1000, 1000))
      saved.save(step, state(step) | {'codebook': {'empty': jnp.ones((0, 3))}, 'moments': moments})
  abstract_params = abstract()['params']
  where = jax.tree.leaves(abstract_params)[0].sharding
  empty = jax.ShapeDtypeStruct((0, 3), 'float32', sharding=where)
  wanted = {'params': abstract_params, 'codebook': {'empty': empty}}
  newest = workdir / 'checkpoints' / '8'
  intact = shutil.copytree(newest, workdir / 'intact')
  steps = {}
  for path in [path for path in intact.rglob('*') if path.is_file()]:
    name = str(path.relative_to(intact))
    for damage in (cut, flip, pathlib.Path.unlink):
      damage(newest / name)
      variables = reader.restore_newest_variables(workdir, wanted)
      assert same(variables.params, state(variables.step)['params']), name
      assert variables.codebook['empty'].shape == (0, 3)
      steps[damage, name] = variables.step
      shutil.copy(path, newest / name)
  assert all(step == 4 for (damage, _), step in steps.items() if damage is not flip)
  sizes = {name: (intact / name).stat().st_size for _, name in steps}
  is_small = {name: size <= manifest.MAX_INDEX_BYTES for name, size in sizes.items()}
  assert not all(is_small.values())
  # Of small files Orbax would say a lot; the large one is not read.
  assert all(steps[flip, name] == (4 if small else 8) for name, small in is_small.items())
  assert reader.restore_newest_variables(workdir, wanted).step == 8
  kernel = {'kernel': abstract_params['kernel']}
  message = 'params/bias is bfloat16[8], expected no such array'
  with bad_input(f'{newest} does not match the model: {message}'):
    reader.restore_variables(workdir, 8, wanted | {'params': kernel})


def test_a_manifest_that_leaves_its_folder_is_damage(workdir, newest):
  """It costs one checkpoint, and nothing outside of the folder is read."""
  path = newest / 'manifest.json'
  entry = manifest.digest_files(workdir)['checkpoints/8/_METADATA']
  for name in ('../8/_METADATA', f'{workdir}/checkpoints/8/_METADATA', 'd/../../8/_METADATA'):
    saved = manifest.read(newest)
    content = path.read_bytes()
    manifest.write(newest, dataclasses.replace(saved, files=saved.files | {name: entry}))
    with pytest.raises(manifest.CorruptError, match='which leaves the folder'):
      manifest.read(newest)
    assert reader.best_step(workdir) is None
    step, restored = reader.restore_newest(workdir, abstract())
    assert step == 8 and same(restored, state(8)), name
    path.write_bytes(content)
  assert reader.restore_newest(workdir, abstract())[0] == 12


def test_a_folder_in_place_of_a_file_is_damage(workdir, newest):
  """A file that nobody wrote is none."""
  (newest / 'note').write_text('of the user')
  assert reader.restore_newest(workdir, abstract())[0] == 12
  for name in ('_METADATA', 'manifest.json'):
    (newest / name).rename(newest / 'aside')
    (newest / name).mkdir()
    assert reader.restore_newest(workdir, abstract())[0] == 8, name
    (newest / name).rmdir()
    (newest / 'aside').rename(newest / name)
  assert reader.restore_newest(workdir, abstract())[0] == 12


def test_a_link_among_checkpoints_is_renamed_or_deleted_alone(workdir, newest, tmp_path):
  shutil.copytree(newest, tmp_path / 'own' / '12')
  (newest.parent / '16').symlink_to(tmp_path / 'own' / '12')
  (newest.parent / '20.scratch').symlink_to(tmp_path / 'own' / '12')
  before = damages.snapshot((tmp_path / 'own',))
  assert reader.restore_newest(workdir, abstract(), set_aside=True)[0] == 12
  save(workdir, 16, keep=1)
  assert sorted(path.name for path in newest.parent.iterdir()) == ['16', '16.damaged']
  assert damages.snapshot((tmp_path / 'own',)) == before


def test_names_that_no_save_gives_are_no_steps(workdir, newest):
  for name in ('012', '１６', '+20', '9' * 200):
    shutil.copytree(newest, newest.with_name(name))
  assert reader.steps(workdir) == [4, 8, 12]


@pytest.mark.full
def test_a_flip_anywhere_in_the_manifest_is_found(newest):
  path = newest / 'manifest.json'
  content = path.read_bytes()
  for i in range(len(content)):
    path.write_bytes(content[:i] + bytes([content[i] ^ 1 << i % 8]) + content[i + 1 :])
    with pytest.raises(
      manifest.CorruptError, match=r'^manifest\.json (was changed|cannot be read)$'
    ):
      manifest.read(newest)


def test_a_file_that_the_disk_cannot_read_is_damage(newest, monkeypatch):
  def fails(path):
    raise OSError(number, 'says the disk')

  monkeypatch.setattr(manifest, '_sha256', fails)
  number = errno.EIO
  with pytest.raises(manifest.CorruptError, match=r'^_CHECKPOINT_METADATA cannot be read: says'):
    manifest.verify(newest)
  number = errno.EMFILE
  with pytest.raises(OSError):  # says nothing about the file
    manifest.verify(newest)


def test_a_folder_may_be_named_like_a_pattern(tmp_path):
  """Orbax searches its own folder with a glob."""
  workdir = tmp_path / '[abc] *?' / 'rate[1]'
  save(workdir, 4)
  assert set(reader.verify(workdir, 4).leaves) == {'params/kernel', 'params/bias', 'step'}
  assert same(reader.restore(workdir, 4, abstract()), state(4))


def lose_array(monkeypatch):
  save_all = checkpoint_arrays.save
  without = lambda tree: tree | {'params': {'kernel': tree['params']['kernel']}}
  fails = lambda checkpointer, path, tree: save_all(checkpointer, path, without(tree))
  monkeypatch.setattr(checkpoint_arrays, 'save', fails)


def lose_database(monkeypatch):
  """Orbax merges nothing in a folder that it does not find with a glob."""
  monkeypatch.setattr(storage, 'orbax_path', lambda path: path.resolve())


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # of Orbax
@pytest.mark.parametrize(
  'lose, reason',
  [(lose_array, 'params/bias was not written'), (lose_database, 'its arrays cannot be read')],
)
def test_what_orbax_did_not_write_is_not_saved_and_spares_what_is_there(
  tmp_path, monkeypatch, lose, reason
):
  workdir = tmp_path / 'rate[1]'
  save(workdir, 4)
  with monkeypatch.context() as patch:
    lose(patch)
    with (
      pytest.raises(RuntimeError, match=f'^step 8 was not saved: {reason}'),
      checkpoint_writer.CheckpointWriter(workdir, keep=1) as saved,
    ):
      saved.save(8, state(8))
      assert saved.last_saved() == 'step 4'
  assert reader.steps(workdir) == [4]
  save(workdir, 8, keep=1)
  assert reader.steps(workdir) == [8]


def test_an_array_that_reads_differently_is_damage(tmp_path, monkeypatch, caplog):
  """The files are those that were written: only the sums of the arrays in memory tell."""
  save(tmp_path, 4)
  save_all = checkpoint_arrays.save

  def one_bit_off(checkpointer, path, tree):
    bits = tree['params']['kernel'].view('uint32')
    kernel = bits.at[2, 1].set(bits[2, 1] ^ 1).view('float32')
    save_all(checkpointer, path, tree | {'params': tree['params'] | {'kernel': kernel}})

  monkeypatch.setattr(checkpoint_arrays, 'save', one_bit_off)
  save(tmp_path, 8)
  assert manifest.verify(tmp_path / 'checkpoints' / '8').step == 8
  step, restored = reader.restore_newest(tmp_path, abstract())
  assert step == 4 and same(restored, state(4))
  assert warnings(caplog) == [
    f'checkpoint {tmp_path}/checkpoints/8 is corrupt: params/kernel was changed: wrong checksum; '
    'falling back to the previous'
  ]


@pytest.mark.full
@pytest.mark.parametrize(
  'name, change, message',
  [
    ('params/kernel', (3, 5), 'is float32[3, 4], expected float32[3, 5]'),
    ('params/bias', 'float32', 'is bfloat16[8], expected float32[8]'),
    ('params/bias', None, 'is bfloat16[8], expected no such array'),
    ('params/added', (2,), 'is missing, expected float32[2]'),
  ],
)
def test_a_checkpoint_of_another_model_is_refused(workdir, newest, name, change, message):
  expected, leaf = abstract(), name.split('/')[1]
  if change is None:
    del expected['params'][leaf]
  elif isinstance(change, str):
    expected['params'][leaf] = expected['params'][leaf].update(dtype=jnp.dtype(change))
  else:
    expected['params'][leaf] = jax.ShapeDtypeStruct(change, 'float32')
  with bad_input(f'{newest} does not match the model: {name} {message}'):
    reader.restore_newest(workdir, expected, set_aside=True)
  assert reader.steps(workdir) == [4, 8, 12]


def test_folders_that_are_no_whole_checkpoints_are_not_believed(workdir, newest, caplog):
  folder = newest.parent
  for name in ('16.scratch', '16.scratch.orbax-checkpoint-tmp-7', '4.scratch', '20.damaged'):
    shutil.copytree(newest, folder / name)
  assert reader.steps(workdir) == [4, 8, 12]
  shutil.copytree(newest, folder / '16', ignore=shutil.ignore_patterns('manifest.json'))
  (folder / '20').mkdir()
  shutil.copytree(newest, folder / '24')
  step, restored = reader.restore_newest(workdir, abstract())
  assert step == 12 and same(restored, state(12))
  assert [line.split('checkpoints/')[1] for line in warnings(caplog)] == [
    '24 is corrupt: manifest.json is of step 12; falling back to the previous',
    '20 is corrupt: manifest.json is missing; falling back to the previous',
    '16 is corrupt: manifest.json is missing; falling back to the previous',
  ]
  save(workdir)
  assert {path.name for path in folder.iterdir()} == {
    '4',
    '8',
    '12',
    '16',
    '20',
    '20.damaged',
    '24',
  }


def test_damaged_ones_are_set_aside_only_to_train(workdir, newest, caplog):
  for place in ('12.damaged', '12.damaged-2', '12.damaged-3'):
    flip(newest / 'manifest.json')
    content = (newest / 'manifest.json').read_bytes()
    assert reader.restore_newest(workdir, abstract())[0] == 8
    assert reader.steps(workdir) == [4, 8, 12]
    assert reader.restore_newest(workdir, abstract(), set_aside=True)[0] == 8
    assert reader.steps(workdir) == [4, 8]
    assert (newest.with_name(place) / 'manifest.json').read_bytes() == content
    assert warnings(caplog)[-1] == f'{newest} was renamed to {place}'
    save(workdir, 12)


def test_the_last_and_the_best_are_kept(tmp_path):
  losses = {4: 3.0, 8: 1.0, 12: None, 16: 2.0, 20: 2.5, 24: None, 28: 0.5, 32: 0.75}
  file_contents = {}
  for steps in ((4, 8, 12, 16), (20, 24, 28, 32)):  # the best outlives a restart
    with checkpoint_writer.CheckpointWriter(tmp_path, keep=2) as saved:
      for step in steps:
        saved.save(step, state(step), losses[step])
        saved._wait()
        file_contents[step] = reader.steps(tmp_path), reader.best_step(tmp_path)
  assert file_contents == {
    4: ([4], 4),
    8: ([4, 8], 8),
    12: ([8, 12], 8),
    16: ([8, 12, 16], 8),
    20: ([8, 16, 20], 8),
    24: ([8, 20, 24], 8),
    28: ([24, 28], 28),
    32: ([28, 32], 28),
  }
  assert {path.name for path in (tmp_path / 'checkpoints').iterdir()} == {'28', '32'}
  assert same(reader.restore(tmp_path, 28, abstract()), state(28))


def test_without_a_validation_none_is_the_best(workdir):
  assert reader.best_step(workdir) is None
  save(workdir, 16, 20, keep=2)
  assert reader.steps(workdir) == [16, 20]


class Killed(Exception):
  """Stands for SIGKILL: nothing after it happens."""


@pytest.mark.parametrize(
  'owner, name, newest',
  [
    (manifest, 'digest_files', 8),
    (manifest, 'write', 8),
    (pathlib.Path, 'rename', 8),
    (shutil, 'rmtree', 12),  # while an old one is deleted
  ],
)
def test_killed_between_any_two_steps_of_a_save(tmp_path, monkeypatch, owner, name, newest):
  save(tmp_path, 4, 8, keep=2)

  def killed(*arguments, **options):
    raise Killed

  with pytest.raises(Killed), monkeypatch.context() as patch:
    patch.setattr(owner, name, killed)
    save(tmp_path, 12, keep=2)
  assert list((tmp_path / 'checkpoints').glob('*.scratch*'))
  for step in reader.steps(tmp_path):
    assert same(reader.restore(tmp_path, step, abstract()), state(step))
  assert reader.restore_newest(tmp_path, abstract())[0] == newest
  save(tmp_path, 16, keep=2)
  assert reader.steps(tmp_path) == [newest, 16]
  assert not list((tmp_path / 'checkpoints').glob('*.scratch*'))


def full(number, *args):
  def fails(*arguments, **options):
    raise OSError(number, *args) if number else ValueError(*args)

  return fails


FULL = [
  full(errno.ENOSPC, 'says the disk'),
  full(errno.EDQUOT, 'says the disk'),
  full(0, 'RESOURCE_EXHAUSTED: writing "x": No space left on device [os_error_code=28]'),
  full(0, 'RESOURCE_EXHAUSTED: writing "x": Disk quota exceeded [os_error_code=122]'),
]
PLACES = [(checkpoint_arrays, 'save'), (manifest, 'write')]  # at once, and in its thread


@pytest.mark.full
@pytest.mark.parametrize('fails', FULL)
@pytest.mark.parametrize('place', PLACES)
def test_a_full_disk_is_named_and_spares_what_is_there(tmp_path, monkeypatch, place, fails):
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: types.SimpleNamespace(free=1.25e6))
  for saved_steps, last in ([], 'none yet'), ([4], 'step 4'):
    step = (saved_steps or [0])[-1] + 4
    with (
      bad_input(
        f'--workdir={tmp_path}: the disk is full: no room for step {step}, 1.2 MB left. '
        f'Last checkpoint: {last}. '
        'Free some space, then rerun the same command to resume'
      ),
      monkeypatch.context() as patch,
    ):
      patch.setattr(*place, fails)
      save(tmp_path, step)
    assert reader.steps(tmp_path) == saved_steps
    for good in saved_steps:
      assert same(reader.restore(tmp_path, good, abstract()), state(good))
    save(tmp_path, step)
  assert reader.steps(tmp_path) == [4, 8]


def test_another_error_of_a_save_is_not_taken_for_a_full_disk(tmp_path, monkeypatch):
  for place in PLACES:
    with pytest.raises(OSError, match='Input/output'), monkeypatch.context() as patch:
      patch.setattr(*place, full(errno.EIO, 'Input/output error'))
      save(tmp_path, 4)


@pytest.mark.parametrize(
  'first, raised', [(errors.Interrupted(signal.SIGTERM), errors.BadInput), (Killed(), Killed)]
)
def test_who_is_interrupted_learns_that_the_disk_is_full(tmp_path, monkeypatch, first, raised):
  """For to be interrupted means that everything is saved; any other error says more."""
  monkeypatch.setattr(manifest, 'write', FULL[0])
  with pytest.raises(raised), checkpoint_writer.CheckpointWriter(tmp_path) as saved:
    saved.save(4, state(4))
    raise first


def test_a_disk_without_room_for_a_checkpoint_is_refused(tmp_path, monkeypatch):
  large = {'table': jax.ShapeDtypeStruct((1000, 1500), jnp.bfloat16)}
  with checkpoint_writer.CheckpointWriter(tmp_path) as saved:
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: types.SimpleNamespace(free=4e6))
    saved.check_space(large)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: types.SimpleNamespace(free=3.9e6))
    with bad_input(
      f'--workdir={tmp_path}: the disk is full: no room for a checkpoint of 4.0 MB, 3.9 MB left. '
      'Last checkpoint: none yet. Free some space, then rerun the same command to resume'
    ):
      saved.check_space(large)
    # Found before anything is written: Orbax would fill the screen with its threads' complaints.
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: types.SimpleNamespace(free=10))
    with pytest.raises(errors.BadInput, match='the disk is full: no room for step 4 of '):
      saved.save(4, state(4))
  assert not list((tmp_path / 'checkpoints').iterdir())


def test_a_validation_that_was_made_up_for_counts(tmp_path):
  with checkpoint_writer.CheckpointWriter(tmp_path) as saved:
    saved.save(4, state(4), 2.0)
    saved.save(8, state(8))
  with checkpoint_writer.CheckpointWriter(tmp_path) as saved:
    assert reader.best_step(tmp_path) == 4
    saved.set_validation(8, 1.0)
  assert reader.best_step(tmp_path) == 8
  assert same(reader.restore(tmp_path, 8, abstract()), state(8))


@pytest.mark.full
def test_a_state_may_be_donated_while_it_is_written(tmp_path):
  add = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
  tree = {'table': jnp.zeros((1000, 1000))}
  with checkpoint_writer.CheckpointWriter(tmp_path, keep=4) as saved:
    for step in range(1, 5):
      saved.save(step, tree)
      for _ in range(5):
        tree = jax.block_until_ready(add(tree))
  for step in range(1, 5):
    one = jax.ShapeDtypeStruct((1000, 1000), jnp.float32, sharding=tree['table'].sharding)
    restored = reader.restore(tmp_path, step, {'table': one})
    assert same(restored, {'table': jnp.full((1000, 1000), 5.0 * (step - 1))})


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_table_in_host_memory_is_written_and_read_in_pieces(tmp_path, monkeypatch, dtype):
  """By whole chunks of rows; wide rows are more than one chunk."""
  monkeypatch.setattr(host_arrays, 'CHUNK_ROWS', 64)
  monkeypatch.setattr(pieces, 'PIECE_BYTES', 2**17)
  table = np.random.default_rng(0).normal(size=(1000, 300)).astype(jnp.dtype(dtype))
  with checkpoint_writer.CheckpointWriter(tmp_path) as saved:
    saved.save(4, {'table': table, 'step': jnp.int32(4)})
  reader.verify(tmp_path, 4)
  sizes = [path.stat().st_size for path in (tmp_path / 'checkpoints' / '4').rglob('d/*')]
  assert len(sizes) >= table.nbytes // 2**17 and max(sizes) < 2**18
  on_host = sharding.replicated(mesh_of(1)).with_memory_kind(sharding.HOST_MEMORY_KIND)
  like = {
    'table': jax.ShapeDtypeStruct(table.shape, dtype, sharding=on_host),
    'step': jax.ShapeDtypeStruct((), 'int32', sharding=sharding.replicated(mesh_of(1))),
  }
  restored = reader.restore(tmp_path, 4, like)
  assert type(restored['table']) is np.ndarray and restored['table'].dtype == dtype
  np.testing.assert_array_equal(restored['table'], table)


def test_arrays_without_elements_come_back(tmp_path):
  """A segment memory of length 0 has them, and Orbax does not save them."""
  full_state = state(4) | {'memory': jnp.zeros((2, 0, 3))}
  with checkpoint_writer.CheckpointWriter(tmp_path) as saved:
    saved.save(4, full_state)
  like = abstract() | {'memory': jax.ShapeDtypeStruct((2, 0, 3), 'float32')}
  step, restored = reader.restore_newest(tmp_path, like)
  assert step == 4 and same(restored, full_state) and restored['memory'].shape == (2, 0, 3)
  reader.verify(tmp_path, 4)
  other = like | {'memory': jax.ShapeDtypeStruct((2, 0, 4), 'float32')}
  with pytest.raises(errors.BadInput, match='does not match the model: memory is'):
    reader.restore_newest(tmp_path, other)


def with_memory(slots):
  """A train state whose segment memory has so many slots, and its abstract state."""
  rng = np.random.default_rng(0)
  memory = {
    'document': jnp.arange(2, dtype='int32'),
    'recent': {
      'documents': jnp.asarray(rng.integers(0, 9, (2, slots)), 'int32'),
      'positions': jnp.asarray(rng.integers(0, 9, (2, slots)), 'int32'),
    },
    'layers': ({'hidden': jnp.asarray(rng.normal(size=(2, slots, 4)), 'float32')},),
  }
  saved_state = train_state.TrainState(jnp.int32(4), {'kernel': jnp.ones(3)}, {}, {}, memory)
  like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
  return saved_state, jax.tree.map(like, saved_state)


def test_a_shorter_segment_memory_is_filled_up_with_empty_slots(tmp_path):
  """As earlier versions saved it, where spans were learned; the last tokens stay the last."""
  (saved, _), (_, expected) = with_memory(3), with_memory(8)
  with checkpoint_writer.CheckpointWriter(tmp_path) as writer:
    writer.save(4, saved)
  restored = reader.restore(tmp_path, 4, expected)
  shapes = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), tree)
  assert shapes(restored) == shapes(expected)
  newest = lambda leaf: leaf if leaf.ndim == 1 else leaf[:, -3:]
  jax.tree.map(np.testing.assert_array_equal, jax.tree.map(newest, restored.memory), saved.memory)
  assert (restored.memory['recent']['documents'][:, :5] == document_masks.NONE).all()
  assert (restored.memory['recent']['positions'][:, :5] == document_masks.NONE).all()
  assert not restored.memory['layers'][0]['hidden'][:, :5].any()
  _, shorter = with_memory(2)
  with pytest.raises(errors.BadInput, match=r'memory/.* is .*\[2, 3.*, expected .*\[2, 2'):
    reader.restore(tmp_path, 4, shorter)
