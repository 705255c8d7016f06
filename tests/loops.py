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
        given = dict(zip(keys, case if len(keys) > 1 else (case,), strict=True))
        try:
          function(**given, **fixtures)
        except BaseException as error:
          error.add_note(f'case: {given}')
          raise

    signature = inspect.signature(function)
    others = [one for name, one in signature.parameters.items() if name not in keys]
    test.__signature__ = signature.replace(parameters=others)
    test.__name__, test.__qualname__ = function.__name__, function.__qualname__
    test.__module__, test.__doc__ = function.__module__, function.__doc__
    return test

  return decorate
