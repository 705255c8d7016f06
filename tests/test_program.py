"""The plan of studies/program.md: arms of equal size, and the order of its runs."""

import pathlib

from matplotlib import figure
import pytest

from ngrammer_jax import command_line, config, errors, sharding
from ngrammer_jax.models import model_variables
from ngrammer_jax.training import programs
from studies import arms, program, program_plots, program_tables, step_seconds
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


@each('size, arm', [('s', 'engram'), ('m', 'value_embeddings')])
def test_larger_arms_have_equal_parameters(size, arm):
  untied, _ = test_configs.counts(STUDIES / f'arms.py:{size}_untied')
  count, _ = test_configs.counts(STUDIES / f'arms.py:{size}_{arm}')
  assert untied == pytest.approx({'s': 13.15e6, 'm': 33.94e6}[size], rel=1e-3)
  assert count == pytest.approx(untied, rel=1e-3)


@pytest.mark.full
@each('variant', arms.LARGER)
def test_all_larger_arms_have_equal_parameters_and_flops(variant):
  size, _, arm = variant.partition('_')
  sizes = []
  for name in (variant, f'{size}_value_embeddings'):
    resolved = config.resolve(arms.get_config(name))
    model = programs.Programs(resolved, arms.TABLE_ROWS, sharding.make_mesh())
    count = model_variables.count_elements(model.abstract.params)
    sizes.append((count, model.flops.forward()))
  (count, flops), (expected_count, expected_flops) = sizes
  assert count == pytest.approx(expected_count, rel=1e-3)
  if arm == 'untied':
    assert 1.25 * expected_flops < flops < 1.65 * expected_flops
  else:
    assert flops == pytest.approx(expected_flops, rel=0.03)


def test_all_seeds_of_a_part_of_the_claim_come_before_the_next_part():
  lines = finish(program.missing_cells, 11 * len(program.CLAIM) + 9)
  runs = [(entry['model'], entry['seed']) for entry in lines if entry['table'] == 'runs']
  expected = []
  for group in (program.PART_A, program.PART_B, program.BESIDE):
    expected += [(arm, seed) for seed in (1, 2, 3) for arm in group]
  assert runs[:-1] == expected
  assert runs[-1] == (program.ARMS[len(program.CLAIM)], 1)


def test_longer_runs_come_last():
  planned = [cell.table for cell in program.planned_cells([])]
  assert planned.index('longer') == len(planned) - 12
  assert set(planned[-12:]) == {'longer'}


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


def test_a_try_that_diverged_selects_nothing():
  tries = list(program.tries('engram'))
  lines = [line(cell, 3.0) for cell in tries]
  lines[0] = program.describe_diverged(tries[0])
  assert program.best_rates(lines, 'engram') == tries[1].rates
  assert program_tables.format_progress(lines).startswith('Finished: 7 of 144 tries')
  assert program_tables.format_progress(lines).endswith(f' Not finite: `{tries[0].name}`.')
  missing = {cell.name: cell for cell in program.missing_cells(lines)}
  assert tries[0].name not in missing
  runs = [cell for cell in missing.values() if cell.table == 'runs']
  assert {(cell.arm, cell.rates) for cell in runs} == {('engram', tries[1].rates)}


@each('arm', (*program.ARMS, *arms.LARGER))
def test_every_cell_has_a_config(arm):
  *_, cell = program.tries(arm)
  (_, spec, *flags), *_ = cell.commands(STUDIES, STUDIES / 'workdir')
  overrides, _ = command_line.split(flags)
  config = command_line.resolve(spec.removeprefix('--config='), overrides)
  assert config.optimizer.muon.learning_rate == 0.02
  assert config.optimizer.decay_steps == config.training.steps // 5 == 50


def test_a_larger_stage_begins_with_one_seed_of_the_claim():
  stage = program.STAGES['S', program.C_SOURCE]
  planned = list(stage.planned_cells([]))
  assert len(planned) == 6 * 8 + 6 * 3
  assert [cell.table for cell in planned[:27]] == ['tries'] * 24 + ['runs'] * 3
  assert len({cell.name for cell in planned}) == len(planned)
  lines = finish(stage.missing_cells, 27)
  runs = [(entry['model'], entry['seed']) for entry in lines[24:]]
  assert runs == [('s_untied', 1), ('s_value_embeddings', 1), ('s_engram', 1)]
  assert {entry['seed'] for entry in lines[:24]} == {program.TRY_SEED}
  # Tries on another text, or of another length, select nothing here.
  others = finish(program.STAGES['S', program.ENWIK8].missing_cells, 24)
  others += finish(program.STAGES['short', program.C_SOURCE].missing_cells, 24)
  assert next(stage.missing_cells(others)).table == 'tries'


def test_tries_of_a_larger_stage_have_an_eighth_of_the_steps():
  stage = program.STAGES['S', program.ENWIK8]
  (first_try, *_), (*_, last) = stage.tries('untied'), stage.planned_cells([])
  assert (first_try.steps, last.steps) == (854, 6835)
  assert last.rates is None and last.cost == 6835 * 4096
  short = program.STAGES['short', program.C_SOURCE]
  assert [cell.steps for cell in short.planned_cells([])] == [244] * 24 + [1953] * 3


def test_the_largest_stage_has_the_rates_of_the_tries_on_its_text():
  tuned = finish(program.STAGES['S', program.C_SOURCE].missing_cells, 24)
  tuned[23] |= {'validation': {'nll_nats_per_token': 1.0}}  # the last one of Engram
  with pytest.raises(errors.BadInput, match='tries on c_source are missing for untied, engram: '):
    program.check_tuned(program.find_stage('M', None), tuned[8:16])
  stage = program.find_stage('M', None)
  program.check_tuned(stage, tuned)
  cells = list(stage.missing_cells(tuned))
  assert [(cell.arm, cell.seed) for cell in cells] == [
    (f'm_{arm}', seed) for seed in (1, 2) for arm in program.LARGER_CLAIM
  ]
  assert cells[2].rates == Tried(0.02, 1.0) and cells[2].steps == 14_648
  overrides, _ = command_line.split(cells[2].flags[1:])
  resolved = command_line.resolve(cells[2].flags[0].removeprefix('--config='), overrides)
  assert resolved.data.corpus == 'text' and resolved.model.layers == 8
  (_, *flags), *_ = cells[2].commands(STUDIES, STUDIES / 'workdir')
  assert f'--config.data.path={STUDIES / "c_source"}' in flags


@each('stage, text', [('0', 'c_source'), ('M', 'enwik8'), ('short', 'enwik8')])
def test_texts_without_runs_are_refused(stage, text):
  with pytest.raises(errors.BadInput, match=f'--stage={stage} has no runs on this text; use '):
    program.find_stage(stage, text)


def test_the_command_lists_the_runs_of_a_stage(capsys, monkeypatch, tmp_path):
  monkeypatch.setattr(program.results, 'PROGRAM', tmp_path / 'program.jsonl')
  program.main(['--data=texts', '--list', '--stage=S', '--text=c_source'])
  names = capsys.readouterr().out.splitlines()
  assert names[0] == 'tries.s_untied.c_source.muon0.01.own0.002.steps854.seed100'
  assert names[24] == 'runs.s_untied.c_source.rates_of_the_best_try.steps6835.seed1'
  assert len(names) == 66
  program.main(['--data=texts', '--list', '--stage=M'])
  assert len(capsys.readouterr().out.splitlines()) == 6
  with pytest.raises(errors.BadInput, match='--stage=M has the learning rates of stage S'):
    program.main(['--data=texts', '--stage=M'])


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
  assert baseline[6:] == ('2.1000 ± 0.2484', '', '1.00', '')
  # 4.303 * 0.1 / sqrt(3) = 0.2484; the baseline has 2.05 after twice the tokens.
  assert engram[6:] == ('2.0500 ± 0.2484', '-0.0500 ± 0.0000', '2.00', '')
  assert engram[4] == '0.02, 1*'


def test_two_runs_of_a_seed_are_refused():
  lines = [run('value_embeddings', 1, 1.9), run('engram', 1, 1.8), run('engram', 1, 1.7)]
  with pytest.raises(ValueError, match='engram has another run of seed 1'):
    program_tables.arm_table(lines, ('engram',), 'value_embeddings')
  with pytest.raises(ValueError, match='engram has another run of seed 1'):
    program_tables.arm_table(lines[1:], ('engram',), 'engram')


def test_runs_of_other_vocabularies_are_refused():
  lines = [run('value_embeddings', 1, 1.9), run('engram', 1, 1.8)]
  for entry, tokens in zip(lines, (1_609_276, 1_609_124), strict=True):
    entry['test']['tokens'] = tokens
  with pytest.raises(ValueError, match='1,609,124 in runs.engram.* 1,609,276 in runs.value_'):
    program_tables.arm_table(lines, ('engram',), 'value_embeddings')
  lines[1]['test']['tokens'] = 1_609_276
  assert len(program_tables.arm_table(lines, ('engram',), 'value_embeddings')) == 2


def test_times_of_a_step_are_paired_by_round():
  lines = [run('value_embeddings', 1, 1.9), run('engram', 1, 1.8)]
  for number, seconds in enumerate((1.0, 2.0)):  # the machine is slower in the second round
    for arm, factor in (('value_embeddings', 1.0), ('engram', 1.1)):
      names = {'table': step_seconds.TABLE, 'model': arm, 'seed': number}
      lines.append(names | {'step_seconds': factor * seconds, 'hardware': 'a core'})
  arms_of_table = 'value_embeddings', 'engram'
  header, baseline, engram = program_tables.arm_table(lines, arms_of_table, 'value_embeddings')
  assert header[-1] == 'time of a step'
  assert (baseline[-1], engram[-1]) == ('', '1.10 ± 0.00')
  assert program_tables.format_progress(lines).endswith('Hardware: a core (4 lines).')


def test_data_equivalents_of_more_tokens_are_paired_by_seed():
  lines = []
  for seed in (1, 2):
    # The baseline gains 0.1 with each doubling; the seeds differ by 0.05.
    base = 2.0 + 0.05 * seed
    for doublings in range(3):
      steps = program.STEPS * 2**doublings
      lines.append(run('value_embeddings', seed, base - 0.1 * doublings, steps))
    lines.append(run('engram', seed, base - 0.1))
    lines.append(run('engram', seed, base - 0.15, 2 * program.STEPS))
  header, once, twice = program_tables.tokens_table(lines)
  assert len(header) == len(once) == len(twice)
  assert once[:2] == ('8,192,000', '2') and twice[0] == '16,384,000'
  assert once[4:] == ('-0.1000 ± 0.0000', '2.0000 ± 0.0000', '')
  equivalent = 2**0.5
  assert twice[4:6] == ('-0.0500 ± 0.0000', f'{equivalent:.4f} ± 0.0000')
  assert twice[6] == f'{equivalent - 2:.4f} ± 0.0000'
  # A loss beyond the curve has no data equivalent, and no mean is shown without it.
  lines[3] = run('engram', 1, 1.0)
  _, once, twice = program_tables.tokens_table(lines)
  assert (once[5], twice[6]) == ('', '')


def test_tries_are_listed_by_arm_and_rates():
  tries = list(program.tries('engram'))
  lines = [line(cell, 3.0 + number) for number, cell in enumerate(tries[:6])]
  header, low, high = program_tables.tries_table(lines)
  assert len(header) == len(low) == len(high)
  assert low[:3] == ('`engram`', '0.03, 0.1, 0.3, 1', '0.01') and high[2] == '0.02'
  assert low[3:] == ('3.0000', '4.0000', '5.0000', '6.0000')
  assert high[3:] == ('7.0000', '8.0000', '', '')  # two have not finished


def larger_run(arm, seed, bits, text=program.C_SOURCE):
  """Returns the line of a run of stage S."""
  steps = program.STAGES['S', text].steps
  cell = program.Cell('runs', f's_{arm}', seed, Tried(0.02, 0.008), steps, text)
  return run('engram', seed, bits) | line(cell) | {'text': text, 'steps': steps}


def test_larger_models_are_compared_on_each_text():
  lines = [run('engram', 1, 1.5), larger_run('engram', 1, 1.7, program.ENWIK8)]
  for seed in (1, 2):
    lines += [larger_run('value_embeddings', seed, 1.0), larger_run('untied', seed, 1.25)]
  header, *rows = program_tables.larger_table(lines)
  assert [row[:3] for row in rows] == [
    ('enwik8', '27,996,160', '`s_engram`'),
    ('c_source', '27,996,160', '`s_untied`'),
    ('c_source', '27,996,160', '`s_value_embeddings`'),
  ]
  assert {len(row) for row in rows} == {len(header)}
  assert [row[header.index('minus baseline')] for row in rows] == ['', '0.2500 ± 0.0000', '']
  # Their runs are no runs of stage 0.
  text = program_tables.format_progress(lines)
  assert text.startswith('Finished: 0 of 144 tries, 1 of 54 runs, and 0 of 12 longer runs')


def test_the_figure_has_differences_by_tokens_and_by_size_and_losses_by_minutes():
  lines = []
  for seed in (1, 2):
    lines += [run('value_embeddings', seed, 2.0), run('engram', seed, 1.75)]
    lines += [run('value_embeddings', seed, 1.5, 4000), run('engram', seed, 1.375, 4000)]
  assert not program_plots.has_data(lines[:2])
  for arm, bits in (('value_embeddings', 1.0), ('engram', 1.125)):
    lines.append(larger_run(arm, 1, bits, program.ENWIK8) | {'parameters': 13_000_000})
    lines.append({'table': step_seconds.TABLE, 'model': arm, 'seed': 0, 'step_seconds': 0.75})
  assert program_plots.has_data(lines)
  panels = figure.Figure().subplots(1, 3)
  program_plots.draw(lines, panels)
  by_tokens, by_size, by_minutes = (panel.get_lines()[0].get_xydata() for panel in panels)
  assert by_tokens.tolist() == [[8.192, -0.25], [16.384, -0.125]]
  assert by_size.tolist() == [[run('engram', 1, 1.0)['parameters'] / 1e6, -0.25], [13.0, 0.125]]
  assert by_minutes.tolist() == [[25.0, 2.0], [50.0, 1.5]]  # 2,000 steps of 0.75 s


def test_every_arm_is_in_one_table():
  tables = program_tables.format_tables([run(arm, 1, 2.0) for arm in program.ARMS])
  of_tokens = tables.pop('program, more tokens')
  assert [row[0] for row in of_tokens[1:]] == ['8,192,000']
  named = [row[0].strip('`') for rows in tables.values() for row in rows[1:]]
  assert sorted(named) == sorted(program.ARMS)


def test_the_seconds_of_a_step_are_those_of_the_dry_run():
  printed = """compilation       7s
step              0.722 s, 5,673 tokens/s
steps             2,000 of 2,000 left, 4,096 tokens each
"""
  assert step_seconds.read_seconds(printed, 'engram') == 0.722
  with pytest.raises(errors.BadInput, match='dry run of engram printed no seconds'):
    step_seconds.read_seconds('error: no such arm', 'engram')
