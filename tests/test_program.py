"""The plan of studies/program.md: arms of equal size, and the order of its runs."""

import pathlib

import pytest

from ngrammer_jax import command_line
from studies import arms, program, program_tables
from studies.program import Tried
from tests import test_configs
from tests.loops import each

STUDIES = pathlib.Path(program.__file__).parent
SIZES = dict.fromkeys(arms.ONE_TABLE, 2_700_032) | dict.fromkeys(arms.TWO_TABLES, 3_748_608)


def line(cell, nats=2.0):
  """Returns a line of program.jsonl."""
  return {
    'cell': cell.name,
    'table': cell.table,
    'model': cell.arm,
    'seed': cell.seed,
    'matrix_learning_rate': cell.rates.matrices,
    'own_learning_rate': cell.rates.own,
    'validation': {'nll_nats_per_token': nats},
  }


def finish(cells, count):
  """Returns the lines of the first runs that are missing, one after the other."""
  lines = []
  for _ in range(count):
    lines.append(line(next(cells(lines))))
  return lines


@pytest.mark.full
@each('arm', arms.ONE_TABLE + arms.TWO_TABLES)
def test_arms_have_equal_parameters(arm):
  count, _ = test_configs.counts(STUDIES / f'arms.py:{arm}')
  assert count == pytest.approx(SIZES[arm], rel=5e-3)


def test_all_seeds_of_a_part_of_the_claim_come_before_the_next_part():
  lines = finish(program.missing_cells, 11 * len(program.CLAIM) + 9)
  runs = [(entry['model'], entry['seed']) for entry in lines if entry['table'] == 'runs']
  part_a = [(arm, seed) for seed in (1, 2, 3) for arm in program.PART_A]
  part_b = [(arm, seed) for seed in (1, 2, 3) for arm in program.PART_B]
  assert runs[:-1] == part_a + part_b
  assert runs[-1] == (program.ARMS[len(program.CLAIM)], 1)


def test_every_arm_has_eight_tries_with_a_seed_of_their_own():
  for arm in program.ARMS:
    tries = list(program.tries(arm))
    assert len({cell.rates for cell in tries}) == 8, arm
    assert not {cell.seed for cell in tries} & set(program.SEEDS)


def test_the_try_with_the_lowest_loss_selects_the_rates():
  tries = list(program.tries('engram'))
  losses = [line(cell, 3.0 - 0.1 * (cell.rates == (0.02, 0.3))) for cell in tries]
  assert program.best_rates(losses, 'engram') == Tried(0.02, 0.3)
  assert program.best_rates(losses[1:], 'engram') is None
  run = next(cell for cell in program.missing_cells(losses) if cell.table == 'runs')
  assert (run.arm, run.seed, run.rates, run.steps) == ('engram', 1, (0.02, 0.3), 2000)


@each('arm', program.ARMS)
def test_every_cell_has_a_config(arm):
  *_, cell = program.tries(arm)
  (_, spec, *flags), *_ = cell.commands(STUDIES, STUDIES / 'workdir')
  overrides, _ = command_line.split(flags)
  config = command_line.resolve(spec.removeprefix('--config='), overrides)
  assert config.optimizer.muon.learning_rate == 0.02
  assert config.optimizer.decay_steps == config.training.steps // 5 == 50


def run(arm, seed, bits, steps=program.STEPS):
  """Returns the line of a run of all steps."""
  table = 'runs' if steps == program.STEPS else 'longer'
  cell = program.Cell(table, arm, seed, Tried(0.02, 1.0), steps)
  sizes = {'parameters': 2_700_000, 'table_bytes': 4e6, 'flops_per_token': 3.5e6}
  scores = {'tokens': 4096 * steps, 'test': {'bits_per_byte': bits}}
  return line(cell) | sizes | scores


def test_a_table_has_intervals_of_paired_differences_and_data_equivalents():
  lines = [run('value_embeddings', seed, 1.9 + 0.1 * seed) for seed in (1, 2, 3)]
  lines += [run('engram', seed, 1.85 + 0.1 * seed) for seed in (1, 2, 3)]
  lines += [run('value_embeddings', 1, 2.05, 4000), run('value_embeddings', 1, 1.95, 8000)]
  (header, baseline, engram) = program_tables.arm_table(
    lines, ('value_embeddings', 'untied', 'engram'), 'value_embeddings'
  )
  assert len(header) == len(baseline) == len(engram)
  assert baseline[6:] == ('2.1000 ± 0.2484', '', '1.00')
  # 4.303 * 0.1 / sqrt(3) = 0.2484; the baseline has 2.05 after twice the tokens.
  assert engram[6:] == ('2.0500 ± 0.2484', '-0.0500 ± 0.0000', '2.00')
  assert engram[4] == '0.02, 1*'


def test_every_arm_is_in_one_table():
  tables = program_tables.format_tables([run(arm, 1, 2.0) for arm in program.ARMS])
  named = [row[0].strip('`') for rows in tables.values() for row in rows[1:]]
  assert sorted(named) == sorted(program.ARMS)
