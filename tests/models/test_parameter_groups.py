"""Every parameter is of one part, and only those of the parts that are not trained are frozen."""

import numpy as np
import pytest

from ngrammer_jax.config.model import placed_blocks
from ngrammer_jax.models import memories, parameter_groups
from tests.checks import bad_input

NAMES = {
  'embedding': 'embedding',
  'absolute_position': 'embedding',
  'layer_0/attention/query/kernel': 'blocks',
  'layer_3/attention/span/span': 'span',
  'layer_3/attention/persistent/persistent_keys': 'persistent',
  'layer_1/ngram_memory_0/gate/key/kernel': 'ngram_memory_0',
  'ngram_memory_1/table': 'ngram_memory_1',
  'layer_2/ngrammer/table': 'ngram',
  'distance_embedding': 'blocks',
  'final_norm/scale': 'head',
  'softmax_weight': 'head',
}
PARAMS = {'embedding': 0, 'layer_0': {'out': 1, 'ngram_memory_0': {'table': 2}}, 'final_norm': 3}
SOURCE = {'embedding': np.dtype('float16'), 'layer_0/out': np.dtype('float32')}


def test_the_part_of_a_parameter():
  assert {name: parameter_groups.group_of(name) for name in NAMES} == NAMES


@pytest.mark.parametrize(
  'train, expected',
  [
    (('all',), []),
    (('new',), ['embedding', 'layer_0/out']),
    (('new', 'blocks'), ['embedding']),
    (('ngram_memory_0',), ['embedding', 'layer_0/out', 'final_norm']),
    (('embedding', 'blocks', 'head', 'ngram_memory_0'), []),
  ],
)
def test_what_is_frozen(train, expected):
  frozen = parameter_groups.frozen(train, PARAMS, SOURCE)
  assert list(frozen) == expected
  assert frozen == {name: SOURCE.get(name, np.dtype('float32')) for name in expected}


def test_trees_are_divided_and_merged():
  names = ['embedding', 'layer_0/ngram_memory_0/table']
  rest, frozen = parameter_groups.without(PARAMS, names), parameter_groups.select(PARAMS, names)
  assert rest == {'layer_0': {'out': 1}, 'final_norm': 3}
  assert frozen == {'embedding': 0, 'layer_0': {'ngram_memory_0': {'table': 2}}}
  assert parameter_groups.merge(rest, frozen) == PARAMS
  assert parameter_groups.merge(PARAMS, {'final_norm': 4})['final_norm'] == 4


def test_a_part_without_parameters_is_refused():
  parameter_groups.check_names(['all', 'new', 'head', 'ngram_memory_0'], PARAMS)
  with bad_input(
    "optimizer names the part 'span', but it has no parameters in this model: use "
    'blocks, embedding, head, ngram_memory_0'
  ):
    parameter_groups.check_names(['head', 'span'], PARAMS)


def test_a_training_of_nothing_is_refused():
  params = {'embedding': np.zeros(3), 'ngram_memory_0': {'table': np.zeros(3)}}
  source = {'embedding': np.dtype(np.float32), 'ngram_memory_0/table': np.dtype(np.float32)}
  message = "optimizer.train=('new',) trains nothing: init_from has all parameters; name some of "
  with bad_input(f'{message}embedding, ngram_memory_0'):
    parameter_groups.frozen(('new',), params, source)
  assert parameter_groups.frozen(('ngram_memory_0',), params, source).keys() == {'embedding'}


def test_memories_with_places_are_groups_by_the_name_of_their_block():
  assert set(placed_blocks()) == set(memories.MEMORIES)
  assert parameter_groups.group_of('layer_1/token_shift_before_attention/weight') == 'token_shift'
  assert parameter_groups.group_of('ngrammer/table') == 'ngram'
  assert parameter_groups.group_of('ngram_memory_0/table') == 'ngram_memory_0'
  assert parameter_groups.memory_of('layer_1/copy_memory_input/gate') == 'layer_1/copy_memory_input'
