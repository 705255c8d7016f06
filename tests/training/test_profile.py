"""Traces of the steps that are asked for."""

import argparse

import jax
import pytest

from ngrammer_jax import flags
from ngrammer_jax.training import loop, profile
from tests.checks import bad_input
from tests.training import toy


@pytest.mark.full
def test_a_run_leaves_a_trace_of_its_steps(tiny, tmp_path, monkeypatch):
  toy.install(monkeypatch.setattr)
  config = tiny(training={'steps': 12, 'evaluate_every': 0})
  loop.train(config, tmp_path / 'run', trace=range(4, 8))
  traces = list((tmp_path / 'run' / 'tensorboard' / 'plugins' / 'profile').rglob('*.xplane.pb'))
  assert len(traces) == 1 and traces[0].stat().st_size > 0


@pytest.mark.parametrize(
  'steps, traced',
  [
    (None, []),
    (range(4, 8), [4, 6]),
    (range(3, 5), [4]),
    (range(8, 99), [8, 10]),
    (range(20, 30), []),
  ],
)
def test_whole_calls_are_traced(steps, traced, monkeypatch, tmp_path, caplog):
  going = []
  monkeypatch.setattr(jax.profiler, 'start_trace', lambda folder: going.append(folder))
  monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: going.pop())
  settled, made = [], []
  with profile.Trace(steps, tmp_path, lambda: settled.append(len(made))) as trace:
    for start in range(0, 12, 2):
      trace.on_call(start)
      made += [start] if going else []
  assert made == traced and not going
  assert settled == ([0, len(traced)] if traced else [])  # before a trace begins and ends
  assert ('no trace, because' in caplog.text) == (steps is not None and not traced)


def test_steps_beyond_the_run_are_refused(tiny, tmp_path):
  message = '--trace=12:20 is beyond the run: its steps are 0 to 11 (training.steps=12)'
  with bad_input(message):
    loop.train(tiny(), tmp_path / 'run', trace=range(12, 20))
  assert not (tmp_path / 'run').exists()
  profile.check_steps(range(11, 20), 12)


@pytest.mark.parametrize('text', ['5', '5:5', '-1:3', 'a:b'])
def test_steps_that_are_none(text, capsys):
  parser = argparse.ArgumentParser()
  flags.add_training(parser)
  with pytest.raises(SystemExit):
    parser.parse_args(['--workdir=x', f'--trace={text}'])
  assert 'is not FIRST:LAST, such as 100:110' in capsys.readouterr().err
