"""Differences between the configs of a run and of the resuming command."""

from collections.abc import Callable, Iterator
import dataclasses
from typing import Any

from ngrammer_jax.config import fields


def _is_free_on_resume(key: fields.Key) -> bool:
  return key.free_on_resume


def keeps_parameters(key: fields.Key) -> bool:
  """Whether a key does not change the meaning of the parameters."""
  return key.free_on_resume or key.free_on_init


def differences(
  before: Any,
  after: Any,
  path: str = '',
  may_differ: Callable[[fields.Key], bool] = _is_free_on_resume,
) -> Iterator[tuple[fields.Key, Any, Any]]:
  """Yields key, old and new value for each disallowed difference, by default on resume.

  An added or removed block is one difference.

  Args:
    before, after: two configs, or two blocks of the same kind.
    path: dotted path of the block, with a dot at the end.
    may_differ: whether any difference of a key is allowed.
  """
  for name, key in fields.keys(type(before), path).items():
    if may_differ(key):
      continue
    olds = dict(key.entries(getattr(before, name)))
    news = dict(key.entries(getattr(after, name)))
    for entry in olds | news:
      old, new = olds.get(entry), news.get(entry)
      if dataclasses.is_dataclass(old) and dataclasses.is_dataclass(new):
        yield from differences(old, new, f'{entry.path}.', may_differ)
      elif _meaning(key, old) != _meaning(key, new):
        yield entry, old, new


def _meaning(key: fields.Key, value: Any) -> Any:
  """Returns a value, or the value meant by None."""
  if value is None:
    return key.none_means
  return value


def with_kept_values(stored: Any, config: Any, path: str = '') -> Any:
  """Returns a config with the stored values of `kept_on_resume` keys.

  A key with a value other than its default is unchanged.

  Args:
    stored, config: two configs, or two blocks of the same kind.
    path: dotted path of the block, with a dot at the end.
  """
  changes = {}
  for name, key in fields.keys(type(config), path).items():
    old, new = getattr(stored, name), getattr(config, name)
    if key.kept_on_resume and new == key.default:
      changes[name] = old
    elif dataclasses.is_dataclass(new) and type(old) is type(new):
      changes[name] = with_kept_values(old, new, f'{key.path}.')
  return dataclasses.replace(config, **changes)
