"""The tasks of seqio: tokens, ends, cuts, packing and metrics."""

import functools
import pathlib

import jax
import numpy as np
import pytest

from ngrammer_jax.data import vocabulary as vocabularies
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import transformer
from tests.checks import bad_input, random_variables
from tests.tasks import superglue_files

BYTES = vocabularies.ByteVocabulary()
END = BYTES.document_end


@pytest.fixture
def register(tmp_path, registration):
  """Makes tasks of lines, which are both to train on and to validate with."""

  def register(lines, task='RTE', vocabulary=BYTES, **splits):
    folder = superglue_files.write(tmp_path, task, train=lines, val=lines, **splits)
    return registration.register(registration.Source(folder), vocabulary)

  return register


def text(ids):
  return bytes(int(i) for i in ids if i < 256).decode()


def test_tokens_have_their_end_and_are_cut_where_it_does_the_least_harm(register, features):
  register(superglue_files.rte(3))
  (first, *_), targets = list(features.examples('rte', 'validation', 200, 32, True)), 'entailment'
  assert text(first.inputs) == 'rte hypothesis: rain premise: It is rain.'
  assert text(first.targets) == targets and first.inputs[-1] == first.targets[-1] == END
  assert (first.label, first.key, first.choices) == (0, (0,), ('entailment', 'not_entailment'))
  first = next(features.examples('rte', 'validation', 11, 5, True))
  assert text(first.inputs) == 'rte hypoth' and text(first.targets) == 'enta'
  boolq = [{'question': 'is it', 'passage': 'It is so.', 'idx': 0, 'label': True}]
  register(boolq, 'BoolQ')
  cut = next(features.examples('boolq', 'validation', 16, 32, True))
  assert text(cut.inputs) == 'question: is it' and cut.inputs[-1] == END


def test_too_long_is_an_error_where_nothing_is_cut(register, features):
  register(superglue_files.rte(5))
  with bad_input(
    'SuperGLUE task rte, validation, example 2: inputs of 52 tokens, and there is room for 50: '
    'raise training.segment_length, lower finetune.targets_length, or set finetune.truncate=True'
  ):
    list(features.examples('rte', 'validation', 50, 32, False))


ZERO = {'premise': 'A\x00B', 'hypothesis': '\x00', 'idx': 15, 'label': 'entailment'}
LINES = [*superglue_files.rte(15), ZERO]


@pytest.fixture(scope='module')
def rows_of(tmp_path_factory, registration, features):
  """Rows to train on of some lines, packed or not."""
  folder = superglue_files.write(tmp_path_factory.mktemp('rows'), 'RTE', train=LINES, val=LINES)
  registration.register(registration.Source(folder), BYTES)
  rows = functools.cache(lambda packed: features.training_rows('rte', 256, 32, packed, True))
  for packed in (False, True):
    rows(packed)
  return rows


@pytest.mark.parametrize('packed', [False, True])
def test_rows_to_train_on_have_every_example_once(rows_of, packed):
  rows = rows_of(packed)
  assert rows.tokens_BxT.shape[1] == 256 and (len(rows.tokens_BxT) < len(LINES)) == packed
  lengths = rows.valid_BxT.sum(axis=1, keepdims=True)
  np.testing.assert_array_equal(rows.valid_BxT, np.arange(256) < lengths)
  assert (rows.tokens_BxT == 0)[rows.valid_BxT > 0].any()  # a zero is a token and no padding
  found = []
  for tokens, targets, starts, valid, counts, prefix in zip(*rows, strict=True):
    first, *_ = np.nonzero(starts)
    for begin, end in zip(first, [*first[1:], int(valid.sum())], strict=True):
      part = slice(begin, end)
      assert tokens[begin] == END  # the document start
      np.testing.assert_array_equal(tokens[part][1:], targets[part][:-1])
      answer = targets[part][counts[part] > 0]
      # The prefix goes on to the token from which the answer is predicted.
      assert prefix[part].sum() == end - begin - len(answer) + 1
      found.append((text(targets[part][counts[part] == 0]), text(answer), int(answer[-1])))
  expected = [
    (f'rte hypothesis: {line["hypothesis"]} premise: {line["premise"]}', line['label'], END)
    for line in LINES
  ]
  assert sorted(found) == sorted(expected)


CHANGES = (
  {'convolution': 3, 'shared_query_key': True},
  {'position': 'relative', 'memory': model_config.MemoryConfig(16)},
)


@pytest.mark.parametrize(
  'change', [CHANGES[0], pytest.param(CHANGES[1], marks=pytest.mark.slow)], ids=['primer', 'memory']
)
def test_examples_of_a_row_do_not_see_each_other(x64, rows_of, change):
  ngram = model_config.NGramConfig(clusters=4, vocabulary_size=32, dim=2)
  sizes = {'layers': 2, 'width': 16, 'heads': 2, 'feed_forward_width': 24, 'scan_layers': False}
  config = model_config.ModelConfig(**sizes, dtype='float64', ngram=ngram, **change)
  model = transformer.TransformerLM(config, BYTES.size)
  empty = transformer.empty_memory(config, 1)
  variables = random_variables(model, np.zeros((1, 2), np.int32), empty, dtype='float64')

  @jax.jit
  def nll_of(rows):
    memory = transformer.empty_memory(config, len(rows.tokens_BxT))
    how = {'starts_BxT': rows.starts_BxT, 'valid_BxT': rows.valid_BxT}
    hidden, _, _ = model.apply(variables, rows.tokens_BxT, memory, **how)
    return model.apply(variables, hidden, rows.targets_BxT, method='scores').nll_BxT

  both = []
  for rows in (rows_of(True), rows_of(False)):
    fill = len(LINES) - len(rows.tokens_BxT)  # one shape, one program
    rows = jax.tree.map(lambda a, fill=fill: np.pad(a, ((0, fill), (0, 0))), rows)
    nll = np.asarray(nll_of(rows._replace(prefix_BxT=None)))
    both.append(np.sort(nll[rows.counts_BxT > 0]))
  np.testing.assert_allclose(*both, rtol=1e-10)


def test_the_evaluator_of_seqio_computes_our_metrics(register, seqio):
  from ngrammer_jax.tasks.vocabulary import SHIFT

  lines = superglue_files.rte(10)
  names = register(lines)
  assert names == register(lines)  # again is no error
  evaluator = seqio.Evaluator(
    'ngrammer_superglue_rte',
    seqio.PrefixLMFeatureConverter(pack=False, bos_id=END + SHIFT),
    eval_split='validation',
    sequence_length={'inputs': 64, 'targets': 32},
  )
  always = np.append(BYTES.encode(b'entailment'), END).astype(np.int32) + SHIFT
  predict = lambda dataset: [(i, always) for i, _ in dataset.as_numpy_iterator()]
  scores, _ = evaluator.evaluate(compute_metrics=True, predict_fn=predict)
  assert scores.result()['ngrammer_superglue_rte'] == {'accuracy': 50.0}


def test_a_vocabulary_must_write_any_text_and_its_end(register):
  words = vocabularies.learn_words([b'a b a'], None)
  with bad_input(
    'a vocabulary of word cannot write every text and its end: fine-tuning needs a run with '
    'data.vocabulary="sentencepiece" or "bytes"'
  ):
    register(superglue_files.rte(1), vocabulary=words)


def test_nothing_is_fetched_without_being_asked(tmp_path, registration):
  with pytest.raises(ValueError, match='SuperGLUE is not here: set data.superglue_dir to the'):
    registration.Source(tfds_dir=pathlib.Path(tmp_path)).examples('rte', 'train')


def test_the_mixture_has_the_eight_tasks_by_their_sizes(register, registration, seqio):
  register(superglue_files.rte(6))
  mixture = seqio.MixtureRegistry.get(registration.MIXTURE)
  assert sorted(task.name for task in mixture.tasks) == sorted(
    f'ngrammer_superglue_{name}'
    for name in ('boolq', 'cb', 'copa', 'multirc', 'record', 'rte', 'wic', 'wsc')
  )
  assert mixture.get_rate(seqio.TaskRegistry.get('ngrammer_superglue_rte')) == 6.0


def test_without_seqio_the_error_says_what_to_install(monkeypatch):
  import importlib

  from ngrammer_jax.tasks import tensorflow

  def missing(name):
    raise ImportError(f'No module named {name!r}')

  monkeypatch.setattr(importlib, 'import_module', missing)
  with bad_input(
    "tasks need seqio and TensorFlow (No module named 'tensorflow'): pip install "
    '"seqio>=0.0.20" "tensorflow-datasets>=4.9.9" importlib_resources, on Python 3.11 to 3.13 and '
    'not Windows'
  ):
    tensorflow.load()
