"""An exported run scores and continues texts as the run itself does, bit by bit."""

import json

import jax
import numpy as np
import pytest

import ngrammer_jax
from ngrammer_jax import errors, export, runs
from ngrammer_jax.checkpoints import workdirs
from ngrammer_jax.interop import safetensors
from tests.checks import bad_input


def test_an_exported_run_has_the_variables_of_the_run(trained, one_device, tmp_path, capsys):
  folder = tmp_path / 'exported'
  assert export.main([f'--workdir={trained}', '--step=8', f'--output={folder}']) == 0
  assert capsys.readouterr().out == f'wrote {folder}\n'
  names = ['config.json', 'corpus.json', 'model.safetensors', 'vocabulary.json']
  assert sorted(path.name for path in folder.iterdir()) == names
  run, exported = ngrammer_jax.load_run(trained, 8), ngrammer_jax.load_run(folder)
  assert exported.config == run.config and exported.vocabulary.size == run.vocabulary.size
  assert int(exported.state.step) == 8
  for name in ('params', 'codebook'):
    states = getattr(exported.state, name), getattr(run.state, name)
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert len({str(jax.tree.map(lambda leaf: leaf.sharding, state)) for state in states}) == 1
  half = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, 'bfloat16', sharding=leaf.sharding)
  abstract = {'params': jax.tree.map(half, run.restored.params), 'codebook': run.restored.codebook}
  params = runs.exported.restore(folder, 8, abstract).params  # of tables that are stored in it
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype('bfloat16')}
  for step, format, message in (
    (5, 'run', 'no such checkpoint'),
    (8, 'huggingface', 'no family of Hugging Face has such a model'),
  ):
    with pytest.raises(errors.BadInput, match=message):
      ngrammer_jax.load_run(trained, step).export(tmp_path / 'none', format=format)
    assert not (tmp_path / 'none').exists()
  with bad_input(f'--step=12: {folder} has only step 8'):
    ngrammer_jax.load_run(folder, 12).export(tmp_path / 'none')
  assert not (tmp_path / 'none').exists()
  with bad_input(f'--output={folder} is not an empty folder; use another one'):
    exported.export(folder)
  with pytest.raises(errors.BadInput, match='was started on another text'):
    workdirs.check_text(folder, exported.config, 'abc')
  with bad_input(
    f'--workdir={folder} is an exported run, which cannot be resumed: use another workdir, and '
    f'--config.init_from={folder} to start from it'
  ):
    workdirs.check_workdir(folder, exported.config)
  fields = json.loads((folder / 'config.json').read_text())
  fields['model']['feed_forward_width'] = 8
  (folder / 'config.json').write_text(json.dumps(fields))
  with bad_input(
    f'{folder}/model.safetensors does not match the model: '
    'params/layer_0/feed_forward/gate/kernel is float32[16, 32], expected float32[16, 8]'
  ):
    _ = ngrammer_jax.load_run(folder).state


def test_checkpoints_are_preferred(tmp_path):
  safetensors.save({'a': np.zeros(1)}, tmp_path / 'model.safetensors')
  assert workdirs.is_exported(tmp_path)
  (tmp_path / 'checkpoints').mkdir()
  assert not workdirs.is_exported(tmp_path)
