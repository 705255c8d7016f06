"""Scores of a run on a split, a text file or cloze questions."""

import dataclasses
import logging
import pathlib
from typing import Any

from ngrammer_jax.config.evaluation import EvaluationConfig
from ngrammer_jax.data.documents import corpora
from ngrammer_jax.data.tokens import token_cache, token_split
from ngrammer_jax.inference import cloze, language_modeling, padding
from ngrammer_jax.inference import engine as inference
from ngrammer_jax.runs import corpus, split_texts
from ngrammer_jax.runs.opened_run import OpenedRun
from ngrammer_jax.system import hosts, progress, storage


def evaluate(run: OpenedRun, split: str, max_tokens: int | None) -> dict[str, Any]:
  """Scores a split of the corpus; see `Run.evaluate`."""
  corpus.check_split_name(split)
  run.find_checkpoint()  # before the corpus is tokenised
  options = dataclasses.replace(run.config.evaluation, max_tokens=max_tokens)
  if not run.config.data.mixture or '/' in split:
    return {'split': split, **_score(run, run.split(split), split, options)}
  run.split(split)  # reports a split that a part does not have
  parts = {part: run.evaluate(f'{split}/{part}', max_tokens) for part in run.mixture.parts}
  result = language_modeling.combine(parts, run.mixture.weights)
  return {'split': split, 'step': run.restored.step, **result, 'parts': parts}


def evaluate_file(
  run: OpenedRun, path: str | pathlib.Path, max_tokens: int | None
) -> dict[str, Any]:
  """Scores a text file as one document; see `Run.evaluate_file`."""
  config = run.config
  with hosts.collective_errors():
    options = corpora.read_options(config.data)
    split = token_cache.encode_file(
      storage.user_path('--text', path), run.vocabulary, options, config.data.loss_on
    )
  count = _count_tokens(split, max_tokens)
  streams = min(config.evaluation.streams, max(count // config.evaluation_length(), 1))
  if streams < config.evaluation.streams:
    logging.info('%s: %s tokens, divided into evaluation.streams=%s', path, f'{count:,}', streams)
  length = min(config.evaluation_length(), padding.bucket(count, padding.MIN_TEXT_LENGTH))
  options = dataclasses.replace(
    config.evaluation, max_tokens=max_tokens, streams=streams, segment_length=length
  )
  return {'text': str(path), **_score(run, split, str(path), options)}


def answer_cloze(
  run: OpenedRun, path: str | pathlib.Path, split: str, protocol: str
) -> tuple[dict[str, Any], list[cloze.ClozeAnswer]]:
  """Answers the questions of the Children's Book Test; see `Run.cloze`."""
  corpus.check_split_name(split)
  cloze.check_protocol(protocol)
  inference.check_can_continue(run.config.model)
  with hosts.collective_errors():
    questions, count = cloze.open_questions(storage.user_path('--cloze', path), split)
  context = run.config.evaluation_context()
  evaluator = cloze.ClozeEvaluator(
    run.engine, run.vocabulary, run.config.training.batch_size, context, protocol
  )
  with progress.Progress('cloze', count, 'questions') as bar:
    answers = list(evaluator(run.variables, questions.read(), bar.advance))
  return cloze.build_result(answers, questions, run.restored.step, protocol, context), answers


def _score(
  run: OpenedRun, split: token_split.TokenSplit, name: str, options: EvaluationConfig
) -> dict[str, Any]:
  """Returns the step and the metrics of a split."""
  config = dataclasses.replace(run.config, evaluation=options)
  count = _count_tokens(split, options.max_tokens)
  split_texts.log(run.config, {name: count})
  variables = run.restored
  num_counted = split.num_counted(options.max_tokens)
  with progress.Progress(f'evaluating {name}', num_counted, 'tokens') as bar:
    result = language_modeling.evaluate(
      run.engine, variables.collections, split, config, run.vocabulary.line_end, bar.advance
    )
  return {'step': variables.step, **result}


def _count_tokens(split: token_split.TokenSplit, max_tokens: int | None) -> int:
  """Returns the number of scored tokens of a split."""
  return min(max_tokens or len(split.tokens), len(split.tokens))
