"""Numbers that are out of range are said where they are known."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ngrammer_jax import analyze, errors, flags, generate
from ngrammer_jax import config as experiment
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config import optimizer as optimizer_config
from ngrammer_jax.config import recurrent as recurrent_config
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.layers import NGramMemory, NGrammer, context
from ngrammer_jax.models import language_model
from ngrammer_jax.training import preparation, train_task
from tests import test_generate

V = 11


def refused(text):
  return pytest.raises(errors.BadInput, match=re.escape(text))


MODELS = {
  'Transformer': model_config.ModelConfig(layers=1, width=8, heads=2, feed_forward_width=8),
  'adaptive': model_config.ModelConfig(
    layers=1,
    width=8,
    heads=2,
    feed_forward_width=8,
    adaptive_softmax=model_config.AdaptiveSoftmaxConfig((4,)),
  ),
  'recurrent': model_config.ModelConfig(
    width=8, tie_embeddings=False, recurrent=recurrent_config.RecurrentConfig(hidden=8)
  ),
}
WRONG = {
  'tokens contain 11, expected ids from 0 to 10: check the vocabulary': [[0, V]],
  'tokens contain -1, expected ids from 0 to 10: check the vocabulary': [[-1, 2]],
  'tokens must be integers, not float32': np.ones((1, 2), np.float32),
  'tokens must be integers, not bool': np.ones((1, 2), bool),
}


@pytest.mark.parametrize('kind', MODELS)
def test_tokens_that_a_model_does_not_have(kind):
  model = language_model.build(MODELS[kind], V)
  memory = model.empty_memory(1)
  run = lambda tokens: model.init(jax.random.key(0), tokens, memory)
  for message, tokens in WRONG.items():
    with refused(message):
      run(np.asarray(tokens))
  with refused('tokens must be integers, not float32'):  # also under jit
    jax.eval_shape(run, jnp.ones((1, 2)))
  jax.eval_shape(run, np.array([[0, V]]))  # not known there


def test_tokens_that_a_layer_does_not_have():
  options = NGramMemoryConfig(hash='polynomial', join='sum', orders=(2,), heads=1, rows=(31,))
  layer = NGramMemory(dataclasses.replace(options, width=4), V, 8)
  x = np.ones((1, 2, 8), np.float32)
  for message, tokens in WRONG.items():
    with refused(f'context.{message.replace("tokens", "tokens_BxT", 1)}'):
      layer.init(jax.random.key(0), x, context.Context(tokens_BxT=np.asarray(tokens)))
  ngrammer = NGrammer(heads=2, clusters=None, vocabulary_size=50, dim=4, id_vocabulary=V)
  with pytest.raises(errors.BadInput, match='contain 11, expected ids from 0 to 10'):
    ngrammer.init(jax.random.key(0), x, ids=np.array([[0, V]]))


def test_ids_that_the_engine_is_given(trained):
  run = test_generate.open_run(trained)
  engine, variables, size = run.engine, run.variables, run.vocabulary.size
  for ids, message in (
    (np.array([1, size]), f'token ids contain {size}, expected ids from 0 to {size - 1}: check'),
    (np.array([-3, 1]), f'token ids contain -3, expected ids from 0 to {size - 1}: check'),
    (np.array([1.0, 2.5]), 'token ids must be integers, not float64'),
  ):
    with pytest.raises(errors.BadInput, match=message):
      list(engine.score_documents(variables, [ids], 0, 8))
    with pytest.raises(errors.BadInput, match=message):
      list(engine.rank(variables, [np.array([1])], [[ids]], 1))


@pytest.mark.parametrize(
  'section, warning',
  [
    ({'warmup_steps': 50}, 'optimizer.warmup_steps=50 do not end before training.steps=20: the '),
    ({'warmup_steps': 20}, 'learning rate only rises, to 1.00 of optimizer.learning_rate'),
    ({'warmup_steps': 5, 'drop': optimizer_config.DropConfig(20)}, 'optimizer.drop.steps=20 are'),
    (
      {'warmup_steps': 5, 'rates': (optimizer_config.RateConfig('head', 0.0),)},
      'optimizer.rates.0.factor=0: head does not learn',
    ),
    (
      {'warmup_steps': 5, 'train': ('head',)},
      'optimizer.train names the head, whose matrix is the embedding',
    ),
    ({'warmup_steps': 5, 'train': ('head', 'embedding')}, None),
    ({'warmup_steps': 19}, None),
    (
      {'warmup_steps': 5, 'schedule': 'wsd', 'decay_steps': 8, 'decay_from': 10},
      'the decay ends at step 18, not at training.steps=20: use optimizer.decay_steps=10',
    ),
    (
      {'warmup_steps': 5, 'schedule': 'wsd', 'decay_steps': 11, 'decay_from': 10},
      'the decay ends at step 21, not at training.steps=20: use optimizer.decay_steps=10',
    ),
    (
      {'warmup_steps': 5, 'schedule': 'wsd', 'decay_steps': 16},
      'optimizer.warmup_steps=5 end after the decay began at step 4: the learning rate jumps',
    ),
    ({'warmup_steps': 5, 'schedule': 'wsd', 'decay_steps': 8, 'decay_from': 20}, None),
    ({'warmup_steps': 5, 'schedule': 'wsd', 'decay_steps': 8}, None),
  ],
)
def test_a_schedule_that_does_not_fit_the_steps(section, warning):
  config = experiment.Config(
    training=experiment.TrainingConfig(steps=20), optimizer=experiment.OptimizerConfig(**section)
  )
  warnings = ' '.join(config.warnings())
  assert (warning in warnings) if warning else not warnings


def test_training_says_its_warnings(tiny, tmp_path, caplog):
  """Before devices are touched; and a step that is larger than the text."""
  config = tiny(optimizer={'warmup_steps': 30}, training={'batch_size': 2_000})
  preparation.prepare(
    dataclasses.replace(config, training=dataclasses.replace(config.training, batch_size=8)),
    tmp_path / 'run',
    train_task.CorpusTask,
  )
  assert any('optimizer.warmup_steps=30 do not end before' in text for text in caplog.messages)
  train_task.CorpusTask(config).segment(0, slice(1))
  message = 'a step of training.batch_size=2,000 x training.segment_length=16 reads the whole '
  assert message + 'training text: lower one of them' in caplog.messages


ESCAPES = {
  r'a\nb': 'a\nb',
  r'\t': '\t',
  r'C:\\new': r'C:\new',
  r'\\\n': '\\\n',
  r'\d\x41\"': r'\d\x41\"',
  'plain\nlines': 'plain\nlines',
  '': '',
}


@pytest.mark.parametrize('text', ESCAPES)
def test_escapes_in_texts_of_flags(text, caplog):
  caplog.set_level('INFO')
  arguments = ['--workdir=x', f'--prompt={text}', f'--stop={text}', '--stop=.']
  parser = generate._make_parser()
  for more, expected in (([], ESCAPES[text]), (['--literal'], text)):
    options = parser.parse_args([*arguments, *more])
    flags.read_escapes(options, 'prompt', 'stop')
    assert (options.prompt, options.stop) == (expected, [expected, '.'])
  assert len(caplog.messages) == 2 * (ESCAPES[text] != text)


def test_commands_read_escapes(trained, monkeypatch, tmp_path):
  prompts = []
  run = test_generate.open_run(trained)
  from ngrammer_jax import runs
  from ngrammer_jax.analysis import gates, report

  monkeypatch.setattr(runs, 'load_run', lambda *args: run)
  monkeypatch.setattr(
    runs.Run, 'completions', lambda self, texts, config, *rest: prompts.append((texts, rest[4]))
  )
  monkeypatch.setattr(generate, '_print_text', lambda complete, *rest: complete(on_text=None))
  generate.main([f'--workdir={trained}', r'--prompt=a\nb', r'--stop=\n'])
  assert prompts == [(['a\nb'], ['\n'])]

  def stop(*args):
    raise errors.BadInput(repr(args))

  monkeypatch.setattr(report, 'collect', stop)
  monkeypatch.setattr(gates, 'check_applicable', lambda run: None)
  monkeypatch.setattr(gates, 'analyze', stop)
  for arguments in ([r'--prompt=c\td', 'report'], ['gates', r'--text=c\td']):
    name = 'report' if 'report' in arguments else 'gates'
    more = [a for a in arguments if a != name]
    with pytest.raises(errors.BadInput, match=r'c\\td'):
      analyze.main([name, f'--workdir={trained}', *more])
