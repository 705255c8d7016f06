"""Measures programs of several libraries in turn, each library in a process of its own.

One process runs at a time, so threads do not compete, and the sides change their order from round
to round. A ratio is the time of another library over the time of ngrammer_jax. Three ratios are
reported: the ratio of the best measurements, the median of the ratios of consecutive measurements,
and the ratio of the median CPU seconds. Other programs on the machine change the last one least.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import multiprocessing
import pathlib
import resource
import statistics
import sys
import time
from typing import Any

OURS = 'ngrammer_jax'
# Returns functions by the name of the pass; each returns how often it repeats it, or None for once.
Make = Callable[[], Mapping[str, Callable[[], int | None]]]


def import_from(name: str, folder: pathlib.Path | None, *subfolders: str) -> None:
  """Makes the modules of a repository importable, in the process of its side.

  Raises:
    ImportError: no folder of the repository is given.
  """
  if folder is None:
    raise ImportError(f'--peer {name}=FOLDER is missing')
  sys.path[:0] = [str(folder / subfolder) for subfolder in subfolders or ('',)]


def serve(connection, make: Make) -> None:
  """Runs a pass for each name that arrives, and answers with its measurement; None ends it."""
  try:
    passes = make()
    for run in passes.values():
      run()
  except Exception as error:  # the other process reports it
    connection.send(f'{type(error).__name__}: {error}')
    return
  connection.send(list(passes))
  while (name := connection.recv()) is not None:
    start = time.perf_counter()
    cpu_start = time.process_time()
    count = passes[name]() or 1
    connection.send(
      {
        'seconds': (time.perf_counter() - start) / count,
        'cpu_seconds': (time.process_time() - cpu_start) / count,
        'peak_mib': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
      }
    )


@contextlib.contextmanager
def worker(make: Make) -> Iterator[tuple[list[str], Callable[[str], dict[str, float]]]]:
  """Starts a side in a process; yields the names of its passes, and a function that measures one.

  Raises:
    RuntimeError: the side did not start.
  """
  context = multiprocessing.get_context('spawn')
  connection, other = context.Pipe()
  process = context.Process(target=serve, args=(other, make), daemon=True)
  process.start()
  other.close()

  def measure_pass(name: str) -> dict[str, float]:
    connection.send(name)
    return connection.recv()

  try:
    answer = connection.recv()
    if isinstance(answer, str):
      raise RuntimeError(answer)
    yield answer, measure_pass
    connection.send(None)
  finally:
    process.join(10)
    process.terminate()


def measure(sides: Mapping[str, Make], rounds: int) -> dict[str, Any]:
  """Returns times, peak memory and ratios by side and pass.

  Sides that do not start are named under `skipped`, with the reason. Without another one, ours is
  not measured.
  """
  skipped = {}
  rows = {}
  with contextlib.ExitStack() as stack:
    workers = {}
    for side in sorted(sides, key=OURS.__eq__):  # ours last
      if side == OURS and not workers:
        continue
      try:
        workers[side] = stack.enter_context(worker(sides[side]))
      except (RuntimeError, EOFError) as error:
        skipped[side] = str(error) or 'its process ended'
    for number in range(rounds):
      for name in next(iter(workers.values()))[0] if workers else ():
        for side in list(workers) if number % 2 else list(workers)[::-1]:
          rows.setdefault((side, name), []).append(workers[side][1](name))
  return {'skipped': skipped} | _summarize(rows)


def _summarize(rows):
  """Returns times, peak memory and ratios by side and pass, from measurements of both."""
  result = {}
  for (side, name), measured in rows.items():
    columns = {key: [row[key] for row in measured] for key in measured[0]}
    seconds = columns['seconds']
    cpu = statistics.median(columns['cpu_seconds'])
    entry = result.setdefault(side, {'peak_mib': 0.0})
    entry['peak_mib'] = max(entry['peak_mib'], *columns['peak_mib'])
    entry[name] = {'best': min(seconds), 'median': statistics.median(seconds), 'cpu_median': cpu}
    own = rows.get((OURS, name), ())
    if own and side != OURS:
      own_seconds, own_cpu = ([row[key] for row in own] for key in ('seconds', 'cpu_seconds'))
      ratios = [other / ours for other, ours in zip(seconds, own_seconds, strict=True)]
      entry[name]['ratio_best'] = min(seconds) / min(own_seconds)
      entry[name]['ratio_median'] = statistics.median(ratios)
      entry[name]['ratio_cpu'] = cpu / statistics.median(own_cpu)
  return result


def format_table(result: Mapping[str, Any]) -> str:
  """Formats one row for each side and pass, then what was skipped."""
  columns = ('best', 'median', 'cpu_median', 'ratio_best', 'ratio_median', 'ratio_cpu')
  lines = [f'{"side":<24}{"pass":<22}' + ''.join(f'{c:>13}' for c in columns) + ' peak MiB']
  for side, entry in result.items():
    passes = {k: v for k, v in entry.items() if isinstance(v, dict)} if side != 'skipped' else {}
    for name, times in passes.items():
      cells = (f'{times[c]:>13.4f}' if c in times else f'{"":>13}' for c in columns)
      lines.append(f'{side:<24}{name:<22}' + ''.join(cells) + f'{entry["peak_mib"]:>9.0f}')
  lines += [f'skipped {side}: {reason}' for side, reason in result['skipped'].items()]
  return '\n'.join(lines)
