"""SmolLM2 on long documents: a segment memory beside windows that slide.

  python -m studies.long_documents --data=/path/to/corpora

scores tokens 2,048 to 8,191 of pages of enwik8 (test split, pages with at least 8,192 tokens, in
their order) and appends a line for each page and variant to long_documents.jsonl. Finished lines
are skipped, and all variants of a page come before the next page, so that differences are paired
by page at any time. SmolLM2 was trained with 2,048 tokens of context. Variants:

  window_2048  a window for every 512 tokens, whose last 512 targets are scored: they see 1,537 to
               2,048 tokens; the same model without a memory, at four times the FLOPs
  segments     segments of 512 tokens without a memory
  memory_N     segments of 512 tokens, a memory of N tokens, and the first 4 tokens as sinks
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import gzip
import itertools
import logging
import math
import os
import pathlib
import statistics
import time

import numpy as np

from ngrammer_jax import config as experiment
from ngrammer_jax import flags, runs
from ngrammer_jax.analysis import token_losses
from ngrammer_jax.config.evaluation import EvaluationMemory
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.data.tokens import token_split
from studies import intervals, longer, results
from studies import run as study_run

TEXT = 'enwik8'
COMMAND = 'python -m studies.long_documents --data=DIR'
DOCUMENTS = 20
WINDOW = 2048
FIRST, LENGTH = WINDOW, 8192  # first scored token, and length of a document
BASELINE = f'window_{WINDOW}'
MEMORIES = {'segments': 0, 'memory_1536': 1536, 'memory_2048': 2048, 'memory_4096': 4096}
VARIANTS = (BASELINE, *MEMORIES)


def long_documents(
  documents: Iterable[bytes], vocabulary: vocabularies.Vocabulary, length: int = LENGTH
) -> Iterator[token_split.TokenSplit]:
  """Yields the first tokens of each document that has enough of them."""
  for document in documents:
    if len(document) < length:  # a token has at least one byte
      continue
    tokens = np.array(vocabulary.encode(document), np.int32)
    if len(tokens) >= length:
      beginning = np.zeros(1, np.int64)
      yield token_split.TokenSplit(tokens[:length], beginning, None, vocabulary.document_start)


def with_memory(run: runs.Run, length: int) -> runs.Run:
  """Returns a run that is evaluated in segments, with a memory of some tokens."""
  memory = EvaluationMemory(length=length, sinks=longer.SINKS) if length else None
  evaluation = experiment.EvaluationConfig(streams=1, segment_length=longer.SEGMENT, memory=memory)
  config = dataclasses.replace(run.config, evaluation=evaluation)
  return dataclasses.replace(run, config=config)


def window_losses(run: runs.Run, document: token_split.TokenSplit, first: int) -> np.ndarray:
  """Returns the losses in nats of the tokens from `first` on, each read in a window of 2,048."""
  losses = []
  for begin in range(first, len(document.tokens), longer.SEGMENT):
    window = document.row(begin + longer.SEGMENT - WINDOW, WINDOW)

    def repeat(_: int, rows: slice, window: token_split.Row = window) -> token_batch.Batch:
      return token_batch.stack_rows([window] * (rows.stop - rows.start))  # one for each device

    (scores,) = run.engine.score_segments(run.variables, 1, 1, repeat)
    losses.append(scores.nll_BxT[0, -longer.SEGMENT :].astype(np.float64))
  return np.concatenate(losses)


def score(run: runs.Run, document: token_split.TokenSplit, variant: str, first: int) -> np.ndarray:
  """Returns the losses in nats of the tokens of a document from `first` on, by one variant."""
  if variant == BASELINE:
    return window_losses(with_memory(run, 0), document, first)
  own = with_memory(run, MEMORIES[variant])
  return token_losses.token_losses(own, document, len(document.tokens), name=variant)[first:]


def table(lines: Sequence[results.Result]) -> list[Sequence[str]]:
  """Returns the header and a row for each variant: means over documents with intervals of 95 %."""
  rows: list[Sequence[str]] = [
    ('variant', 'context, tokens', 'documents', 'bits per byte', f'minus `{BASELINE}`', 'seconds')
  ]
  of_baseline = [line for line in lines if line['model'] == BASELINE]
  for variant in VARIANTS:
    own = [line for line in lines if line['model'] == variant]
    if not own:
      continue
    difference = intervals.difference_of_runs(own, of_baseline)
    is_baseline = variant == BASELINE
    rows.append(
      (
        f'`{variant}`',
        _format_context(variant),
        str(len(own)),
        str(intervals.mean_interval([results.bits_per_byte(line) for line in own])),
        '' if is_baseline else str(difference),
        f'{statistics.fmean(line["seconds"] for line in own):.0f}',
      )
    )
  return rows


def _format_context(variant: str) -> str:
  """Formats the least and the greatest number of tokens before a target."""
  if variant == BASELINE:
    return f'{WINDOW - longer.SEGMENT + 1:,} to {WINDOW:,}'
  memory = MEMORIES[variant]
  return f'{memory + 1:,} to {memory + longer.SEGMENT:,}'


def main(argv: list[str]) -> int:
  """Scores what has no line yet."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--data', type=pathlib.Path, required=True, help='folder of the corpora')
  parser.add_argument('--documents', type=int, default=DOCUMENTS, help='number of documents')
  options = parser.parse_args(argv)
  finished = {line['cell'] for line in results.read(results.LONG_DOCUMENTS)}
  run = runs.load_pretrained(longer.MODEL)
  model = dataclasses.replace(run.config.model, dtype='float32')
  run = dataclasses.replace(run, config=dataclasses.replace(run.config, model=model))
  name, first_byte, begins = longer.TEXTS[TEXT]
  with gzip.open(options.data / name) as file:
    file.seek(first_byte)
    content = file.read()
  # The first page began before the split.
  pages = itertools.islice(longer.split_documents(content, begins), 1, None)
  documents = long_documents(pages, run.vocabulary)
  for number, document in enumerate(itertools.islice(documents, options.documents)):
    num_bytes = len(run.vocabulary.decode(document.tokens[FIRST:]))
    for variant in VARIANTS:
      cell = f'{variant}.{number}'
      if cell in finished:
        continue
      start = time.monotonic()
      nats = float(score(run, document, variant, FIRST).sum())
      line = {
        'cell': cell,
        'model': variant,
        'seed': number,  # differences are paired by document
        'tokens': LENGTH - FIRST,
        'bytes': num_bytes,
        'test': {'bits_per_byte': nats / math.log(2) / num_bytes},
        'seconds': round(time.monotonic() - start, 1),
        'hardware': study_run.hardware(len(os.sched_getaffinity(0))),
      }
      results.append(results.LONG_DOCUMENTS, line)
      logging.info('%s: %.4f bits per byte', cell, line['test']['bits_per_byte'])
  return 0


if __name__ == '__main__':
  flags.run(main)
