"""Memories that the command line adds to a trained model: sizes, start, and what is refused."""

import dataclasses

import jax
import pytest

from ngrammer_jax import command_line, errors
from ngrammer_jax import config as experiment
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data import vocabularies
from ngrammer_jax.models import language_model, model_variables
from ngrammer_jax.runs import added_memories
from tests import published_folders
from tests.checks import bad_input
from tests.loops import each

MEMORY = 'model.ngram_memories.0'


@pytest.fixture
def resolve(tmp_path):
  """A function that resolves the config of a published model with overrides."""
  folder = tmp_path / 'model'

  def resolve(*overrides, **options):
    if not folder.exists():
      published_folders.write(folder, **options)
    overrides = [('init_from', f'hf:{folder}'), *(tuple(o.split('=', 1)) for o in overrides)]
    return command_line.resolve(f'hf:{folder}', overrides)

  return resolve


def count_parameters(config):
  """The parameters of a model of published_folders.V ids."""
  model = language_model.build(config.model, published_folders.V)
  params = model_variables.abstract(model)['params']
  return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.fixture
def base(resolve):
  """The parameters of a trained model of four blocks, which `resolve` writes."""
  sizes = {'layers': 4, 'width': 64, 'heads': 4, 'key_value_heads': 2, 'feed_forward_width': 96}
  return count_parameters(resolve(**sizes))


def check_share(resolve, base, overrides, least=0.15):
  """What is added is at most a fifth; the published Engram has 1.3 billion parameters."""
  config = resolve(*overrides)
  share = count_parameters(config) / base - 1
  assert least < share <= 1 / added_memories.SHARE, share
  assert all(m.layers in ((), (1,), (1, 2)) for m in config.model.ngram_memories)


@each(
  'overrides',
  [
    [f'{MEMORY}.preset=engram'],
    [f'{MEMORY}.key=clusters', f'{MEMORY}.layers=1', f'{MEMORY}.join=concat'],
    ['model.ngram.layer=attention'],
    [f'{MEMORY}.preset=engram', 'model.ngram.dim=2', 'model.persistent.start=neutral'],
  ],
)
def test_sizes_that_nobody_sets_follow_the_trained_model(resolve, base, overrides):
  check_share(resolve, base, overrides)


@pytest.mark.slow
@each(
  'overrides, least',
  [
    ([f'{MEMORY}.preset=engram_v41'], 0.15),
    ([f'{MEMORY}.preset=over_encoding'], 0.15),
    (['model.persistent.vectors=1'], 0.0),
    (['model.persistent.kind=single_head'], 0.15),
  ],
)
def test_other_sizes_follow_it_too(resolve, base, overrides, least):
  check_share(resolve, base, overrides, least)


def test_the_command_line_and_the_trained_model_win(resolve, tmp_path):
  config = resolve(f'{MEMORY}.rows=50', f'{MEMORY}.preset=engram', f'{MEMORY}.start=published')
  (memory,) = config.model.ngram_memories
  assert (memory.rows, memory.start, memory.layers) == ((50,), 'published', (1,))
  assert resolve('model.ngram.clusters=4').model.ngram.dim == 2  # the norm of one feature is 0
  # A second training, from a run that has the memory.
  (tmp_path / 'run').mkdir()
  experiment.save(config, tmp_path / 'run' / 'config.json')
  vocabularies.ByteVocabulary().save(tmp_path / 'run')
  overrides = ['init_from=' + str(tmp_path / 'run'), f'{MEMORY}.preset=engram']
  assert resolve(*overrides).model == config.model
  # It resumes when the first model is gone, once there is a checkpoint.
  spec, given = f'hf:{tmp_path / "model"}', [('init_from', 'gone'), (f'{MEMORY}.preset', 'engram')]
  with bad_input('init_from=gone: no such folder; expected the workdir of a run'):
    command_line.resolve(spec, given, tmp_path / 'run')
  (tmp_path / 'run' / 'checkpoints' / '4').mkdir(parents=True)
  assert command_line.resolve(spec, given, tmp_path / 'run').model == config.model
  with bad_input('init_from=gone: no such folder; expected the workdir of a run'):
    command_line.resolve(spec, given)


def test_a_memory_of_a_config_file_starts_neutral(resolve, tmp_path):
  base = resolve().model
  (tmp_path / 'config.py').write_text(
    'from ngrammer_jax import config\n'
    'def get_config():\n'
    '  c = config.default()\n'
    f'  c.model = {dataclasses.asdict(base)!r}\n'
    f'  c.init_from = {str(tmp_path / "model")!r}\n'
    '  c.data.path = "text"\n'
    '  c.model.ngram = config.block("model.ngram", clusters=4, dim=2)\n'
    '  return c\n'
  )
  file = str(tmp_path / 'config.py')
  ngram = command_line.resolve(file, []).model.ngram
  assert (ngram.start, ngram.initial, ngram.vocabulary_size) == ('neutral', 'hidden', 16_384)


def test_spans_bring_a_memory_of_their_length(resolve):
  model = resolve('model.span.penalty=1e-6', 'training.segment_length=48').model
  assert (model.memory.length, model.memory.same_length) == (48, 'memory_and_self')
  assert (model.span.limit, model.span.initial_span(), model.span.renormalize) == (48, 48, False)
  model = resolve('model.span.kind=dynamic', 'model.span.limit=100').model
  assert model.memory.length == 98 < model.span.initial_span() < 99


@each(
  'memory, message',
  [
    ({'first': 'zeros'}, "model.memory.first='zeros' changes the loss"),
    ({'across_documents': True}, 'model.memory.across_documents=True changes the loss'),
    ({'same_length': 'memory_alone'}, "model.memory.same_length='memory_alone' changes the loss"),
    ({'length': 63, 'same_length': 'memory'}, 'model.memory.length=63 changes the loss'),
  ],
)
def test_a_segment_memory_that_changes_the_loss_is_refused(resolve, memory, message):
  base = resolve()
  length, same_length = memory.get('length', 64), memory.get('same_length', 'memory')
  memory = model_config.MemoryConfig(**{'length': length, 'same_length': same_length} | memory)
  model = dataclasses.replace(base.model, memory=memory)
  with pytest.raises(errors.BadInput) as caught:
    added_memories.check_neutral(base.model, dataclasses.replace(base, model=model))
  assert str(caught.value).startswith(message)
  fine = model_config.MemoryConfig(64, same_length='memory')
  added_memories.check_neutral(
    base.model, dataclasses.replace(base, model=dataclasses.replace(model, memory=fine))
  )


@each(
  'overrides, message',
  [
    (
      ['model.persistent.kind=all_attention'],
      "model.persistent.start='neutral' is not for model.persistent.kind='all_attention', but for "
      'attention_split, single_head: use None; the others take attention from the context of the '
      'trained model',
    ),
    (
      [f'{MEMORY}.key=clusters', f'{MEMORY}.heads=3'],
      'model.ngram_memories.0.heads=3 must divide model.width=16: use 2',
    ),
  ],
)
def test_impossible_additions(resolve, overrides, message):
  with bad_input(message):
    resolve(*overrides)


def test_spans_that_are_too_short_are_refused(resolve):
  base = resolve()
  memory = model_config.MemoryConfig(64, same_length='memory_and_self')
  span = model_config.SpanConfig(limit=70, initial=0.9, start='neutral')
  model = dataclasses.replace(base.model, memory=memory, span=span)
  config = dataclasses.replace(base, model=model)
  with bad_input(
    'model.span.limit=70 with model.span.initial=0.9 is a span of 63 tokens at the start, but keys '
    'are up to 64 tokens away: raise the limit, or use a shorter model.memory.length'
  ):
    added_memories.check_neutral(base.model, config)
  model = dataclasses.replace(model, span=dataclasses.replace(span, start=None))
  with bad_input(
    f'model.span is not in init_from={base.init_from}: use model.span.start="neutral" to '
    f'keep its loss, or "published"'
  ):
    added_memories.check_neutral(base.model, dataclasses.replace(config, model=model))
