"""SmolLM2 with attention sinks and a segment memory, both unknown from its training.

  python -m studies.longer --data=/path/to/corpora

scores the first 60,000 tokens of the test text of enwik8 and of WikiText-2, in one stream of
segments of 512 tokens, by the length of the memory in segments; each text as one document, and as
its pages or articles. Writes longer.jsonl, and skips cases with a line in it.
"""

import argparse
from collections.abc import Iterator
import dataclasses
import itertools
import logging
import os
import pathlib
import re
import time

from ngrammer_jax import config as experiment
from ngrammer_jax import flags, runs
from ngrammer_jax.config.evaluation import EvaluationMemory
from ngrammer_jax.data.tokens import token_split
from ngrammer_jax.inference import language_modeling
from studies import first_tokens, results
from studies import run as study_run

MODEL = 'smollm2_135m_instruct'
TOKENS, SEGMENT = 60_000, 512
SEGMENTS = (0, 1, 2, 4, 8)  # lengths of the memory
SINKS = 4
# File, first byte of the test split, and the beginning of a document.
TEXTS = {
  'enwik8': ('enwik8.gz', 95_000_000, rb'(?m)^  <page>$'),
  'wikitext2': ('wikitext2/test.txt.gz', 0, rb'(?m)^ = [^=].* = $'),
}


def cases() -> Iterator[dict[str, str | int | bool]]:
  """Yields what is measured, the most important first."""
  for name, sinks in itertools.product(TEXTS, (0, SINKS)):
    for segments in SEGMENTS[sinks > 0 :]:
      yield {'text': name, 'documents': False, 'segments': segments, 'sinks': sinks}
  for name, (segments, sinks) in itertools.product(TEXTS, ((0, 0), (2, 0), (2, SINKS))):
    yield {'text': name, 'documents': True, 'segments': segments, 'sinks': sinks}


def split_documents(content: bytes, begins: bytes | None) -> Iterator[bytes]:
  """Yields the documents of a text; `begins` matches the beginning of each; None: one document."""
  starts = {0}
  if begins is not None:
    starts |= {match.start() for match in re.finditer(begins, content)}
  for start, end in itertools.pairwise([*sorted(starts), len(content)]):
    yield content[start:end]


def measure(run: runs.Run, split: token_split.TokenSplit, segments: int, sinks: int) -> dict:
  """Returns the metrics of a text with a memory of some segments."""
  memory = EvaluationMemory(length=segments * SEGMENT, sinks=sinks) if segments else None
  options = experiment.EvaluationConfig(streams=1, segment_length=SEGMENT, memory=memory)
  run = dataclasses.replace(run, config=dataclasses.replace(run.config, evaluation=options))
  start = time.monotonic()
  result = language_modeling.evaluate(run.engine, run.variables, split, run.config)
  return {
    'nll_nats_per_token': result['nll_nats_per_token'],
    'bits_per_byte': result['bits_per_byte'],
    'tokens': result['tokens'],
    'seconds': round(time.monotonic() - start, 1),
  }


def main(argv: list[str]) -> int:
  """Measures what has no line yet."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--data', type=pathlib.Path, required=True, help='folder of the corpora')
  parser.add_argument('--texts', nargs='*', choices=TEXTS, default=TEXTS, help='these alone')
  parser.add_argument('--tokens', type=int, default=TOKENS, help='tokens of each text')
  options = parser.parse_args(argv)
  done = [{k: line[k] for k in ('text', 'documents', 'segments', 'sinks')} for line in read()]
  run = runs.load_pretrained(MODEL)
  model = dataclasses.replace(run.config.model, dtype='float32')
  run = dataclasses.replace(run, config=dataclasses.replace(run.config, model=model))
  for case in cases():
    if case in done or case['text'] not in options.texts:
      continue
    name, first, begins = TEXTS[case['text']]
    content = first_tokens.read(options.data / name, first, options.tokens)
    documents = split_documents(content, begins if case['documents'] else None)
    split = first_tokens.encode(documents, run.vocabulary, options.tokens)
    result = measure(run, split, case['segments'], case['sinks'])
    line = case | {'documents_read': len(split.starts)} | result
    results.append(results.LONGER, line | {'hardware': study_run.hardware(os.cpu_count())})
    logging.info('%s: %.4f bits per byte', case, result['bits_per_byte'])
  return 0


def read() -> list[results.Result]:
  """Returns the lines that there are."""
  return results.read(results.LONGER)


if __name__ == '__main__':
  flags.run(main)
