"""Which of several interrupts ends a command."""

import signal

import pytest

from ngrammer_jax.system import signals


def test_the_third_interrupt_ends_without_a_checkpoint(capfd):
  """Terminals and launchers send two."""
  handler = signals.SignalHandler()
  interrupt = lambda: handler._on_signal(signal.SIGINT, None)
  try:
    interrupt()
    interrupt()
  except KeyboardInterrupt:
    pytest.fail('the second interrupt ended it')  # pytest itself would stop
  with pytest.raises(KeyboardInterrupt):
    interrupt()
  assert capfd.readouterr().err == 'SIGINT: saving a checkpoint, then stopping\n'
