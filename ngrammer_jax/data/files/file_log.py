"""One log line with the format and purpose of files."""

from collections.abc import Mapping, Sequence
import logging
import pathlib
import types

from ngrammer_jax.data.files import compression, file_formats
from ngrammer_jax.system import files

MAX_NAMES = 5  # of ignored files


def log_files(
  name: str,
  files_by_split: Mapping[str, Sequence[pathlib.Path]],
  left_out: Sequence[pathlib.Path] = (),
  counts: str = '',
  formats: Mapping[pathlib.Path, str] = types.MappingProxyType({}),
) -> None:
  """Logs the format and purpose of files in one line.

  Args:
    name: purpose of the files.
    files_by_split: the files of each split; a split without files is held out of train. The name ''
      is not printed.
    left_out: ignored files.
    counts: contents, such as a number of documents, if known.
    formats: formats of files; otherwise the format of the suffix is logged.
  """
  messages = []
  for split, paths in files_by_split.items():
    message = 'held out of train'
    if paths:
      message = _describe_files(paths, formats)
    if split:
      message = f'{split}: {message}'
    messages.append(message)
  if left_out:
    names = ', '.join(path.name for path in left_out[:MAX_NAMES])
    if len(left_out) > MAX_NAMES:
      names += f' and {len(left_out) - MAX_NAMES:,} more'
    messages.append(f'left out: {names}')
  line = f'{name}: {"; ".join(messages)}'
  if counts:
    line += f': {counts}'
  logging.info('%s', line)


def _describe_files(paths: Sequence[pathlib.Path], formats: Mapping[pathlib.Path, str]) -> str:
  """Returns number, formats and size of files, for the log."""
  names = {formats.get(path) or file_formats.format_of_suffix(path) for path in paths}
  suffixes = {path.suffix for path in paths if path.suffix in compression.SUFFIXES}
  methods = sorted(compression.SUFFIXES[end] for end in suffixes)
  unit = 'file' if len(paths) == 1 else 'files'
  size = sum(files.size(path) for path in paths)
  return f'{len(paths):,} {unit} ({", ".join([*sorted(names), *methods])}), {size:,} bytes'
