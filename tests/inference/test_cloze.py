"""Cloze questions: tokens that are scored, ties, and output files."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax import evaluate, runs, sharding
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config import recurrent as recurrent_config
from ngrammer_jax.data import cloze as cloze_data
from ngrammer_jax.data import vocabularies
from ngrammer_jax.inference import cloze, pairs
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.models import language_model, transformer
from ngrammer_jax.training import loop
from tests import tokenizer_files
from tests.checks import assert_close, bad_input, random_variables
from tests.data import test_cloze as files

GAP = cloze_data.PLACEHOLDER
ANIMALS = ('ape', 'bee', 'cat', 'cow', 'dog', 'emu', 'fox', 'gnu', 'hen', 'pig')
STORY = tuple(f'Then {ANIMALS[i % 9]} and {ANIMALS[i % 7]} went {i} miles .' for i in range(20))
FORMS = {
  'inside': f'Then {GAP} and cat went home .',
  'first': f'{GAP} went home , said the hen .',
  'last': f'At home was {GAP}',
  'no space before': f'" Then `{GAP} went home .',
  'two spaces before': f'Then  {GAP} went home .',
}
QUESTIONS = [
  cloze_data.Question('CN', STORY, query, ANIMALS, 'pig', 'file', 21 + 22 * i)
  for i, query in enumerate(FORMS.values())
]
TEXT = '\n'.join([*STORY, *(q.query.replace(GAP, 'gnu') for q in QUESTIONS)]).encode() + b'\n'


def make_vocabulary(kind):
  if kind == 'bytes':
    return vocabularies.ByteVocabulary()
  if kind == 'characters':
    return vocabularies.learn_characters([TEXT + ' '.join(ANIMALS).encode()], 'utf-8', True)
  if kind == 'words':
    return vocabularies.learn_words([TEXT], None)  # does not contain "pig"
  if kind == 'tokenizer':
    return vocabularies.TokenizerVocabulary(tokenizer_files.byte_level((TEXT * 9).decode()))
  return vocabularies.learn_sentencepiece([TEXT * 9], 300)


def make_evaluator(
  vocabulary, context=recurrent_config.UNBOUNDED, protocol='query', config=None, rows=1
):
  config = config or model_config.ModelConfig(layers=1, width=8, heads=1)
  model = transformer.TransformerLM(config, vocabulary.size)
  engine = inference.Engine(model, sharding.make_mesh())
  return cloze.ClozeEvaluator(engine, vocabulary, rows, context, protocol)


MEMORY = {
  'position': 'relative',
  'memory': model_config.MemoryConfig(160, same_length='memory_and_self'),
}
NGRAM = {'ngram': model_config.NGramConfig(clusters=4, vocabulary_size=32, dim=2)}
CONFIGS = {
  'both': MEMORY | NGRAM | {'layers': 1},
  'memory': MEMORY | {'layers': 2},
  'n-grams': NGRAM | {'layers': 1},
}
SLOW = [pytest.param(change, marks=pytest.mark.slow) for change in ('memory', 'n-grams')]


@pytest.mark.parametrize('change', ['both', *SLOW])
def test_scores_match_ten_full_forward_passes(change):
  base = {'width': 8, 'heads': 2, 'feed_forward_width': 8, 'scan_layers': False}
  config = model_config.ModelConfig(**base, dtype='float32', **CONFIGS[change])
  vocabulary = make_vocabulary('words')
  model = transformer.TransformerLM(config, vocabulary.size)
  empty = language_model.empty_memory(config, 1)
  variables = random_variables(model, np.zeros((1, 2), np.int32), empty)

  @jax.jit
  def compute_nll(ids):
    starts = np.arange(ids.shape[1] - 1)[None] == 0
    memory = language_model.empty_memory(config, len(ids))
    starts = np.broadcast_to(starts, (len(ids), starts.shape[1]))
    hidden, _, _ = model.apply(variables, ids[:, :-1], memory, starts_BxT=starts)
    return model.apply(variables, hidden, ids[:, 1:], method='scores').nll_BxT

  # A question of ordinary length and a much longer one.
  longer = dataclasses.replace(QUESTIONS[0], query=' '.join([f'Then {GAP} went', *['home'] * 40]))
  questions = [QUESTIONS[0], longer] if change == 'n-grams' else [QUESTIONS[0]]
  evaluator = make_evaluator(vocabulary, config=config)
  answers = evaluator({'codebook': {}} | variables, questions)
  for question, answer in zip(questions, answers, strict=True):
    fill_gap = lambda c, q=question: '\n'.join((*q.context, q.query.replace(GAP, c)))
    ids = [vocabulary.encode(fill_gap(candidate).encode()) for candidate in ANIMALS]
    ids_10xT = np.insert(np.stack(ids), 0, vocabulary.document_start, axis=1)
    nll_10xT = np.asarray(compute_nll(ids_10xT), np.float64)
    gap = len(vocabulary.encode(('\n'.join(STORY) + '\nThen').encode()))
    assert_close(answer.scores, -nll_10xT[:, gap:].sum(axis=1), 1e-5)
    if change == 'both':
      continue  # in the quick tier, what follows costs more than the rest
    of_pairs = pairs.score(
      evaluator.engine,
      {'codebook': {}} | variables,
      [pairs.EncodedPair(ids[: gap + 1], ids[gap + 1 :]) for ids in ids_10xT],
      evaluator.context,
      evaluator.rows,
    )
    assert_close(answer.scores, [each.log_likelihood for each in of_pairs], 1e-5)
    assert len(set(answer.scores)) == 10


@pytest.fixture
def fake_ranker(monkeypatch):
  """Replaces the model: records prefixes and choices, and scores them by a function of the ids."""
  fake = types.SimpleNamespace(prefixes=[], choices=[], score=lambda ids: -float(len(ids)))

  def rank(self, variables, prefixes, choices, rows):
    fake.prefixes, fake.choices = list(prefixes), list(choices)
    for i in reversed(range(len(prefixes))):
      yield i, np.array([fake.score(ids) for ids in choices[i]]), None

  monkeypatch.setattr(inference.Engine, 'rank', rank)
  return fake


KINDS = ('sentencepiece', 'tokenizer', 'characters', 'bytes', 'words')


def check_tokens(fake_ranker, vocabulary, protocol):
  """Checks that prefix and choice together are the tokens of the whole text."""
  answers = list(make_evaluator(vocabulary, protocol=protocol)({}, QUESTIONS))
  assert [answer.question.line for answer in answers] == [q.line for q in QUESTIONS]
  for question, prefix, choices in zip(
    QUESTIONS, fake_ranker.prefixes, fake_ranker.choices, strict=True
  ):
    query = question.query if protocol == 'query' else question.query.split(GAP)[0] + GAP
    text = '\n'.join((*question.context, query))
    for candidate, choice in zip(ANIMALS, choices, strict=True):
      expected = vocabulary.encode(text.replace(GAP, candidate).encode())
      assert prefix[0] == vocabulary.document_start
      assert [*prefix[1:], *choice] == expected.tolist() and len(choice)


@pytest.mark.parametrize('protocol', cloze.PROTOCOLS)
@pytest.mark.parametrize('kind', KINDS)
def test_prefix_and_choice_are_the_tokens_of_the_text(fake_ranker, kind, protocol):
  vocabulary = make_vocabulary(kind)
  check_tokens(fake_ranker, vocabulary, protocol)
  if kind != 'words':
    starts = [vocabulary.decode(choices[0]).decode()[:4] for choices in fake_ranker.choices]
    assert starts[:3] == [' ape', 'ape went'[:4] if protocol == 'query' else 'ape', ' ape']


@pytest.mark.parametrize('protocol', cloze.PROTOCOLS)
def test_prefix_and_choice_are_the_tokens_of_the_text_with_t5(fake_ranker, corpora, protocol):
  model = (corpora / 'vocab' / 't5_32k.model').read_bytes()
  check_tokens(fake_ranker, vocabularies.SentencePieceVocabulary(model), protocol)


def test_unknown_words_share_the_point(fake_ranker):
  vocabulary = make_vocabulary('words')
  unknown_words = ('yak', 'zebra', 'zebu')
  make_question = lambda answer, candidates: dataclasses.replace(
    QUESTIONS[0], answer=answer, candidates=candidates
  )
  questions = [
    make_question('yak', (*ANIMALS[:7], *unknown_words)),  # among the best three
    make_question('ape', (*ANIMALS[:7], *unknown_words)),
    make_question('zebu', (*ANIMALS[:8], 'yak', 'zebu')),
    make_question('hen', ANIMALS),  # pig is the only unknown word
  ]
  noise = iter(np.linspace(0, 1e-9, 40))  # rounding differences of equal tokens
  unknown = vocabulary.unknown
  fake_ranker.score = lambda ids: (-1.0 if ids[0] == unknown else -2.0) + next(noise)
  answers = list(make_evaluator(vocabulary)({}, questions))
  assert [answer.point for answer in answers] == pytest.approx([1 / 3, 0, 1 / 2, 0])
  assert answers[0].best == list(unknown_words) and answers[3].best == ['pig']
  (kind,) = cloze.summarize(answers).values()
  assert kind.pop('accuracy') == pytest.approx((1 / 3 + 1 / 2) / 4)
  del kind['low'], kind['high']
  assert kind == {
    'questions': 4,
    'strict_accuracy': 0,
    'ties': 3,
    'unknown': 9,
    'unknown_answers': 2,
    'context_cut': 0,
  }
  # A word that occurs twice is right both times.
  repeated = make_question('yak', (*ANIMALS[:7], 'yak', 'yak', 'zebu'))
  fake_ranker.score = lambda ids: float(ids[0] == unknown)
  assert next(make_evaluator(vocabulary)({}, [repeated])).point == pytest.approx(2 / 3)


def test_oldest_tokens_are_cut(fake_ranker):
  vocabulary = make_vocabulary('words')
  total = len('\n'.join(STORY).replace('\n', ' \n ').split(' ')) + 1 + 1 + 7
  choice = 6  # tokens of a candidate and the rest of the query: x and cat went home .
  (answer,) = make_evaluator(vocabulary, total - 1)({}, QUESTIONS[:1])
  (full_prefix,) = fake_ranker.prefixes
  assert not answer.cut and len(full_prefix) + choice == total
  for context in (total - 2, 10, 6):
    (answer,) = make_evaluator(vocabulary, context)({}, QUESTIONS[:1])
    assert answer.cut
    # The last token of a choice is predicted, but not read.
    assert fake_ranker.prefixes[0].tolist() == full_prefix[-(context - choice + 1) :].tolist()
  with bad_input(
    'file, line 21: the query has 7 tokens, but the evaluation context has only 5: raise it with '
    '--config.evaluation.segment_length=N'
  ):
    list(make_evaluator(vocabulary, 5)({}, QUESTIONS[:1]))


def test_unknown_character():
  vocabulary = vocabularies.learn_characters([b'abc \n'], 'utf-8', True)
  with bad_input("file, lines 1 to 21: 'T' is not among the 5 known characters"):
    list(make_evaluator(vocabulary)({}, QUESTIONS))


@pytest.mark.parametrize(
  'points, count, low, high',
  [(0, 10, 0, 0.2775), (5, 10, 0.2366, 0.7634), (1311, 2500, 0.5048, 0.5439)],
)
def test_wilson_interval(points, count, low, high):
  assert cloze.wilson_interval(points, count) == pytest.approx((low, high), abs=1e-4)


@pytest.fixture
def workspace(tmp_path, monkeypatch, fake_ranker):
  """A folder with a run without a model, and questions."""
  (tmp_path / 'run').mkdir()
  vocabulary = vocabularies.ByteVocabulary()
  vocabulary.save(tmp_path / 'run')
  run = runs.Run(tmp_path / 'run', experiment.Config())
  model = transformer.TransformerLM(run.config.model, vocabulary.size)
  replacements = {'restored': types.SimpleNamespace(step=7), 'evaluated': model, 'variables': {}}
  for name, value in replacements.items():
    monkeypatch.setattr(runs.Run, name, value)
  monkeypatch.setattr(runs, 'load_run', lambda *args: run)
  monkeypatch.setattr(
    experiment.Config, 'evaluation_context', lambda self: recurrent_config.UNBOUNDED
  )
  for kind in ('NE', 'V'):
    name = f'cbtest_{kind}_test_2500ex.txt'
    files.write(tmp_path, files.format_questions([files.QUESTION, files.SECOND_QUESTION]), name)
  return tmp_path


def read_results(folder, name):
  result = json.loads((folder / 'run' / 'evaluation' / f'{name}.json').read_text())
  lines = (folder / 'run' / 'evaluation' / f'{name}.jsonl').read_text().splitlines()
  return result, [json.loads(line) for line in lines]


def test_evaluate_writes_every_answer(workspace, capsys, caplog):
  caplog.set_level('INFO')
  evaluate.main([f'--workdir={workspace}/run', f'--cloze={workspace}'])
  size = sum(path.stat().st_size for path in workspace.glob('*.txt'))
  taken_for = f'--cloze={workspace}: test: 2 files (text), {size:,} bytes: 4 questions'
  assert caplog.messages.count(taken_for) == 1
  result, answers = read_results(workspace, 'cloze_test')
  assert result['official'] and result['step'] == 7
  assert list(result['kinds']) == ['NE', 'V']
  assert result['protocol'] == {
    'score': 'query',
    'of': 'the candidate and the rest of the query',
    'context': None,
    'ties': 'share the point',
  }
  # The shortest candidates have the highest score: dog, cat and n-a, but not Bird.
  assert result['kinds']['V']['accuracy'] == pytest.approx(1 / 6)
  assert result['kinds']['V']['strict_accuracy'] == 0 and result['kinds']['V']['ties'] == 2
  assert [(a['kind'], a['line'], a['answer']) for a in answers] == [
    ('NE', 21, 'dog'),
    ('NE', 43, 'Bird'),
    ('V', 21, 'dog'),
    ('V', 43, 'Bird'),
  ]
  assert answers[0]['chosen'] == 'cat' and answers[0]['point'] == pytest.approx(1 / 3)
  assert len(answers[0]['scores']) == len(answers[0]['candidates']) == 10
  out = capsys.readouterr().out
  assert "questions of the Children's Book Test; test, step 7" in out and '0.1667' in out


def test_results_of_a_file_have_its_name(workspace, capsys):
  flags = [f'--workdir={workspace}/run', '--cloze_protocol=prefix']
  evaluate.main([*flags, f'--cloze={workspace}/cbtest_V_test_2500ex.txt'])
  result, _ = read_results(workspace, 'cloze_prefix_cbtest_V_test_2500ex')
  assert list(result['kinds']) == ['V'] and result['protocol']['score'] == 'prefix'
  (workspace / 'cbtest_V_test_2500ex.txt').rename(workspace / 'mine.txt')
  evaluate.main([*flags, f'--cloze={workspace}/mine.txt'])
  result, _ = read_results(workspace, 'cloze_prefix_mine')
  assert result['name'] == 'mine' and not result['official']
  assert 'cloze questions; mine, step 7' in capsys.readouterr().out


def test_model_cannot_continue_a_context(workspace, monkeypatch):
  model = model_config.ModelConfig(position='segment_sinusoid')
  config = dataclasses.replace(experiment.Config(), model=model)
  monkeypatch.setattr(runs, 'load_run', lambda *args: runs.Run(workspace / 'run', config))
  with bad_input(
    "model.position='segment_sinusoid' is the position in the segment: such a model can be "
    'evaluated on a split, but cannot continue a text'
  ):
    evaluate.main([f'--workdir={workspace}/run', f'--cloze={workspace}'])


@pytest.mark.slow
def test_a_trained_run_answers(tiny, tmp_path, corpora, capsys):
  """Evaluates official questions with a trained run."""
  config = tiny(training={'steps': 2, 'evaluate_every': 0}, model={'ngram': None})
  loop.train(config, tmp_path / 'run')
  segment_length = '--config.evaluation.segment_length=1024'
  evaluate.main([f'--workdir={tmp_path}/run', f'--cloze={corpora}/cbt', segment_length])
  result, answers = read_results(tmp_path, 'cloze_test')
  assert [kind['questions'] for kind in result['kinds'].values()] == [1] * 4 and result['official']
  assert [kind['context_cut'] for kind in result['kinds'].values()] == [1] * 4  # bytes
  assert all(len(answer['scores']) == 10 for answer in answers)
  assert np.isfinite([answer['scores'] for answer in answers]).all()
