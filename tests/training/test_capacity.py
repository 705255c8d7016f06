"""What does not fit into memory is refused from its shapes, and nothing is allocated or written."""

import types

import jax
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax import errors, memory_limits
from ngrammer_jax.config.product_memory import ProductMemoryConfig
from ngrammer_jax.system import hosts
from ngrammer_jax.training import capacity, loop, programs
from tests.checks import mesh_of
from tests.loops import each

MODEL = {'layers': 1, 'width': 16, 'heads': 2, 'feed_forward_width': 16}
LSTM = {'width': 16, 'tie_embeddings': False}


def shapes(model=None, mesh=None, **sections):
  """The config and the abstract state of a tiny model with some values changed."""
  data = {'corpus': 'text', 'path': 'x', 'vocabulary': 'bytes'}
  config = experiment.resolve({'model': MODEL | (model or {}), 'data': data, **sections})
  run = programs.Programs(config, 257, mesh or mesh_of(1))
  return config, run.abstract


@each(
  'values, largest',
  [
    (
      {'model': {'width': 10**6}},
      'params/layer_0/attention/key/kernel [1000000, 2, 500000]; use smaller sizes',
    ),
    (
      {'model': {'feed_forward_width': 10**9}},
      'params/layer_0/feed_forward/gate/kernel [16, 1000000000]; use smaller sizes',
    ),
    (
      {'model': {'ngram': {'clusters': 10**9, 'dim': 4}}},
      'codebook/ngrammer/quantizer/centroids [2, 1000000000, 8]',
    ),
    ({'model': {'memory': {'length': 10**9}}}, 'memory/layers/0/hidden [16, 1000000000, 16]'),
    ({'training': {'segments_per_call': 10**9}}, 'batch/tokens_BxT [1000000000, 16, 128]'),
    ({'evaluation': {'segment_length': 2**31 - 1}}, 'evaluation/tokens_BxT [16, 2147483647]'),
    (
      {'model': {'memory': {}}, 'evaluation': {'memory': {'length': 10**9}}},
      'evaluation/layers/0/cache/keys [16, 2, 1000000000, 8]',
    ),
  ],
)
def test_what_is_too_large_is_refused_and_the_largest_array_named(values, largest):
  with pytest.raises(errors.BadInput) as caught:
    capacity.check_training_fits(*shapes(**values))
  sentence = str(caught.value)
  assert sentence.startswith('parameters, optimizer state, memory and batch need')
  assert f': the largest array is {largest}' in sentence
  assert '\n' not in sentence


def limit(monkeypatch, device=None, machine=None):
  """Sets the sizes of the memories; without `device`, devices are the processor."""
  in_machine = lambda mesh: memory_limits.MemoryLimit('this machine', machine, mesh.size)
  in_device = lambda mesh: memory_limits.MemoryLimit('a device (TPU)', device, 1)
  monkeypatch.setattr(memory_limits, 'machine_memory', in_machine)
  monkeypatch.setattr(memory_limits, 'device_memory', in_device if device else in_machine)


def test_shards_are_counted_once_and_copies_on_every_device(monkeypatch):
  wide = {'feed_forward_width': 2**16}  # 12.6 MB of parameters, 37.7 MB with their moments
  sharded, copied = (shapes(wide, mesh_of(*sizes)) for sizes in ((1, 2), (2,)))
  limit(monkeypatch, machine=45 * 10**6)
  capacity.check_training_fits(*sharded)
  with pytest.raises(errors.BadInput, match='need 72.* MiB, but this machine has 42.9 MiB: '):
    capacity.check_training_fits(*copied)
  limit(monkeypatch, device=25 * 10**6, machine=1)
  capacity.check_training_fits(*sharded)
  with pytest.raises(errors.BadInput, match=r'need 36.* MiB, but a device \(TPU\) has 23.8 MiB: '):
    capacity.check_training_fits(*copied)


def test_tables_of_the_host_are_in_the_memory_of_the_machine(monkeypatch):
  table = {'layers': (0,), 'rows': (20_000,), 'heads': 1, 'width': 8, 'table_memory': 'host'}
  abstract = shapes({'ngram_memories': (table,)})
  limit(monkeypatch, device=10**6, machine=10**7)
  capacity.check_training_fits(*abstract)  # 2.6 MB of tables and accumulators
  limit(monkeypatch, device=10**6, machine=10**6)
  with pytest.raises(errors.BadInput, match='this machine has 1.0 MiB: .*ngram_memory_0/table '):
    capacity.check_training_fits(*abstract)
  # A process has its rows once, for all of its devices.
  limit(monkeypatch, device=10**6, machine=4 * 10**6)
  abstract = shapes({'ngram_memories': (table,)}, mesh_of(2))
  capacity.check_training_fits(*abstract)
  limit(monkeypatch, device=10**6, machine=2 * 10**6)
  with pytest.raises(errors.BadInput, match='use fewer rows, more processes, or a machine'):
    capacity.check_training_fits(*abstract)
  monkeypatch.setitem(hosts._process, 'count', 2)
  capacity.check_training_fits(*abstract)


def test_an_unknown_size_of_a_memory_is_no_limit(monkeypatch):
  huge = shapes({'feed_forward_width': 10**9})
  with pytest.raises(errors.BadInput, match='feed_forward'):
    capacity.check_training_fits(*huge)
  limit(monkeypatch)
  capacity.check_training_fits(*huge)


def test_a_container_has_the_memory_that_it_may_use(monkeypatch, tmp_path):
  files = tmp_path / 'max', tmp_path / 'limit', tmp_path / 'none'
  files[0].write_text('max\n')
  files[1].write_text('123456\n')
  monkeypatch.setattr(memory_limits, 'CONTAINER_LIMITS', tuple(map(str, files)))
  assert memory_limits.machine_memory(mesh_of(4)) == ('this machine', 123456, 4)
  monkeypatch.setattr(memory_limits, 'CONTAINER_LIMITS', ())
  assert memory_limits.machine_memory(mesh_of(1)).size > 2**28


def test_temporary_arrays_that_do_not_fit_are_a_warning(monkeypatch, caplog):
  compiled = jax.jit(lambda x: x @ x.T).lower(jax.ShapeDtypeStruct((512, 4), 'float32'))
  compiled = compiled.compile()
  state = types.SimpleNamespace(step=shapes()[1].step)
  assert 2**20 < capacity.peak_bytes(compiled) < 2**21  # the product alone is 1 MiB
  for size, is_warned in ((2**21, False), (2**20, True)):
    limit(monkeypatch, machine=size)
    capacity.warn_of_temporaries(state, compiled)
    assert ('a step needs 1.0 MiB of memory, with activations' in caplog.text) == is_warned


def test_a_model_that_does_not_fit_leaves_no_workdir(tiny, tmp_path):
  with pytest.raises(errors.BadInput, match='the largest array is params/layer_0/feed_forward/'):
    loop.train(tiny({'layers': 1, 'feed_forward_width': 10**9}), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


@pytest.mark.full
def test_a_step_with_product_keys_does_not_hold_the_rows_of_all_tokens(one_device):
  """16,384 tokens with 128 rows of 2,048 values: 17 GB, and their gradients."""
  width, values, tokens = 2048, 256**2, 8 * 2048
  memory = ProductMemoryConfig(layers=(0,), sub_keys=256, optimizer='row_adagrad')
  sizes = {'layers': 1, 'width': width, 'heads': 16, 'feed_forward_width': 0, 'kernel': 'blocks'}
  config = experiment.Config(
    model=experiment.ModelConfig(**sizes, vocabulary_chunk=64, product_memory=memory),
    training=experiment.TrainingConfig(batch_size=8, segment_length=2048, segments_per_call=1),
  )
  step_programs = programs.Programs(config, 257, mesh_of(1))
  traced, _ = step_programs.trace_program('train')
  temporary = traced.lower().compile().memory_analysis().temp_size_in_bytes
  assert temporary < 0.3 * tokens * 128 * width * 4
  assert step_programs.abstract.params['product_memory']['table'].shape == (values, width)


def estimate(config, run=None):
  """The estimated bytes of a step with 257 token ids."""
  run = run or programs.Programs(config, 257, mesh_of(1))
  return capacity.estimate_step_bytes(config, 257, run.abstract, run.frozen)


def test_a_large_step_is_warned_of_before_it_is_compiled(monkeypatch, caplog):
  """The estimate has the logits, and what else the backward pass reads."""
  values = {'data': {'corpus': 'text', 'path': 'x', 'vocabulary': 'bytes'}}
  training = {'batch_size': 8, 'segment_length': 64}
  config = experiment.resolve({'model': MODEL, 'training': training, **values})
  run = programs.Programs(config, 257, mesh_of(1))
  needed = estimate(config, run)
  logits = 4 * 8 * 64 * 257
  assert logits < needed < 4 * logits
  twice = experiment.resolve({'model': MODEL, 'training': training | {'batch_size': 16}, **values})
  assert estimate(twice) - needed > logits  # the rest does not depend on the batch

  bfloat16 = MODEL | {'loss_dtype': 'bfloat16'}
  halved = experiment.resolve({'model': bfloat16, 'training': training, **values})
  assert needed - estimate(halved) == logits / 2

  def warn(size):
    caplog.clear()
    limit(monkeypatch, machine=size)
    capacity.warn_of_activations(config, 257, run.abstract, run.frozen)
    return caplog.text

  assert not warn(needed)
  text = warn(needed - 1)
  assert text.rstrip().endswith('lower training.batch_size=8 or training.segment_length=64')
  asked = []
  monkeypatch.setattr(capacity, 'estimate_step_bytes', lambda *args: asked.append(args))
  limit(monkeypatch, machine=100 * needed)
  capacity.warn_of_activations(config, 257, run.abstract, run.frozen)
  limit(monkeypatch, device=1, machine=1)  # model.remat=auto compiles what fits
  capacity.warn_of_activations(config, 257, run.abstract, run.frozen)
  assert not asked


def test_the_estimate_of_a_device_has_no_tables_of_the_host(monkeypatch):
  """On a processor they are in the same memory: their values, gradients and accumulators."""
  table = {'layers': (0,), 'rows': (20_000,), 'heads': 1, 'width': 8, 'table_memory': 'host'}
  values = {'data': {'corpus': 'text', 'path': 'x', 'vocabulary': 'bytes'}}
  config = experiment.resolve({'model': MODEL | {'ngram_memories': (table,)}, **values})
  run = programs.Programs(config, 257, mesh_of(1))
  on_processor = estimate(config, run)
  limit(monkeypatch, device=10**6, machine=10**9)
  assert on_processor - estimate(config, run) == run.host_bytes('train') > 10**6
