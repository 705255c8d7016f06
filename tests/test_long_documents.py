"""The study of long documents: its windows, its documents, and its table."""

import dataclasses

import numpy as np
import pytest

from ngrammer_jax import runs
from ngrammer_jax.analysis import token_losses
from ngrammer_jax.data.tokens import token_split
from studies import long_documents, longer


def test_documents_that_are_too_short_are_skipped(trained):
  vocabulary = runs.load_run(trained).vocabulary
  long = b'<page> ' + b'a b c ' * 40
  (document,) = long_documents.long_documents([b'<page> a b', long, b'c'], vocabulary, length=20)
  expected = vocabulary.encode(long)[:20]
  np.testing.assert_array_equal(document.tokens, expected)


def test_a_window_scores_its_last_targets_alone(trained, monkeypatch):
  monkeypatch.setattr(long_documents, 'WINDOW', 8)
  monkeypatch.setattr(longer, 'SEGMENT', 4)
  run = long_documents.with_memory(runs.load_run(trained), 0)
  start = run.vocabulary.document_start

  def losses(tokens, first):
    document = token_split.TokenSplit(tokens, np.zeros(1, np.int64), None, start)
    return long_documents.window_losses(run, document, first)

  tokens = np.arange(20, dtype=np.int32) % run.vocabulary.size
  # The first window is the beginning of the document.
  evaluation = dataclasses.replace(run.config.evaluation, segment_length=8)
  config = dataclasses.replace(run.config, evaluation=evaluation)
  in_one_segment = dataclasses.replace(run, config=config)
  beginning = token_split.TokenSplit(tokens[:8], np.zeros(1, np.int64), None, start)
  expected = token_losses.token_losses(in_one_segment, beginning, 8)
  np.testing.assert_allclose(losses(tokens, 4)[:4], expected[4:], rtol=1e-5)
  # The last window has the inputs 11 to 18.
  others = tokens.copy()
  others[:11] = tokens[:11][::-1]
  last = losses(tokens, 16)
  assert last.shape == (4,)
  np.testing.assert_array_equal(losses(others, 16), last)
  others[11] += 1
  assert not np.allclose(losses(others, 16), last)


def test_the_table_is_paired_by_document():
  def line(variant, document, bits):
    cell = f'{variant}.{document}'
    scores = {'test': {'bits_per_byte': bits}, 'seconds': 10.0}
    return {'cell': cell, 'model': variant, 'seed': document, **scores}

  lines = [line('window_2048', document, 1.0 + document) for document in range(2)]
  lines += [line('memory_4096', document, 0.9 + document) for document in range(2)]
  header, baseline, memory = long_documents.table(lines)
  assert len(header) == len(baseline) == len(memory)
  assert baseline[1:3] == ('1,537 to 2,048', '2') and baseline[4] == ''
  assert memory[1] == '4,097 to 4,608'
  assert memory[4] == '-0.1000 ± 0.0000'
  assert pytest.approx(10.0) == float(memory[5])
