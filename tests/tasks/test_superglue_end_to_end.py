"""Fine-tuning, validation and answers of whole tasks, scored by an independent scorer."""

import json
import operator

import jax
import numpy as np
import pytest

from ngrammer_jax import command_line, finetune, runs, sharding, submit
from ngrammer_jax import config as experiment
from ngrammer_jax.checkpoints import workdirs, writer
from ngrammer_jax.tasks.superglue import formats, metrics, reader
from ngrammer_jax.training import programs, train_task
from tests.checks import data_root
from tests.tasks import superglue_files, superglue_scorer, test_finetuning, test_submit


def row_length(task):
  config = command_line.resolve(f'{test_finetuning.CONFIG}:{task}', [])
  return config.training.segment_length


def check_scores(task, folder, workdir):
  """Compares the metrics of a run with those of its answers by the independent scorer."""
  evaluation = workdir / 'evaluation'
  result = json.loads((evaluation / 'validation.json').read_text())
  lines = [json.loads(line) for line in (evaluation / 'validation_answers.jsonl').open()]
  key = lambda idx: tuple(idx) if isinstance(idx, list) else (idx,)
  answers = {key(line['idx']): line['answer'] for line in lines}
  labels = superglue_scorer.read_labels(folder / reader.CONFIGS[task].file('validation'), task)
  assert result['task'] == task and result['n'] == len(lines) == len(labels)
  expected = superglue_scorer.score(task, labels, answers)
  assert {name: result[name] for name in expected} == pytest.approx(expected)
  for line in lines:
    label = labels[key(line['idx'])]
    assert line['label'] == (sorted(set(label)) if task == 'record' else label)
    assert line['input'].startswith(f'{formats.find_task(task).prefix or task} ')
    assert (line['score'] is None) == (task == 'record')  # generated
    assert line['score'] is None or line['score'] < 0
  return result, lines


def save_initial_state(config, workdir):
  """Makes a run of a model that has not been trained."""
  task = train_task.CorpusTask(config)
  run = programs.Programs(config, task.vocabulary.size, sharding.make_mesh())
  workdir.mkdir()
  workdirs.write(workdir, config, task.vocabulary, task.content_hash)
  with writer.CheckpointWriter(workdir) as checkpoints:
    checkpoints.save(0, task.initial_state(run.create()))


@pytest.mark.slow
@pytest.mark.parametrize('task', ['multirc', 'cb'])
def test_a_task_of_32_rows(tiny, tmp_path, finetuning, one_device, caplog, task):
  memory = experiment.NGramMemoryConfig(
    key='compressed', layers=(0,), orders=(2,), heads=1, rows=(997,), width=4, convolution=2
  )
  save_initial_state(tiny({'layers': 1, 'ngram_memories': (memory,)}), tmp_path / 'pretrained')
  folder = superglue_files.write(tmp_path, 'CB', **dict.fromkeys(('train', 'val'), CB))
  superglue_files.write(tmp_path, 'MultiRC', **dict.fromkeys(('train', 'val'), MULTIRC))
  changes = {
    'training__steps': 40,
    'training__segments_per_call': 10,
    'training__evaluate_every': 0,
    'training__checkpoint_every': 40,
    'training__log_every': 20,
    'training__segment_length': 83,  # 63 tokens and the document start: one padded shape
    'optimizer__learning_rate': 0.01,
    'evaluation__max_examples': 9,
  }
  args = test_finetuning.arguments(tmp_path, task, task, **changes)
  assert finetune.main(args) == 0
  result, lines = check_scores(task, folder, tmp_path / task)
  assert result['n'] == 32 and 0 < result['accuracy' if task == 'cb' else 'exact_match'] < 100
  assert task != 'cb' or len({line['answer'] for line in lines}) > 1
  records = [json.loads(line) for line in (tmp_path / task / 'metrics.jsonl').open()]
  # Validation during training has the first nine examples.
  during = {name: value for r in records for name, value in r.items() if 'validation/' in name}
  assert during['validation/n'] == 9
  cut = 'multirc, train: 8 of 32 inputs (25.0%) are truncated to 63 tokens'
  assert (cut in caplog.text) == (task == 'multirc')
  check_memories(*(runs.load_run(tmp_path / name).state for name in ('pretrained', task)))


def check_memories(before, after):
  """Clusters and classes are those of the checkpoint, and rows that were read have learned."""
  jax.tree.map(np.testing.assert_array_equal, before.codebook, after.codebook)
  classes = after.codebook['layer_0']['ngram_memory_0']['token_classes']
  assert len(set(np.asarray(classes).tolist())) == 228  # of 257 bytes and start
  tables = (np.asarray(s.params['layer_0']['ngram_memory_0']['table']) for s in (before, after))
  is_changed = operator.ne(*tables).any(axis=1)
  assert 20 < is_changed.sum() < 200  # few bytes follow each other in the examples


CB = [
  {
    'premise': f'It {"is" if i % 2 else "may be"} rain.',
    'hypothesis': ('rain', 'snow', 'fog')[i % 3],
    'label': ('entailment', 'contradiction', 'neutral')[i % 3],
    'idx': i,
  }
  for i in range(32)
]
MULTIRC = [
  {
    'idx': i,
    'passage': {
      'text': '<b>Ada</b>' if i else f'<b>Ada left.</b><br>{"Later, " * 9}',
      'questions': [
        {
          'idx': 2 * i + j,
          'question': 'Who left?',
          'answers': [
            {
              'idx': 8 * i + 4 * j + k,
              'text': ('Ada', 'Bob')[k % 2],
              'label': int((j, k % 2)[i % 2]),
            }
            for k in range(4)
          ],
        }
        for j in range(2)
      ],
    },
  }
  for i in range(4)
]


def write_first_rows(folder, task, count=32):
  """Writes the first lines of the real files that have `count` examples.

  A split that is not there, the test split of ReCoRD, is made of validation examples.
  """
  files, real = reader.CONFIGS[formats.TASKS[task].config], data_root('data/superglue')
  for split in files.splits:
    path = real / files.file(split)
    lines = (path if path.exists() else real / files.file('validation')).open()
    chosen, examples = [], 0
    while examples < count:
      chosen.append(next(lines))
      questions = json.loads(chosen[-1])['passage']['questions'] if task == 'multirc' else None
      examples += sum(len(question['answers']) for question in questions) if questions else 1
    (folder / files.file(split)).parent.mkdir(parents=True, exist_ok=True)
    (folder / files.file(split)).write_text(''.join(chosen))


@pytest.mark.slow
def test_all_tasks_of_the_first_real_rows(trained, tmp_path, finetuning, one_device, capsys):
  """From eight fine-tunings to the ten submission files."""
  (tmp_path / 'pretrained').symlink_to(trained)
  folder, workdir = tmp_path / 'superglue', tmp_path / 'all'
  for task in (*formats.SUPERGLUE_TASKS, 'axb', 'axg'):
    write_first_rows(folder, task)
  changes = {'training__steps': 2, 'training__batch_size': 4, 'evaluation__max_examples': 4}
  lengths = {'training__segment_length': None, 'finetune__targets_length': None}
  args = test_finetuning.arguments(tmp_path, 'all', 'all', **changes, **lengths)
  assert finetune.main(args) == 0
  tables = capsys.readouterr().out
  scores = {}
  for task in formats.SUPERGLUE_TASKS:
    result, lines = check_scores(task, folder, workdir / task)
    assert len(lines) >= 32 and result['protocol']['length'] == row_length(task)
    values = [result[name] for name in metrics.METRICS_BY_TASK[task]]
    scores[task] = sum(values) / len(values)
  assert f'average of 8 tasks: {sum(scores.values()) / 8:.2f}' in tables
  finetune.main(args)  # already finished: only prints the tables
  assert capsys.readouterr().out == tables and tables.count('average of 8 tasks: ') == 2
  assert submit.main([f'--workdir={workdir}', f'--output={tmp_path / "answers"}']) == 0
  test_submit.check_files(tmp_path / 'answers', folder)
