"""Who makes no progress is shown with its stacks."""

import logging
import time

from ngrammer_jax.training.records import watchdog


def waits_for_something(log, until):
  while until not in log.read_text():
    time.sleep(0.02)


def test_the_stacks_of_a_process_that_hangs_are_in_its_log(tmp_path, caplog):
  caplog.set_level(logging.INFO)
  log = tmp_path / 'logs' / 'process_0.log'
  with watchdog.Watchdog(tmp_path, 0.3 / 60) as watch:
    logging.info('begun')
    waits_for_something(log, 'in test_the_stacks')
    watch.beat()
  output = log.read_text()
  assert ' INFO begun\n' in output and 'Timeout (0:00:00.3' in output
  assert 'in waits_for_something' in output
  logging.info('after')
  time.sleep(0.4)
  assert log.read_text() == output  # neither is there any more


def test_no_stacks_where_none_are_wanted_or_something_is_heard(tmp_path):
  log = tmp_path / 'logs' / 'process_0.log'
  with watchdog.Watchdog(tmp_path, 0):
    time.sleep(0.1)
  with watchdog.Watchdog(tmp_path, 0.5 / 60) as watch:
    for _ in range(30):
      time.sleep(0.03)
      watch.beat()
  assert log.read_text() == ''
