"""What errors of loaders show."""

from unittest import mock

import pytest

from ngrammer_jax.interop import named_arrays


@pytest.fixture(scope='module')
def all_shown():
  """Errors show all of the arrays: tests read their names there."""
  with mock.patch.object(named_arrays, 'MAX_SHOWN', 10_000):
    yield
