"""Figures of docs/results.md. Error bars are intervals of 95 % over seeds."""

from collections.abc import Sequence
import pathlib
from typing import Any

from ngrammer_jax.analysis import figures
from ngrammer_jax.system import result_files
from studies import cells, context, ngram_memories, program_plots
from studies.intervals import mean_interval
from studies.results import Result, bits_per_byte, validation_nats

NAMES = {
  'plain': 'Transformer',
  'wide': 'wider Transformer',
  'untied': 'untied Transformer',
  'ngrammer': 'N-Grammer',
  'over_encoding': 'Over-Encoding',
  'engram': 'Engram',
  'latent_engram': 'Engram over\nlatent n-grams',
}
SIZES_MB = (1, 4, 16)  # of the smallest, the normal and the largest tables


def save_all(
  results: Sequence[Result],
  longer: Sequence[Result],
  program: Sequence[Result],
  folder: pathlib.Path,
) -> None:
  """Draws the figures. A figure without results is left as it is.

  Args:
    results: lines of results.jsonl.
    longer: lines of longer.jsonl.
    program: lines of program.jsonl.
    folder: folder of the images.
  """
  by_table = {name: [r for r in results if r['table'] == name] for name in ('main', 'memory')}
  contents = {}
  if all(by_table.values()):
    with figures.drawn_figure(contents, folder / 'results_main.png', panels=2, width=9.6) as axes:
      draw_methods(by_table['main'], axes[0])
      draw_memories(by_table['memory'], axes[1])
  if any(r['table'] == 'sizes' for r in results):
    with figures.drawn_figure(contents, folder / 'results_sizes.png') as axis:
      draw_sizes(cells.baselines(results) + [r for r in results if r['table'] == 'sizes'], axis)

  if longer:
    with figures.drawn_figure(contents, folder / 'results_longer.png') as axis:
      draw_longer(longer, axis)
  if program_plots.has_data(program):
    path = folder / 'results_program.png'
    with figures.drawn_figure(contents, path, panels=3, width=12) as axes:
      program_plots.draw(program, axes)
  for path, image in contents.items():
    result_files.write_output(path, image)


def draw_longer(results: Sequence[Result], axis: Any) -> None:
  """Draws the loss of a pretrained model by the length of a memory that it never had."""
  for i, text in enumerate(dict.fromkeys(r['text'] for r in results)):
    for sinks in sorted({r['sinks'] for r in results}):
      points = [
        (r['segments'], r['bits_per_byte'])
        for r in results
        if (r['text'], r['documents']) == (text, False)
        and (r['sinks'] == sinks or r['segments'] == 0)  # no memory has no sinks either
      ]
      label = f'{text}, {sinks} sinks' if sinks else text
      style = {'linestyle': '--', 'marker': 's'} if sinks else {'marker': 'o'}
      axis.plot(*zip(*sorted(points), strict=True), color=f'C{i}', label=label, **style)
  axis.set_xlabel('memory, segments of 512 tokens')
  axis.set_ylabel('bits per byte (lower is better)')
  axis.grid(alpha=0.3)
  axis.legend(frameon=False)


def draw_methods(results: Sequence[Result], axis: Any) -> None:
  """Draws the test loss of each n-gram memory, and of the Transformers without one."""
  methods = [m for m in ngram_memories.METHODS if any(r['model'] == m for r in results)]
  for i, method in enumerate(methods):
    mean, error = mean_interval(_bits(results, method))
    color = 'black' if method in ngram_memories.TRANSFORMERS else 'C0'
    axis.errorbar(mean, i, xerr=error, fmt='o', color=color, capsize=3)
    axis.annotate(f'{mean:.3f}', (mean, i), (0, 6), textcoords='offset points', ha='center')
  parameters = {r['model']: r['parameters'] / 1e6 for r in results}
  axis.set_yticks(range(len(methods)), [f'{NAMES[m]}\n{parameters[m]:.2f}M' for m in methods])
  axis.invert_yaxis()
  axis.margins(0.12)
  axis.grid(axis='x', alpha=0.3)
  axis.set_xlabel('test, bits per byte (lower is better)')
  axis.set_title('n-gram memories on enwik8, and their parameters', fontsize=10)


def draw_memories(results: Sequence[Result], axis: Any) -> None:
  """Draws the test loss by the length of the segment memory in evaluation.

  Losses far above the others are cut off: those of rotary positions with a long memory.
  """
  lengths = [segments * context.SEGMENT for segments in cells.MEMORY_SEGMENTS]
  for model, label in {'memory': 'relative positions', 'memory_rope': 'rotary positions'}.items():
    own = [r for r in results if r['model'] == model]
    if own:
      names = (f'test, memory {segments}' for segments in cells.MEMORY_SEGMENTS)
      points = [mean_interval([r[n]['bits_per_character'] for r in own]) for n in names]
      means, errors = zip(*points, strict=True)
      axis.errorbar(
        lengths, means, yerr=[e or 0 for e in errors], marker='o', capsize=3, label=label
      )
  if without := [r['test']['bits_per_character'] for r in results if r['model'] == 'none']:
    mean, _ = mean_interval(without)
    axis.axhline(mean, color='black', linestyle='--', label='trained without a memory')
  lowest = min(min(line.get_ydata()) for line in axis.get_lines())
  axis.set_ylim(lowest - 0.02, lowest + 0.2)
  axis.set_xlabel('memory in evaluation, characters (128 in training)')
  axis.set_ylabel('test, bits per character (lower is better)')
  axis.grid(alpha=0.3)
  axis.legend(frameon=False, fontsize=8)
  axis.set_title('segment memory on text8', fontsize=10)


def draw_sizes(results: Sequence[Result], axis: Any) -> None:
  """Draws the loss of short runs of one seed by the bytes of their tables."""
  for method in cells.SCALED:
    models = (method, *(f'{method}_{scale}' for scale in ngram_memories.SCALES))
    points = [
      (r['table_bytes'] / 1e6, validation_nats(r))
      for r in results
      if r['model'] in models and r['seed'] == cells.SEEDS[0]
    ]
    if points:
      axis.plot(*zip(*sorted(points), strict=True), marker='o', label=NAMES[method])
  axis.set_xscale('log')
  axis.set_xticks(SIZES_MB, map(str, SIZES_MB))
  axis.minorticks_off()
  axis.set_xlabel('tables, MB')
  axis.set_ylabel('validation, nats per token (lower is better)')
  axis.grid(alpha=0.3)
  axis.legend(frameon=False)


def _bits(results, model):
  return [bits_per_byte(r) for r in results if r['model'] == model]
