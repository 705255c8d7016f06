"""Writes small files in the layout of SuperGLUE."""

import json
import pathlib


def write(root: pathlib.Path, task: str, **splits) -> pathlib.Path:
  """Writes the lines of each split, and returns the folder of all tasks."""
  folder = root / 'superglue' / task
  folder.mkdir(parents=True, exist_ok=True)
  for split, lines in splits.items():
    (folder / f'{split}.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  return root / 'superglue'


def rte(count: int, first: int = 0, labelled: bool = True) -> list[dict]:
  """Returns lines of RTE: an easy task on one word, with different lengths."""
  lines = []
  for i in range(first, first + count):
    word = ('rain', 'snow')[i % 2]
    line = {'premise': f'It is {"very " * (i % 5)}{word}.', 'hypothesis': 'rain', 'idx': i}
    label = 'not_entailment' if i % 2 else 'entailment'
    lines.append(line | ({'label': label} if labelled else {}))
  return lines


def record(count: int) -> list[dict]:
  """Returns lines of ReCoRD: passages with two entities, the first one is the answer."""
  passage = {'text': 'Ada met Bob.', 'entities': [{'start': 0, 'end': 2}, {'start': 8, 'end': 10}]}
  answer = {'start': 0, 'end': 2, 'text': 'Ada'}
  qas = lambda i: [{'query': '@placeholder met Bob', 'idx': i, 'answers': [answer]}]
  return [{'idx': i, 'passage': passage, 'qas': qas(i)} for i in range(count)]
