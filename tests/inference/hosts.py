"""Evaluates a tiny model on several hosts: python -m tests.inference.hosts HOSTS HOST_ID PORT."""

import json
import os
import sys
import types
from typing import Any


def evaluate() -> dict[str, Any]:
  """Returns results that must not depend on the number of hosts."""
  from flax import linen as nn
  import jax
  import numpy as np

  from ngrammer_jax import config as experiment
  from ngrammer_jax import sharding
  from ngrammer_jax.config import model as model_config
  from ngrammer_jax.data import vocabularies
  from ngrammer_jax.inference import engine as inference
  from ngrammer_jax.models import language_model, transformer
  from ngrammer_jax.tasks.superglue import evaluation

  config = model_config.ModelConfig(layers=1, width=16, heads=2, feed_forward_width=32)
  model, mesh = transformer.TransformerLM(config, 257), sharding.make_mesh()
  tokens, empty = np.zeros((1, 4), np.int32), language_model.empty_memory(config, 1)
  shapes = jax.eval_shape(lambda: nn.unbox(model.init(jax.random.key(0), tokens, empty)))
  random = np.random.default_rng(0)

  def random_array(leaf):
    array = random.normal(0, 0.5, leaf.shape).astype(np.float32)
    replicated = sharding.replicated(mesh)
    return jax.make_array_from_callback(leaf.shape, replicated, lambda index: array[index])

  params = jax.tree.map(random_array, shapes['params'])
  examples = [
    types.SimpleNamespace(
      text='',
      inputs=random.integers(0, 256, random.integers(3, 20)),
      label=int(random.integers(2)),
      key=(number,),
      answers=('yes',),
      choices=tuple(f'{random.integers(1000):03}' for _ in range(4)),
    )
    for number in range(9)  # not a multiple of the rows
  ]
  engine = inference.Engine(model, mesh)
  answers = {}
  for choosing in ('rank', 'greedy'):
    finetune = {'targets_length': 12, 'choosing': choosing}
    training = {'batch_size': 4, 'segment_length': 64}
    options = experiment.resolve({'training': training, 'finetune': finetune})
    evaluator = evaluation.TaskEvaluator(engine, vocabularies.ByteVocabulary(), options)
    _, record_answers = evaluator(params, {}, 'record', examples)
    answers[choosing] = [answer.value for answer in record_answers]
  texts = [np.arange(10), np.arange(30)]
  variables = {'params': params, 'codebook': {}}
  nats = [text.sum() for text in engine.score_documents(variables, texts, 256, 8, max_rows=4)]
  return answers | {'nats': nats}


def main(num_hosts: int, host_id: int, port: int) -> None:
  """Prints the results of one host as JSON; all hosts together have four devices."""
  os.environ['JAX_NUM_CPU_DEVICES'] = str(4 // num_hosts)
  import jax

  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(f'localhost:{port}', num_hosts, host_id)
  print(json.dumps(evaluate()))


if __name__ == '__main__':
  main(*map(int, sys.argv[1:]))
