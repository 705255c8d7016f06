"""SuperGLUE seqio tasks: tokens, end tokens, truncation, packing and metrics."""

import pathlib

import jax
import numpy as np
import pytest

from ngrammer_jax.config import finetune as finetune_config
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data import vocabularies
from ngrammer_jax.models import language_model, transformer
from ngrammer_jax.tasks.superglue import formats
from tests import tokenizer_files
from tests.checks import bad_input, random_variables
from tests.tasks import superglue_files

BYTES = vocabularies.ByteVocabulary()
END = BYTES.document_end


@pytest.fixture
def register(tmp_path, registration):
  """Returns a function that registers lines as training and validation split."""

  def register(lines, task='RTE', vocabulary=BYTES, **splits):
    folder = superglue_files.write(tmp_path, task, train=lines, val=lines, **splits)
    return registration.register(registration.ExampleSource(folder), vocabulary)

  return register


def text(ids):
  return bytes(int(i) for i in ids if i < 256).decode()


def test_tokens_end_with_document_end_and_truncation_keeps_the_question(register, features):
  register(superglue_files.rte(3))
  first, *_ = features.read_examples('rte', 'validation', 232, 32, True)
  assert text(first.inputs) == 'rte hypothesis: rain premise: It is rain.'
  assert text(first.targets) == 'entailment' and first.inputs[-1] == first.targets[-1] == END
  assert (first.label, first.key, first.choices) == (0, (0,), ('entailment', 'not_entailment'))
  first, *_ = features.read_examples('rte', 'validation', 16, 5, True)
  assert text(first.inputs) == 'rte hypoth' and text(first.targets) == 'enta'
  assert first.text == 'rte hypothesis: rain premise: It is rain.'  # it is not truncated
  boolq = [{'question': 'is it', 'passage': 'It is so.', 'idx': 0, 'label': True}]
  register(boolq, 'BoolQ')
  (truncated,) = features.read_examples('boolq', 'validation', 48, 32, True)
  assert text(truncated.inputs) == 'question: is it' and truncated.inputs[-1] == END


def test_questions_have_no_end_token_and_lose_their_start(tmp_path, registration, features):
  lines = superglue_files.rte(3)
  folder = superglue_files.write(tmp_path, 'RTE', train=lines, val=lines)
  registration.register(registration.ExampleSource(folder), BYTES, format='question')
  first, *_ = features.read_examples('rte', 'validation', 256, 16, True)
  question = 'Premise: It is rain.\nHypothesis: rain\nDoes the hypothesis follow?\nAnswer:'
  assert (text(first.inputs), text(first.targets)) == (question, ' yes')
  assert first.inputs[-1] != END == first.targets[-1] and first.choices == (' yes', ' no')
  first, *_ = features.read_examples('rte', 'validation', 28, 16, True)
  assert text(first.inputs) == question[-11:]


def test_lengths_before_truncation_are_logged(register, features, shown_progress, caplog):
  caplog.set_level('INFO')
  lines = superglue_files.rte(5)
  register(lines)
  rows = features.read_training_rows('rte', 48, 8, False, True)
  lengths = [len(f'rte hypothesis: rain premise: {line["premise"]}') + 1 for line in lines]
  assert rows.valid_BxT.sum(axis=1).max() <= 48 < max(lengths)
  assert shown_progress[-1] == ['tokenising rte, train', 5, 'examples', 5]
  assert caplog.messages[-1].startswith('rte, train: 5 of 5 inputs (100.0%) are truncated to 40 ')
  assert caplog.messages[-1].endswith(f'training.segment_length={max(lengths) + 8}')


@pytest.mark.full
def test_spans_of_wsc_can_be_marked_as_in_t5(registration, tmp_path):
  assert set(formats.WSC_SPANS) == set(finetune_config.WSC_SPANS)
  spans = {'span1_text': 'Bo', 'span1_index': 2, 'span2_text': 'He', 'span2_index': 1}
  line = {'text': 'He met Bo .', 'target': spans, 'idx': 0, 'label': True}
  folder = superglue_files.write(tmp_path, 'WSC', train=[line], val=[line])
  source = registration.ExampleSource(folder)
  for wsc_spans, text in (('all', '# He # met * Bo * .'), ('t5', 'He met * Bo * .')):
    registration.register(source, BYTES, wsc_spans)
    task = registration.seqio.TaskRegistry.get('ngrammer_superglue_wsc')
    (row,) = task.get_dataset(None, 'validation').as_numpy_iterator()
    assert row['inputs_pretokenized'].decode() == f'wsc text: {text}'


@pytest.mark.full
def test_long_example_is_an_error_without_truncation(register, features):
  register(superglue_files.rte(5))
  with bad_input(
    'SuperGLUE task rte, validation, idx [2]: inputs has 52 tokens, but the maximum is 50: change '
    'training.segment_length or finetune.targets_length, or set finetune.truncate=True'
  ):
    features.read_examples('rte', 'validation', 82, 32, False)
  fitting = [features.read_examples('rte', 'validation', 200, 32, cut) for cut in (True, False)]
  assert [[*map(str, examples)] for examples in fitting] == [[*map(str, fitting[0])]] * 2


ZERO = {'premise': 'A\x00B', 'hypothesis': '\x00', 'idx': 15, 'label': 'entailment'}
LINES = [*superglue_files.rte(15), ZERO]


@pytest.fixture(scope='module')
def rows_of(tmp_path_factory, registration, features):
  """Returns a function from `packed` and `adds_start` of the vocabulary to the training rows."""
  folder = superglue_files.write(tmp_path_factory.mktemp('rows'), 'RTE', train=LINES, val=LINES)
  rows = {}
  for adds_start in (False, True):
    vocabulary = vocabularies.ByteVocabulary()
    vocabulary.adds_start = adds_start
    registration.register(registration.ExampleSource(folder), vocabulary)
    for packed in (False, True):
      read = features.read_training_rows('rte', 256, 32, packed, True)
      rows[packed, adds_start] = read
  return lambda packed, adds_start=True: rows[packed, adds_start]


@pytest.mark.parametrize('packed', [False, True])
def test_training_rows_have_every_example_once(rows_of, packed):
  rows = rows_of(packed)
  assert rows.tokens_BxT.shape[1] == 256 and (len(rows.tokens_BxT) < len(LINES)) == packed
  lengths = rows.valid_BxT.sum(axis=1, keepdims=True)
  np.testing.assert_array_equal(rows.valid_BxT, np.arange(256) < lengths)
  assert (rows.tokens_BxT == 0)[rows.valid_BxT > 0].any()  # 0 is a token, not padding
  examples = []
  for tokens, targets, starts, valid, counts, prefix in zip(*rows, strict=True):
    first, *_ = np.nonzero(starts)
    for begin, end in zip(first, [*first[1:], int(valid.sum())], strict=True):
      part = slice(begin, end)
      assert tokens[begin] == END  # the document start
      np.testing.assert_array_equal(tokens[part][1:], targets[part][:-1])
      answer = targets[part][counts[part] > 0]
      # The prefix includes the token from which the first answer token is predicted.
      assert prefix[part].sum() == end - begin - len(answer) + 1
      examples.append((text(targets[part][counts[part] == 0]), text(answer), int(answer[-1])))
  expected = [
    (f'rte hypothesis: {line["hypothesis"]} premise: {line["premise"]}', line['label'], END)
    for line in LINES
  ]
  assert sorted(examples) == sorted(expected)


CHANGES = (
  {'convolution': 3, 'shared_query_key': True},
  {'position': 'relative', 'memory': model_config.MemoryConfig(16)},
)


@pytest.mark.parametrize(
  'change', [CHANGES[0], pytest.param(CHANGES[1], marks=pytest.mark.slow)], ids=['primer', 'memory']
)
def test_packed_examples_do_not_affect_each_other(x64, rows_of, change):
  ngram = model_config.NGramConfig(clusters=4, vocabulary_size=32, dim=2)
  sizes = {'layers': 2, 'width': 16, 'heads': 2, 'feed_forward_width': 24, 'scan_layers': False}
  config = model_config.ModelConfig(**sizes, dtype='float64', ngram=ngram, **change)
  model = transformer.TransformerLM(config, BYTES.size)
  empty = language_model.empty_memory(config, 1)
  variables = random_variables(model, np.zeros((1, 2), np.int32), empty, dtype='float64')

  @jax.jit
  def nll_of(rows):
    memory = language_model.empty_memory(config, len(rows.tokens_BxT))
    masks = {'starts_BxT': rows.starts_BxT, 'valid_BxT': rows.valid_BxT}
    hidden, _, _ = model.apply(variables, rows.tokens_BxT, memory, **masks)
    return model.apply(variables, hidden, rows.targets_BxT, method='scores').nll_BxT

  # A model that reads no document start: the first column is padding, or is left out.
  unpacked = rows_of(False, False)
  assert not unpacked.valid_BxT[:, 0].any() and unpacked.starts_BxT[:, 1].all()
  cut = jax.tree.map(lambda array: np.roll(array, -1, axis=1), unpacked)
  sorted_nll = []
  for rows in (rows_of(True), rows_of(False), rows_of(True, False), unpacked, cut):
    padding = len(LINES) - len(rows.tokens_BxT)  # equal shapes, so that one program is compiled
    rows = jax.tree.map(lambda a, padding=padding: np.pad(a, ((0, padding), (0, 0))), rows)
    nll = np.asarray(nll_of(rows._replace(prefix_BxT=None)))
    sorted_nll.append(np.sort(nll[rows.counts_BxT > 0]))
  np.testing.assert_allclose(*sorted_nll[:2], rtol=1e-10)
  for nll in sorted_nll[2:4]:
    np.testing.assert_allclose(nll, sorted_nll[4], rtol=1e-10)
  assert np.abs(sorted_nll[0] - sorted_nll[4]).max() > 1e-3


@pytest.mark.full
def test_seqio_evaluator_computes_the_metrics(register, seqio):
  from ngrammer_jax.tasks.vocabulary import ID_OFFSET

  lines = superglue_files.rte(10)
  names = register(lines)
  assert names == register(lines)  # registering again is not an error
  evaluator = seqio.Evaluator(
    'ngrammer_superglue_rte',
    seqio.PrefixLMFeatureConverter(pack=False, bos_id=END + ID_OFFSET),
    eval_split='validation',
    sequence_length={'inputs': 64, 'targets': 32},
  )
  constant_answer = np.append(BYTES.encode(b'entailment'), END).astype(np.int32) + ID_OFFSET
  predict = lambda dataset: [(i, constant_answer) for i, _ in dataset.as_numpy_iterator()]
  scores, _ = evaluator.evaluate(compute_metrics=True, predict_fn=predict)
  assert scores.result()['ngrammer_superglue_rte'] == {'accuracy': 50.0}


def test_vocabulary_must_encode_every_text_and_its_end(register):
  words = vocabularies.learn_words([b'a b a'], None)
  with bad_input(
    'a word vocabulary cannot encode every text and its end: fine-tuning needs a run with '
    'data.vocabulary="sentencepiece" or "bytes"'
  ):
    register(superglue_files.rte(1), vocabulary=words)


def test_a_tokenizer_encodes_every_text_and_its_end():
  from ngrammer_jax.tasks import vocabulary as task_vocabulary

  tokenizer = vocabularies.TokenizerVocabulary(tokenizer_files.byte_level())
  wrapped = task_vocabulary.TaskVocabulary(tokenizer)
  text = f'an é {tokenizer_files.END}\n'
  ids = wrapped.encode(text)
  assert wrapped.eos_id not in ids and wrapped.decode([*ids, wrapped.eos_id]) == text
  assert wrapped.vocab_size == tokenizer.size + 1


def test_nothing_is_downloaded_by_default(tmp_path, registration):
  with pytest.raises(ValueError, match='SuperGLUE was not found: set data.superglue_dir to the'):
    registration.ExampleSource(tfds_dir=pathlib.Path(tmp_path)).examples('rte', 'train')


def test_mixture_has_eight_tasks_with_sizes_as_rates(register, registration, seqio):
  register(superglue_files.rte(6))
  mixture = seqio.MixtureRegistry.get(registration.MIXTURE_NAME)
  assert sorted(task.name for task in mixture.tasks) == sorted(
    f'ngrammer_superglue_{name}'
    for name in ('boolq', 'cb', 'copa', 'multirc', 'record', 'rte', 'wic', 'wsc')
  )
  assert mixture.get_rate(seqio.TaskRegistry.get('ngrammer_superglue_rte')) == 6.0


def test_missing_seqio_error_names_packages_to_install(monkeypatch):
  import importlib

  from ngrammer_jax.tasks import tensorflow

  def import_module(name):
    raise ImportError(f'No module named {name!r}')

  monkeypatch.setattr(importlib, 'import_module', import_module)
  with bad_input(
    "SuperGLUE and C4 of TFDS need seqio and TensorFlow (No module named 'tensorflow'): "
    "pip install 'ngrammer_jax[tasks]', on Python 3.11 to 3.13 and not Windows"
  ):
    tensorflow.load()
