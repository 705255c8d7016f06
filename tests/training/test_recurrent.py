"""Recurrent models through the whole program: the loop, resumes, meshes, evaluation, generation."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch import hlo
from ngrammer_jax import config as experiment
from ngrammer_jax import errors, runs, sharding
from ngrammer_jax.checkpoints import reader, writer
from ngrammer_jax.config import evaluation as evaluation_config
from ngrammer_jax.config import model as model_config
from ngrammer_jax.config import recurrent as recurrent_config
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.inference import sampling
from ngrammer_jax.models import language_model, model_variables, precision
from ngrammer_jax.optimizers import partition
from ngrammer_jax.training import loop
from ngrammer_jax.training import state as train_state
from tests.checks import bad_input
from tests.models import test_recurrent as models
from tests.training import helpers, test_devices

NGRAM = model_config.NGramConfig(clusters=4, vocabulary_size=32, dim=4, heads=2)
READ = recurrent_config.RecurrentConfig(
  hidden=24, readout='key_value_predict', window=5, carry_memory=True
)


def config_of(tiny, read=READ, ngram=NGRAM, **sections):
  c = tiny(**sections)
  model = model_config.ModelConfig(width=16, tie_embeddings=False, recurrent=read, ngram=ngram)
  c = dataclasses.replace(c, model=model)
  c.check()
  return c


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_nothing_had_been(tiny, tmp_path):
  whole, stopped = tmp_path / 'reference', tmp_path / 'stopped'
  c = config_of(tiny, optimizer={'schedule': 'constant'})
  half = dataclasses.replace(c.training, steps=4)
  loop.train(c, whole)
  loop.train(dataclasses.replace(c, training=half), stopped)
  loop.train(c, stopped)
  assert helpers.arrays(stopped) == helpers.arrays(whole)
  assert reader.steps(stopped)[-1] == 12
  run = runs.load_run(stopped)
  losses = [line['loss'] for line in helpers.records(stopped) if 'loss' in line]
  assert losses[-1] < losses[0]
  result = run.evaluate('validation')
  assert result['protocol']['carry_memory'] is True
  (made,) = run.generate('the union of states ' * 20, tokens=5, temperature=0)
  assert len(made.tokens) <= 5
  with bad_input(
    'context=9 has no meaning for model.recurrent, whose state holds all it has read: leave it out'
  ):
    run.generate('a', context=9)


QUICK = ('memory',)
SOME = [
  pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in models.NAMES
]


@pytest.mark.slow
@pytest.mark.parametrize('name', models.NAMES)
def test_any_mesh_trains_alike(name):
  config = models.config_of(name, dtype='float32', vocabulary_chunk=16)
  _, *one = test_devices.run((1, 1, 1), config)
  _, *eight = test_devices.run((2, 2, 2), config, parts=2)
  test_devices.assert_alike(eight, one)


@pytest.mark.slow
def test_a_step_sends_nothing_token_by_token():
  """The gradient of the recurrent kernel is made, and exchanged, once."""
  program, _, _ = test_devices.run((8, 1, 1), models.config_of('lstm', dtype='float32'))
  sent = hlo.Program(program, {'data': 8, 'fsdp': 1, 'model': 1}).collectives()
  assert sent and max(each.times for each in sent) == test_devices.STEPS


def test_a_memory_of_another_precision_is_read_too(tmp_path):
  """As an accelerator leaves it: activations are of another dtype there."""
  make = lambda dtype: train_state.TrainState(
    step=jnp.int32(4),
    params={'embedding': jnp.ones(3)},
    codebook={},
    opt_state={},
    memory={'h': jnp.asarray([0.5, -1.25], dtype), 'filled': jnp.int32(2)},
  )
  with writer.CheckpointWriter(tmp_path) as saved:
    saved.save(4, make('bfloat16'))
  found = reader.restore(tmp_path, 4, make('float32'))
  jax.tree.map(np.testing.assert_array_equal, found, make('float32'))
  assert found.memory['h'].dtype == 'float32' and found.memory['filled'].dtype == 'int32'
  with pytest.raises(errors.BadInput, match='not match the model: params/embedding is float32'):
    doubled = make('float32').replace(params={'embedding': jnp.ones(3, 'bfloat16')})
    reader.restore(tmp_path, 4, doubled)


@pytest.mark.slow
def test_an_accelerator_trains_and_a_cpu_evaluates(tiny, tmp_path, monkeypatch):
  """Activations in the memory are of another dtype there; a run goes on here too."""
  c = config_of(tiny, ngram=None, optimizer={'schedule': 'constant'})
  short = dataclasses.replace(c, training=dataclasses.replace(c.training, steps=4))
  with monkeypatch.context() as patched:
    patched.setattr(precision, 'compute_dtype', lambda config: jnp.dtype('bfloat16'))
    loop.train(short, tmp_path / 'run')
  run = runs.load_run(tmp_path / 'run')
  assert run.state.memory['state']['h'].dtype == 'float32'
  assert run.evaluate('validation')['tokens'] > 0
  loop.train(c, tmp_path / 'run')
  assert reader.steps(tmp_path / 'run')[-1] == 12


def log_probs_of(config, model, variables, length=16):
  """A function of the tokens of a document: what one pass predicts after each of them."""

  @jax.jit
  def of(text):
    memory = language_model.empty_memory(config, 1, 1)
    starts = np.arange(length)[None] == 0
    hidden, _, _ = model.apply(variables, text[None], memory, starts_BxT=starts)
    return model.apply(variables, hidden, method='log_probs')[0]

  pad = lambda text: np.pad(text, (0, length - len(text))).astype(np.int32)
  return lambda text: np.asarray(of(pad(text)))[: len(text)]


@pytest.mark.slow
@pytest.mark.parametrize('name', SOME)
def test_greedy_takes_what_one_pass_finds_most_likely(x64, name):
  """Token by token, with prompts that are padded, whether segments hand on what is read or not."""
  config = models.config_of(name, carry=False)
  model, variables, _ = models.model_of(config)
  mesh = sharding.make_mesh(-1)
  prompts = [np.array([0, 3, 5]), np.array([0]), np.arange(9) % models.V]
  engine, variables = inference.Engine(model, mesh), {'codebook': {}} | variables
  greedy, context = sampling.SamplingConfig(0), recurrent_config.UNBOUNDED
  stream = engine.generate(variables, prompts, [0, 1, 2], greedy, context)
  made = np.stack(list(itertools.islice(stream, 5)), axis=1)
  log_probs = log_probs_of(config, model, variables)
  for prompt, tokens in zip(prompts, made, strict=True):
    best = log_probs(np.concatenate([prompt, tokens])).argmax(axis=-1)
    np.testing.assert_array_equal(best[len(prompt) - 1 : -1], tokens)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['key_value', 'memory', '4-gram'])
def test_choices_forked_from_one_state_score_as_alone(x64, name):
  config = models.config_of(name, carry=False)
  model, variables, _ = models.model_of(config)
  prefixes = [np.array([0, 3, 5, 7, 1]), np.array([2, 4])]
  choices = [[np.array([1, 2, 3]), np.array([4]), np.array([4])], [np.array([5]), np.array([9, 9])]]
  log_probs = log_probs_of(config, model, variables)
  engine = inference.Engine(model, sharding.make_mesh(-1))
  for i, scores, _ in engine.rank({'codebook': {}} | variables, prefixes, choices, 2):
    for choice, score in zip(choices[i], scores, strict=True):
      text = np.concatenate([prefixes[i], choice])
      logs = log_probs(text)
      places = range(len(prefixes[i]) - 1, len(text) - 1)
      alone = sum(logs[place, text[place + 1]] for place in places)
      np.testing.assert_allclose(score, alone, rtol=1e-10)
    if i == 0:
      assert scores[1] == scores[2]


def test_evaluation_may_hand_on_what_training_does_not(tiny):
  read = dataclasses.replace(READ, carry_memory=False)
  more = evaluation_config.EvaluationMemory(carry_memory=True)
  c = config_of(tiny, read, evaluation=evaluation_config.EvaluationConfig(streams=4, memory=more))
  assert not c.model.recurrent.carry_memory and c.evaluation_model().recurrent.carry_memory


@pytest.mark.full
def test_every_parameter_has_an_optimizer():
  for name in models.NAMES:
    config = models.config_of(name, dtype='float32')
    variables = model_variables.abstract(language_model.build(config, 11))
    assert set(jax.tree.leaves(partition.labels(variables['params']))) == {'dense'}


@pytest.mark.full
def test_dropout_is_drawn_in_training_alone():
  config = models.config_of('attention', dtype='float32', dropout=0.5)
  model, variables, memory = models.model_of(config)
  tokens, _ = models.text()
  run = jax.jit(model.apply, static_argnames='train')
  apply = lambda **how: run(variables, tokens, memory, **how)[0]
  draw = lambda seed: apply(train=True, rngs={'dropout': jax.random.key(seed)})
  assert (draw(0) == draw(0)).all() and not (draw(0) == draw(1)).all()
  assert (apply() == apply()).all() and (np.asarray(draw(0)) == 0).any()


def test_default_switches_are_those_of_the_paper():
  assert not experiment.Config().model.recurrent
  r = recurrent_config.RecurrentConfig()
  assert (r.carry_memory, r.empty_slots, r.forget_bias, r.initial) == (False, 'mask', 1.0, 0.1)
