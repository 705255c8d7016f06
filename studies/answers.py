"""The first table of docs/results.md: questions, and the differences of losses that answer them.

A question asks whether a change lowers a loss. Its answer follows from the interval of the
difference: yes if all of it is below 0, no if all of it is above 0, and not decided otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from studies import cells, intervals, pretrained
from studies.results import Loss, Result, bits_per_byte, validation_nats

BITS_PER_BYTE = 'bits per byte'
NATS = 'nats per token'
BITS_PER_CHARACTER = 'bits per character'
LOSSES: Mapping[str, Loss] = {
  BITS_PER_BYTE: bits_per_byte,
  NATS: validation_nats,
  BITS_PER_CHARACTER: lambda run: run['test']['bits_per_character'],
}
HEADER = ('does the loss fall', 'compared', 'difference', 'unit', 'seeds', 'answer')


class Question(NamedTuple):
  """Whether a model has a lower loss than a baseline.

  Attributes:
    text: the question, after "does the loss fall".
    runs: name of the runs that are compared, see `runs_by_name`.
    model: the model.
    baseline: the model whose loss is subtracted.
    unit: unit of the losses.
    section: anchor of the section with the table.
  """

  text: str
  runs: str
  model: str
  baseline: str
  unit: str
  section: str


QUESTIONS = (
  Question(
    'with Engram in place of value embeddings?',
    'program',
    'engram',
    'value_embeddings',
    BITS_PER_BYTE,
    'value-embeddings-as-the-baseline',
  ),
  Question(
    'with Engram in place of a second table of value embeddings?',
    'program',
    'value_embeddings_engram',
    'two_value_embeddings',
    BITS_PER_BYTE,
    'value-embeddings-as-the-baseline',
  ),
  Question(
    'with Engram in place of an untied output layer?',
    'main',
    'engram',
    'untied',
    BITS_PER_BYTE,
    'main-table',
  ),
  Question(
    'with Over-Encoding in place of an untied output layer?',
    'main',
    'over_encoding',
    'untied',
    BITS_PER_BYTE,
    'main-table',
  ),
  Question(
    'with an N-Grammer in place of an untied output layer?',
    'main',
    'ngrammer',
    'untied',
    BITS_PER_BYTE,
    'main-table',
  ),
  Question(
    'with an N-Grammer in place of no memory?',
    'main',
    'ngrammer',
    'plain',
    BITS_PER_BYTE,
    'main-table',
  ),
  Question(
    'with Engram in a Llama of equal size?',
    'present_day',
    'engram_llama',
    'llama',
    BITS_PER_BYTE,
    'a-llama-style-baseline',
  ),
  Question(
    "with trained tables in place of Engram's random ones?",
    'short',
    'engram',
    'engram_frozen',
    NATS,
    'controls',
  ),
  Question(
    'with bigrams and trigrams in place of unigrams in Engram?',
    'short',
    'engram',
    'engram_unigrams',
    NATS,
    'controls',
  ),
  Question(
    'with unigrams beside the bigrams and trigrams of Engram?',
    'short',
    'engram_with_unigrams',
    'engram',
    NATS,
    'controls',
  ),
  Question(
    'with four times the rows of Engram?',
    'short',
    'engram_four_times',
    'engram',
    NATS,
    'sizes',
  ),
  Question(
    'with a segment memory?',
    'memory',
    'memory',
    'none',
    BITS_PER_CHARACTER,
    'segment-memory',
  ),
  Question(
    'with Engram in a model with a segment memory?',
    'short',
    'engram_segment_memory',
    'wide_segment_memory',
    NATS,
    'n-gram-memory-and-segment-memory-together',
  ),
  Question(
    'with learned spans in place of a fixed span of 64, in Engram?',
    'short',
    'engram_learned_spans',
    'engram_span_64',
    NATS,
    'n-gram-memory-and-segment-memory-together',
  ),
  Question(
    'of SmolLM2, trained on WikiText-2, with Engram?',
    'continued',
    'engram',
    'bare',
    NATS,
    'continued-training-of-a-pretrained-model',
  ),
  Question(
    '... with trained rows in place of random ones?',
    'continued',
    'engram',
    'frozen_table',
    NATS,
    'continued-training-of-a-pretrained-model',
  ),
)


def runs_by_name(
  results: Sequence[Result], of_program: Sequence[Result], of_pretrained: Sequence[Result]
) -> dict[str, list[Result]]:
  """Returns the runs that questions compare.

  Args:
    results: lines of results.jsonl.
    of_program: lines of program.jsonl.
    of_pretrained: lines of pretrained.jsonl.
  """

  def select(*tables: str) -> list[Result]:
    return [line for line in results if line['table'] in tables]

  continued = []
  for line in of_pretrained:
    if line['table'] == pretrained.CONTINUED:
      continued.append({**line, 'validation': line})
  return {
    'program': [line for line in of_program if line['table'] == 'runs'],
    'main': select('main'),
    'present_day': select('present_day'),
    'short': cells.baselines(results) + select('controls', 'sizes', 'combined'),
    'memory': select('memory'),
    'continued': continued,
  }


def answer(difference: intervals.Interval) -> str:
  """Returns whether a difference says that the loss falls."""
  if difference.half_width is None:
    return 'one seed'
  if difference.mean + difference.half_width < 0:
    return '**yes**'
  if difference.mean - difference.half_width > 0:
    return '**no**, it rises'
  return 'not decided'


def table(runs: Mapping[str, Sequence[Result]]) -> list[Sequence[str]]:
  """Returns the header and a row for each question.

  Args:
    runs: see `runs_by_name`.
  """
  rows: list[Sequence[str]] = [HEADER]
  for question in QUESTIONS:
    loss = LOSSES[question.unit]
    own = _losses(runs[question.runs], question.model, loss)
    baseline = _losses(runs[question.runs], question.baseline, loss)
    rows.append(_row(question, own, baseline))
  return rows


def _losses(
  runs: Sequence[Result], model: str, loss: Callable[[Result], float]
) -> dict[int, float]:
  """Returns the losses of a model by seed."""
  return intervals.losses_by_seed([run for run in runs if run['model'] == model], loss)


def _row(
  question: Question, losses: Mapping[int, float], baseline: Mapping[int, float]
) -> Sequence[str]:
  compared = f'[`{question.model}` - `{question.baseline}`](#{question.section})'
  difference = intervals.paired_difference(losses, baseline)
  if difference is None:
    return (question.text, compared, '', question.unit, '0', 'not run')
  seeds = len(losses.keys() & baseline.keys())
  return (
    question.text,
    compared,
    str(difference),
    question.unit,
    str(seeds),
    answer(difference),
  )
