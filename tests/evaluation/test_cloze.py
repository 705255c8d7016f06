"""Answers to questions with a gap: what is scored, how ties count, what is written."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest

from ngrammer_jax import config as experiment
from ngrammer_jax import evaluate, runs, sharding
from ngrammer_jax.data import cloze as questions_of
from ngrammer_jax.data import vocabulary as vocabularies
from ngrammer_jax.evaluation import cloze
from ngrammer_jax.models import config as model_config
from ngrammer_jax.models import recurrent_config, transformer
from ngrammer_jax.training import loop
from tests.checks import assert_close, bad_input, random_variables
from tests.data import test_cloze as files

GAP = questions_of.PLACEHOLDER
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
  questions_of.Question('CN', STORY, query, ANIMALS, 'pig', 'file', 21 + 22 * i)
  for i, query in enumerate(FORMS.values())
]
TEXT = '\n'.join([*STORY, *(q.query.replace(GAP, 'gnu') for q in QUESTIONS)]).encode() + b'\n'


def learned(kind):
  if kind == 'bytes':
    return vocabularies.ByteVocabulary()
  if kind == 'characters':
    return vocabularies.learn_characters([TEXT + ' '.join(ANIMALS).encode()], 'utf-8', True)
  if kind == 'words':
    return vocabularies.learn_words([TEXT], None)  # without pig
  return vocabularies.learn_sentencepiece([TEXT * 9], 300)


def evaluator(
  vocabulary, context=recurrent_config.UNBOUNDED, protocol='query', config=None, rows=1
):
  config = config or model_config.ModelConfig(layers=1, width=8, heads=1)
  model = transformer.TransformerLM(config, vocabulary.size)
  return cloze.Evaluator(model, sharding.make_mesh(), vocabulary, rows, context, protocol)


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
def test_a_fork_scores_as_ten_full_readings(change):
  base = {'width': 8, 'heads': 2, 'feed_forward_width': 8, 'scan_layers': False}
  config = model_config.ModelConfig(**base, dtype='float32', **CONFIGS[change])
  vocabulary = learned('words')
  model = transformer.TransformerLM(config, vocabulary.size)
  empty = transformer.empty_memory(config, 1)
  variables = random_variables(model, np.zeros((1, 2), np.int32), empty)

  @jax.jit
  def nats(ids):
    starts = np.arange(ids.shape[1] - 1)[None] == 0
    memory = transformer.empty_memory(config, len(ids))
    starts = np.broadcast_to(starts, (len(ids), starts.shape[1]))
    hidden, _, _ = model.apply(variables, ids[:, :-1], memory, starts_BxT=starts)
    return model.apply(variables, hidden, ids[:, 1:], method='scores').nll_BxT

  # One that is read with shorter ones, and one that is far longer than them.
  longer = dataclasses.replace(QUESTIONS[0], query=' '.join([f'Then {GAP} went', *['home'] * 40]))
  questions = [QUESTIONS[0], longer] if change == 'n-grams' else [QUESTIONS[0]]
  answer = evaluator(vocabulary, config=config)
  answers = answer(variables['params'], variables.get('codebook', {}), questions)
  for question, found in zip(questions, answers, strict=True):
    whole = lambda c, q=question: '\n'.join((*q.context, q.query.replace(GAP, c)))
    ids = [vocabulary.encode(whole(candidate).encode()) for candidate in ANIMALS]
    ids_10xT = np.insert(np.stack(ids), 0, vocabulary.document_start, axis=1)
    nll_10xT = np.asarray(nats(ids_10xT), np.float64)
    place = len(vocabulary.encode(('\n'.join(STORY) + '\nThen').encode()))
    assert_close(found.scores, -nll_10xT[:, place:].sum(axis=1), 1e-5)
    assert len(set(found.scores)) == 10


@pytest.fixture
def ranked(monkeypatch):
  """What would be scored, in place of a model; scores are set by a function of the ids."""
  given = types.SimpleNamespace(prefixes=[], choices=[], score=lambda ids: -float(len(ids)))

  def rank(self, params, codebook, prefixes, choices):
    given.prefixes, given.choices = list(prefixes), list(choices)
    for i in reversed(range(len(prefixes))):
      yield i, np.array([given.score(ids) for ids in choices[i]])

  monkeypatch.setattr(cloze.ranking.Ranker, '__call__', rank)
  return given


KINDS = ('sentencepiece', 'characters', 'bytes', 'words')


def check_cuts(ranked, vocabulary, protocol):
  """Prefix and choice together are the tokens of the whole text, the document start first."""
  answers = list(evaluator(vocabulary, protocol=protocol)({}, {}, QUESTIONS))
  assert [answer.question.line for answer in answers] == [q.line for q in QUESTIONS]
  for question, prefix, choices in zip(QUESTIONS, ranked.prefixes, ranked.choices, strict=True):
    query = question.query if protocol == 'query' else question.query.split(GAP)[0] + GAP
    text = '\n'.join((*question.context, query))
    for candidate, choice in zip(ANIMALS, choices, strict=True):
      whole = vocabulary.encode(text.replace(GAP, candidate).encode())
      assert prefix[0] == vocabulary.document_start
      assert [*prefix[1:], *choice] == whole.tolist() and len(choice)


@pytest.mark.parametrize('protocol', cloze.PROTOCOLS)
@pytest.mark.parametrize('kind', KINDS)
def test_the_cut_changes_no_token(ranked, kind, protocol):
  vocabulary = learned(kind)
  check_cuts(ranked, vocabulary, protocol)
  if kind != 'words':
    begun = [vocabulary.decode(choices[0]).decode()[:4] for choices in ranked.choices]
    assert begun[:3] == [' ape', 'ape went'[:4] if protocol == 'query' else 'ape', ' ape']


@pytest.mark.parametrize('protocol', cloze.PROTOCOLS)
def test_the_cut_changes_no_token_of_t5(ranked, corpora, protocol):
  model = (corpora / 'vocab' / 't5_32k.model').read_bytes()
  check_cuts(ranked, vocabularies.SentencePieceVocabulary(model), protocol)


def test_words_out_of_the_vocabulary_share_the_point(ranked):
  vocabulary = learned('words')
  strangers = ('yak', 'zebra', 'zebu')
  ask = lambda answer, candidates: dataclasses.replace(
    QUESTIONS[0], answer=answer, candidates=candidates
  )
  some = [
    ask('yak', (*ANIMALS[:7], *strangers)),  # among the best three
    ask('ape', (*ANIMALS[:7], *strangers)),
    ask('zebu', (*ANIMALS[:8], 'yak', 'zebu')),
    ask('hen', ANIMALS),  # pig is the only stranger
  ]
  noise = iter(np.linspace(0, 1e-9, 40))  # what equal tokens may differ by
  unknown = vocabulary.unknown
  ranked.score = lambda ids: (-1.0 if ids[0] == unknown else -2.0) + next(noise)
  answers = list(evaluator(vocabulary)({}, {}, some))
  assert [answer.point for answer in answers] == pytest.approx([1 / 3, 0, 1 / 2, 0])
  assert answers[0].best == list(strangers) and answers[3].best == ['pig']
  (kind,) = cloze.summary(answers).values()
  assert kind.pop('accuracy') == pytest.approx((1 / 3 + 1 / 2) / 4)
  del kind['low'], kind['high']
  assert kind == {
    'questions': 4,
    'strict_accuracy': 0,
    'ties': 3,
    'unknown_candidates': 9,
    'unknown_answers': 2,
    'context_cut': 0,
  }
  # A word that is there twice is right both times.
  twice = ask('yak', (*ANIMALS[:7], 'yak', 'yak', 'zebu'))
  ranked.score = lambda ids: float(ids[0] == unknown)
  assert next(evaluator(vocabulary)({}, {}, [twice])).point == pytest.approx(2 / 3)


def test_the_oldest_tokens_are_cut(ranked):
  vocabulary = learned('words')
  whole = len('\n'.join(STORY).replace('\n', ' \n ').split(' ')) + 1 + 1 + 7
  choices = 6  # tokens of a candidate and the rest: x and cat went home .
  (kept,) = evaluator(vocabulary, whole - 1)({}, {}, QUESTIONS[:1])
  (everything,) = ranked.prefixes
  assert not kept.cut and len(everything) + choices == whole
  for context in (whole - 2, 10, 6):
    (answer,) = evaluator(vocabulary, context)({}, {}, QUESTIONS[:1])
    assert answer.cut
    # The last token of a choice is predicted, but not read.
    assert ranked.prefixes[0].tolist() == everything[-(context - choices + 1) :].tolist()
  with bad_input(
    'file, line 21: the query has 7 tokens, but the context of evaluation 5: raise it with '
    '--config.evaluation.segment_length=N'
  ):
    list(evaluator(vocabulary, 5)({}, {}, QUESTIONS[:1]))


def test_a_character_that_is_not_known():
  vocabulary = vocabularies.learn_characters([b'abc \n'], 'utf-8', True)
  with bad_input("file, lines 1 to 21: 'T' is not among the 5 known characters"):
    list(evaluator(vocabulary)({}, {}, QUESTIONS))


@pytest.mark.parametrize(
  'points, count, low, high',
  [(0, 10, 0, 0.2775), (5, 10, 0.2366, 0.7634), (1311, 2500, 0.5048, 0.5439)],
)
def test_wilson(points, count, low, high):
  assert cloze.wilson(points, count) == pytest.approx((low, high), abs=1e-4)


@pytest.fixture
def prepared(tmp_path, monkeypatch, ranked):
  """A run without a model, and a folder of questions and books."""
  (tmp_path / 'run').mkdir()
  vocabulary = vocabularies.ByteVocabulary()
  vocabulary.save(tmp_path / 'run')
  run = runs.Run(tmp_path / 'run', experiment.Config())
  model = transformer.TransformerLM(run.config.model, vocabulary.size)
  instead = {'state': types.SimpleNamespace(step=7), 'evaluated': model, '_serving': ({}, {})}
  for name, value in instead.items():
    monkeypatch.setattr(runs.Run, name, value)
  monkeypatch.setattr(runs, 'load_run', lambda *given: run)
  monkeypatch.setattr(
    experiment.Config, 'evaluation_context', lambda self: recurrent_config.UNBOUNDED
  )
  for kind in ('NE', 'V'):
    name = f'cbtest_{kind}_test_2500ex.txt'
    files.write(
      tmp_path, questions_of.format_questions([files.QUESTION, files.SECOND_QUESTION]), name
    )
  files.write_books(tmp_path)
  return tmp_path


def kept(folder, name):
  result = json.loads((folder / 'run' / 'evaluation' / f'{name}.json').read_text())
  lines = (folder / 'run' / 'evaluation' / f'{name}.jsonl').read_text().splitlines()
  return result, [json.loads(line) for line in lines]


def test_evaluate_writes_every_answer(prepared, capsys):
  evaluate.main([f'--workdir={prepared}/run', f'--cloze={prepared}'])
  result, answers = kept(prepared, 'cloze_test')
  assert result['official'] and not result['made'] and result['step'] == 7
  assert list(result['kinds']) == ['NE', 'V']
  assert result['protocol'] == {
    'score': 'query',
    'of': 'the candidate and the rest of the query',
    'context': None,
    'ties': 'share the point',
  }
  # The shortest are best here: dog, cat and n-a; and not Bird.
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


def test_made_questions_are_named_so(prepared, capsys):
  given = [f'--workdir={prepared}/run', f'--cloze={prepared}', '--cloze_made=4']
  evaluate.main([*given, '--cloze_protocol=prefix'])
  result, answers = kept(prepared, 'cloze_made_prefix_test')
  assert not result['official'] and result['made'] and len(answers) == 12
  assert list(result['kinds']) == ['made-names', 'made-content-words', 'made-prepositions']
  assert result['protocol']['score'] == 'prefix'
  assert 'CBT-style questions made of raw books, not the official ones' in capsys.readouterr().out
  assert 'not the official ones' in result['label']


def test_answers_to_a_file_are_named_by_it(prepared, capsys):
  given = [f'--workdir={prepared}/run', '--cloze_protocol=prefix']
  evaluate.main([*given, f'--cloze={prepared}/cbtest_V_test_2500ex.txt'])
  assert list(kept(prepared, 'cloze_prefix_cbtest_V_test_2500ex')[0]['kinds']) == ['V']
  evaluate.main([*given, f'--cloze={prepared}/cbt_test.txt', '--cloze_made=4'])
  assert kept(prepared, 'cloze_made_prefix_cbt_test')[0]['name'] == 'cbt_test'
  assert 'not the official ones; cbt_test, step 7' in capsys.readouterr().out


def test_positions_that_count_from_the_end(prepared, monkeypatch):
  model = model_config.ModelConfig(position='learned')
  config = dataclasses.replace(experiment.Config(), model=model)
  monkeypatch.setattr(runs, 'load_run', lambda *given: runs.Run(prepared / 'run', config))
  with bad_input(
    "model.position='learned' counts from the end of a segment: such a model can be evaluated on "
    'a split, but cannot go on after a context'
  ):
    evaluate.main([f'--workdir={prepared}/run', f'--cloze={prepared}'])


@pytest.mark.slow
def test_a_trained_run_answers(tiny, tmp_path, corpora, capsys):
  """The verb on a run, with the genuine questions and with made ones."""
  given = tiny(training={'steps': 2, 'evaluate_every': 0}, model={'ngram': None})
  loop.train(given, tmp_path / 'run')
  evaluation = '--config.evaluation.segment_length=1024'
  evaluate.main([f'--workdir={tmp_path}/run', f'--cloze={corpora}/cbt', evaluation])
  result, answers = kept(tmp_path, 'cloze_test')
  assert [kind['questions'] for kind in result['kinds'].values()] == [1] * 4 and result['official']
  assert [kind['context_cut'] for kind in result['kinds'].values()] == [1] * 4  # bytes
  assert all(len(answer['scores']) == 10 for answer in answers)
  assert np.isfinite([answer['scores'] for answer in answers]).all()
