"""Many cases of one test, where each takes less time than pytest takes for a test."""

from collections.abc import Callable, Iterable
import inspect
from typing import Any


def each(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
  """Like pytest.mark.parametrize, but one test, with the same fixtures for all of its cases.

  A failure says which case it was. Fixtures are made once: `tmp_path` is one folder for all.
  """
  keys, cases = [name.strip() for name in names.split(',')], list(cases)
  assert cases, f'no case of {names}'

  def decorate(function):
    def test(**fixtures):
      for case in cases:
        arguments = dict(zip(keys, case if len(keys) > 1 else (case,), strict=True))
        try:
          function(**arguments, **fixtures)
        except BaseException as error:
          error.add_note(f'case: {arguments}')
          raise

    signature = inspect.signature(function)
    parameters = [p for name, p in signature.parameters.items() if name not in keys]
    test.__signature__ = signature.replace(parameters=parameters)
    test.__name__, test.__qualname__ = function.__name__, function.__qualname__
    test.__module__, test.__doc__ = function.__module__, function.__doc__
    return test

  return decorate
