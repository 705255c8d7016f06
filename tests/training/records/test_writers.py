"""The record has every logged step once, also after a crash in the middle of a line."""

import errno
import json
import multiprocessing
import os

import pytest
import tensorboardX

from ngrammer_jax.training.records import writers
from tests.checks import bad_input


def steps(workdir):
  return [json.loads(line)['step'] for line in (workdir / 'metrics.jsonl').read_text().splitlines()]


def test_a_resumed_record_goes_on_from_the_restored_step(tmp_path):
  writer = writers.MetricsWriter(tmp_path, 0)
  for step in (2, 4, 6):
    writer.scalars(step, {'loss': 1.0})
  writer.close()
  with (tmp_path / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 8, "lo')
  writer = writers.MetricsWriter(tmp_path, 4)
  assert steps(tmp_path) == [2, 4]
  writer.scalars(6, {'loss': 2.0})
  writer.close()
  assert steps(tmp_path) == [2, 4, 6]


def test_a_record_without_its_end_of_line_is_dropped(tmp_path):
  """Else the next one would go on in the same line."""
  (tmp_path / 'metrics.jsonl').write_text('{"step": 2, "loss": 1}\n{"step": 2, "validation/a": 1}')
  assert [record for _, record in writers.read_lines(tmp_path)] == [{'step': 2, 'loss': 1}, {}]
  writer = writers.MetricsWriter(tmp_path, 2)
  writer.scalars(4, {'loss': 1.0})
  writer.close()
  assert steps(tmp_path) == [2, 4]


def test_a_line_that_is_no_object_or_has_no_step_is_dropped(tmp_path):
  others = '3', 'null', '["step"]', '{"loss": 2}', '{"step": 2.5}', '{"step": "2"}'
  (tmp_path / 'metrics.jsonl').write_text('\n'.join(('{"step": 2, "loss": 1}', *others, '')))
  records = [record for _, record in writers.read_lines(tmp_path)]
  assert records == [{'step': 2, 'loss': 1}, {}, {}, {}, {}, {}, {}]
  writers.MetricsWriter(tmp_path, 4).close()
  assert steps(tmp_path) == [2]


def test_a_record_that_cannot_be_written_is_named(tmp_path):
  writer = writers.MetricsWriter(tmp_path, 0)
  writer._file = open('/dev/full', 'w')  # says that the disk is full when it is flushed
  with bad_input(
    f'{tmp_path}/metrics.jsonl cannot be written: No space left on device. '
    'Free some space, then rerun the same command to resume from the last checkpoint'
  ):
    writer.scalars(2, {'loss': 1.0})
  writer.close()  # which flushes again: whoever waits for the sentence above gets no other


def test_a_line_for_the_console():
  values = {'loss': 1.23456, 'tokens_per_second': 12345.6, 'mfu': 0.123}
  line = writers.format_line(1000, 2000, values, 65)
  assert line == 'step 1,000/2,000  loss 1.2346  12,346 tokens/s  MFU 12.3%  1m05s left'
  line = writers.format_line(10, 2000, {'loss': 1.5, 'tokens_per_second': 10.0}, None)
  assert line == 'step 10/2,000  loss 1.5000  10 tokens/s'


def test_training_and_validation_share_a_chart_in_tensorboard(tmp_path, monkeypatch):
  tags, layouts = [], []
  summary = tensorboardX.SummaryWriter
  monkeypatch.setattr(summary, 'add_scalar', lambda self, tag, *values: tags.append((tag, *values)))
  monkeypatch.setattr(summary, 'add_custom_scalars', lambda self, layout: layouts.append(layout))
  writer = writers.MetricsWriter(tmp_path, 0)
  writer.scalars(2, {'loss': 1.0, 'gradient_norm/dense': 3.0})
  writer.scalars(2, {'validation/nll_nats_per_token': 2.0, 'validation/perplexity': 4.0})
  writer.close()
  scalars = {'train/loss': 1.0, 'gradient_norm/dense': 3.0}
  scalars |= {'validation/loss': 2.0, 'validation/perplexity': 4.0}
  assert tags == [(tag, value, 2) for tag, value in scalars.items()]
  assert layouts == [{'loss': {'loss': ['Multiline', ['train/loss', 'validation/loss']]}}]
  names = [set(json.loads(line)) for line in (tmp_path / 'metrics.jsonl').open()]
  assert names[0] == {'step', 'loss', 'gradient_norm/dense'}
  assert names[1] == {'step', 'validation/nll_nats_per_token', 'validation/perplexity'}


@pytest.mark.parametrize('number', [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.ENOSYS])
def test_the_record_does_without_shared_memory(tmp_path, monkeypatch, caplog, number):
  """A queue of TensorBoard needs /dev/shm, which containers may lack."""

  def queue(*args):
    raise OSError(number, os.strerror(number))

  monkeypatch.setattr(multiprocessing, 'Queue', queue)
  writer = writers.MetricsWriter(tmp_path, 0)
  writer.scalars(2, {'loss': 1.0})
  writer.close()
  assert steps(tmp_path) == [2]
  (message,) = caplog.messages
  assert message.startswith(f'TensorBoard files are left out: {os.strerror(number)}; ')
