"""Scores of texts."""

from collections.abc import Sequence
import dataclasses
import math

import numpy as np

from ngrammer_jax.data import vocabulary as vocabularies
from ngrammer_jax.inference import engine, tokenization


@dataclasses.dataclass(frozen=True)
class Score:
  """How well a text is predicted as a document of its own.

  Attributes:
    text: the text.
    tokens: its token ids.
    nats: negative log-likelihood of each token, float64.
    lossless: whether the tokens decode to the text.
  """

  text: str
  tokens: np.ndarray
  nats: np.ndarray
  lossless: bool

  @property
  def perplexity(self) -> float:
    """exp of the mean over tokens; nan for an empty text."""
    return math.exp(min(self.nats.mean(), 700)) if self.nats.size else math.nan

  @property
  def bits_per_byte(self) -> float:
    """Bits per byte of UTF-8; nan for an empty text, or if the tokens do not decode to it."""
    size = len(self.text.encode()) if self.lossless else 0
    return float(self.nats.sum()) / math.log(2) / size if size else math.nan


def score_texts(
  model: engine.Engine,
  variables: engine.Variables,
  vocabulary: vocabularies.Vocabulary,
  texts: Sequence[tokenization.EncodedText],
  segment_length: int,
) -> list[Score]:
  """Scores texts, each as a document of its own."""
  documents, start = [ids for _, ids in texts], vocabulary.document_start
  nats = model.score_documents(variables, documents, start, segment_length)
  return [
    Score(text, ids, text_nats, lossless=vocabulary.decode(ids) == text.encode())
    for (text, ids), text_nats in zip(texts, nats, strict=True)
  ]
