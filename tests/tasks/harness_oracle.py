"""The harness's own model `hf` on the drawn requests: needs torch and transformers.

python -m tests.tasks.harness_oracle    writes the stored answers of the quick tests
"""

from collections.abc import Sequence
import functools
import itertools
import json
import pathlib
import tempfile
from typing import Any

from lm_eval.models import huggingface
import torch
import transformers

from tests.tasks import harness_cases


class Margins(transformers.LogitsProcessor):
  """Records the smallest difference of the two best logits of the new tokens of one row."""

  smallest = float('inf')

  def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    best, second = scores[0].topk(2).values.tolist()
    self.smallest = min(self.smallest, best - second)
    return scores


def load(folder: pathlib.Path, batch_size: int = 1, **arguments: Any) -> huggingface.HFLM:
  """Opens a model. Its cache of logits confuses continuations with the same tokens."""
  return huggingface.HFLM(
    pretrained=str(folder),
    device='cpu',
    dtype='float32',
    batch_size=batch_size,
    logits_cache=False,
    **arguments,
  )


def answer(
  model: huggingface.HFLM, requests: Sequence[harness_cases.Request]
) -> list[harness_cases.Answered]:
  """Answers each request alone, because other answers of a batch may change an answer."""
  answered = []
  for request in requests:
    margins = Margins()
    generate = model.model.generate
    processors = transformers.LogitsProcessorList([margins])
    model.model.generate = functools.partial(generate, logits_processor=processors)
    try:
      (value,) = getattr(model, request.kind)([request.instance], disable_tqdm=True)
    except (AssertionError, RuntimeError, ValueError):  # an empty context or continuation
      value = None
    model.model.generate = generate
    is_decided = margins.smallest > harness_cases.TOLERANCE
    answered.append(harness_cases.Answered(request, value, is_decided))
  return answered


def main() -> None:
  """Writes the stored answers."""
  requests = itertools.islice(harness_cases.all_requests(), *harness_cases.STORED_SLICE)
  lines = []
  with tempfile.TemporaryDirectory() as parent:
    for case, group in itertools.groupby(requests, lambda pair: pair[0]):
      model = load(case.write(pathlib.Path(parent)))
      for answered in answer(model, [request for _, request in group]):
        assert answered.is_decided
        request = answered.request
        lines.append([case.name, request.kind, request.args, answered.value])
  text = ',\n'.join(json.dumps(line, ensure_ascii=False) for line in lines)
  harness_cases.STORED.write_text(f'[\n{text}\n]\n', encoding='utf-8')


if __name__ == '__main__':
  main()
