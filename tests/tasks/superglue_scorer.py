"""A scorer of SuperGLUE that shares no code with the package: definitions of the tasks as loops.

It reads labels from the original files, and answers as texts. Values are percentages.
"""

import json
import string


def read_labels(path, task):
  """Returns the label by index of a file with labels: a text; of ReCoRD, all correct texts."""
  labels = {}
  for line in path.read_text().splitlines():
    row = json.loads(line)
    if task == 'multirc':
      for question in row['passage']['questions']:
        for answer in question['answers']:
          key = row['idx'], question['idx'], answer['idx']
          labels[key] = 'True' if answer['label'] else 'False'
    elif task == 'record':
      for query in row['qas']:
        labels[row['idx'], query['idx']] = [answer['text'] for answer in query['answers']]
    elif task == 'copa':
      labels[row['idx'],] = ('choice1', 'choice2')[row['label']]
    else:
      label = row['label']
      labels[row['idx'],] = str(label) if isinstance(label, bool) else label
  return labels


def score(task, labels, answers):
  """Returns the metrics of a task, from the label and the answered text of every index."""
  assert sorted(labels) == sorted(answers)
  pairs = [(labels[idx], answers[idx]) for idx in labels]
  if task == 'record':
    return _record(pairs)
  is_correct = {idx: labels[idx] == answers[idx] for idx in labels}
  accuracy = mean(is_correct.values())
  if task == 'cb':
    classes = 'entailment', 'contradiction', 'neutral'
    return {'f1': sum(f1_of(pairs, name) for name in classes) / 3, 'accuracy': accuracy}
  if task == 'multirc':
    questions = {idx[:2] for idx in labels}
    exact = [all(is_correct[idx] for idx in labels if idx[:2] == q) for q in questions]
    return {'f1': f1_of(pairs, 'True'), 'exact_match': mean(exact)}
  return {'accuracy': accuracy}


def mean(values):
  values = list(values)
  return 100 * sum(values) / len(values)


def f1_of(pairs, positive):
  """The harmonic mean of precision and recall of one class."""
  true_positives = sum(label == answer == positive for label, answer in pairs)
  if not true_positives:
    return 0.0
  precision = true_positives / sum(answer == positive for _, answer in pairs)
  recall = true_positives / sum(label == positive for label, _ in pairs)
  return 100 * 2 * precision * recall / (precision + recall)


def _record(pairs):
  f1, exact = [], []
  for labels, answer in pairs:
    f1.append(max(word_f1(_words(label), _words(answer)) for label in labels))
    exact.append(any(_words(label) == _words(answer) for label in labels))
  return {'f1': mean(f1), 'exact_match': mean(exact)}


def _words(text):
  text = ''.join(c for c in text.lower() if c not in string.punctuation)
  return [word for word in text.split() if word not in ('a', 'an', 'the')]


def word_f1(label, answer):
  """Of two lists of words, from 0 to 1."""
  rest, common = list(label), 0
  for word in answer:
    if word in rest:
      rest.remove(word)
      common += 1
  if not common:
    return 0.0
  precision, recall = common / len(answer), common / len(label)
  return 2 * precision * recall / (precision + recall)
