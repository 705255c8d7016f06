"""A few SuperGLUE examples: as files in every layout, and in the TFDS schema."""

import json
import zipfile

from ngrammer_jax.tasks.superglue import reader

PARAGRAPH = 'Sent 1: Mark left.<br>Sent 2: Pete stayed.'
ARTICLE = 'Ada met Bob in Rome.\u2028Ada left.\n@highlight\nBob stayed'
ENTITIES = [
  {'start': 15, 'end': 18},
  {'start': 0, 'end': 2},
  {'start': 21, 'end': 23},
  {'start': 8, 'end': 10},
]
SCHEMA = 'Mark told Pete many lies. He should have been more truthful.'

# Lines of a labelled split, by folder.
LINES = {
  'BoolQ': [
    {'question': 'is it é', 'passage': 'It is é.', 'idx': 0, 'label': True},
    {'question': 'is it b', 'passage': 'It is a.', 'idx': 1, 'label': False},
  ],
  'CB': [
    {'premise': 'A', 'hypothesis': 'B', 'label': 'contradiction', 'idx': 0},
    {'premise': 'C', 'hypothesis': 'D', 'label': 'neutral', 'idx': 1},
  ],
  'COPA': [
    {
      'premise': 'It rained.',
      'choice1': 'It is wet.',
      'choice2': 'It is dry.',
      'question': 'effect',
      'label': 0,
      'idx': 0,
    },
    {
      'premise': 'It is dry.',
      'choice1': 'It rained.',
      'choice2': 'The sun shone.',
      'question': 'cause',
      'label': 1,
      'idx': 1,
    },
  ],
  'MultiRC': [
    {
      'idx': 4,
      'version': 1.1,
      'passage': {
        'text': PARAGRAPH,
        'questions': [
          {
            'question': 'Who left?',
            'idx': 7,
            'answers': [
              {'text': 'Mark', 'idx': 20, 'label': 1},
              {'text': 'Pete', 'idx': 21, 'label': 0},
            ],
          },
          {
            'question': 'Who stayed?',
            'idx': 8,
            'answers': [{'text': 'Pete', 'idx': 22, 'label': 1}],
          },
          {  # the same text again
            'question': 'Who left?',
            'idx': 9,
            'answers': [{'text': 'Nobody', 'idx': 23, 'label': 0}],
          },
        ],
      },
    }
  ],
  'ReCoRD': [
    {
      'source': 'none',
      'passage': {'text': ARTICLE, 'entities': ENTITIES},
      'qas': [
        {
          'query': '@placeholder left',
          'answers': [
            {'start': 21, 'end': 23, 'text': 'Ada'},
            {'start': 0, 'end': 2, 'text': 'Ada'},
          ],
          'idx': 30,
        },
        {
          'query': 'they were in @placeholder',
          'answers': [{'start': 15, 'end': 18, 'text': 'Rome'}, {'text': 'Bob'}],
          'idx': 31,
        },
      ],
      'idx': 3,
    }
  ],
  'RTE': [
    {'premise': 'A', 'hypothesis': 'B', 'label': 'not_entailment', 'idx': 0},
    {'premise': 'C', 'hypothesis': 'D', 'label': 'entailment', 'idx': 1},
  ],
  'WiC': [
    {
      'word': 'class',
      'sentence1': 'A class.',
      'sentence2': 'The class act.',
      'start1': 2,
      'start2': 4,
      'end1': 7,
      'end2': 9,
      'version': 1.1,
      'idx': 0,
      'label': False,
    }
  ],
  'WSC': [
    {
      'text': SCHEMA,
      'target': {'span1_text': 'mark', 'span1_index': 0, 'span2_text': 'He', 'span2_index': 5},
      'idx': 0,
      'label': True,
    }
  ],
  'AX-b': [
    {'idx': '0', 'label': 'not_entailment', 'sentence1': 'A', 'sentence2': 'B', 'logic': 'Negation'}
  ],
  'AX-g': [{'hypothesis': 'B', 'idx': 0, 'label': 'entailment', 'pair_id': 551646, 'premise': 'A'}],
}

WINOGRAD = {
  'text': SCHEMA,
  'span1_text': 'mark',
  'span1_index': 0,
  'span2_text': 'He',
  'span2_index': 5,
  'idx': 0,
  'label': 1,
}
NEWS = {'passage': ARTICLE, 'entities': ['Ada', 'Bob', 'Rome']}
# Examples of these lines, by config. Labels that are true or false equal 1 and 0.
EXAMPLES = {
  'boolq': LINES['BoolQ'],
  'cb': [
    {'premise': 'A', 'hypothesis': 'B', 'idx': 0, 'label': 1},
    {'premise': 'C', 'hypothesis': 'D', 'idx': 1, 'label': 2},
  ],
  'copa': LINES['COPA'],
  'multirc': [
    {
      'paragraph': PARAGRAPH,
      'question': 'Who left?',
      'answer': 'Mark',
      'idx': {'paragraph': 4, 'question': 7, 'answer': 20},
      'label': 1,
    },
    {
      'paragraph': PARAGRAPH,
      'question': 'Who left?',
      'answer': 'Pete',
      'idx': {'paragraph': 4, 'question': 7, 'answer': 21},
      'label': 0,
    },
    {
      'paragraph': PARAGRAPH,
      'question': 'Who stayed?',
      'answer': 'Pete',
      'idx': {'paragraph': 4, 'question': 8, 'answer': 22},
      'label': 1,
    },
    {
      'paragraph': PARAGRAPH,
      'question': 'Who left?',
      'answer': 'Nobody',
      'idx': {'paragraph': 4, 'question': 9, 'answer': 23},
      'label': 0,
    },
  ],
  'record': [
    {'query': '@placeholder left', 'answers': ['Ada'], 'idx': {'passage': 3, 'query': 30}, **NEWS},
    {
      'query': 'they were in @placeholder',
      'answers': ['Bob', 'Rome'],
      'idx': {'passage': 3, 'query': 31},
      **NEWS,
    },
  ],
  'rte': [
    {'premise': 'A', 'hypothesis': 'B', 'idx': 0, 'label': 1},
    {'premise': 'C', 'hypothesis': 'D', 'idx': 1, 'label': 0},
  ],
  'wic': [
    {name: value for name, value in line.items() if name != 'version'} for line in LINES['WiC']
  ],
  'wsc': [WINOGRAD],
  'wsc.fixed': [WINOGRAD | {'span1_text': 'Mark'}],
  'axb': [{'sentence1': 'A', 'sentence2': 'B', 'idx': 0, 'label': 1}],
  'axg': [{'premise': 'A', 'hypothesis': 'B', 'idx': 0, 'label': 0}],
}
PAIRS = [(config, split) for config, files in reader.CONFIGS.items() for split in files.splits]


def remove_labels(value):
  """Returns a line without its labels, as in a test split."""
  if isinstance(value, dict):
    return {name: remove_labels(v) for name, v in value.items() if name != 'label'}
  return [remove_labels(v) for v in value] if isinstance(value, list) else value


def unlabelled(example):
  """Returns an example without label or answers."""
  return example | ({'answers': []} if 'answers' in example else {'label': -1})


def lines(folder, split):
  if split != 'test' or folder.startswith('AX'):
    return LINES[folder]
  rows = remove_labels(LINES[folder])
  for row in rows:
    for query in row.get('qas', ()):
      del query['answers']
  return rows


def expected(config, split):
  if split != 'test' or config.startswith('ax'):
    return EXAMPLES[config]
  return [unlabelled(example) for example in EXAMPLES[config]]


def jsonl(rows):
  return ''.join(f'{json.dumps(row, ensure_ascii=False)}\n' for row in rows)


def texts():
  """Returns the text of every file by its path."""
  return {
    config.file(split): jsonl(lines(config.folder, split))
    for config in reader.CONFIGS.values()
    for split in config.splits
  }


def write_zip(path, members):
  with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
    for name, text in members.items():
      archive.writestr(name, text)
  return path


def write_folders(root):
  for name, text in texts().items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding='utf-8')
  return root


def write_zips(root):
  root.mkdir(parents=True, exist_ok=True)
  files = texts()
  for config in reader.CONFIGS.values():
    prefix = f'{config.folder}/'
    members = {name: text for name, text in files.items() if name.startswith(prefix)}
    write_zip(root / config.zip, members)
  return root


def write_combined(root):
  junk = {f'__MACOSX/superglue/{name}': 'junk' for name in texts()}
  write_zip(
    root / 'combined.zip', junk | {f'superglue/{name}': text for name, text in texts().items()}
  )
  return root


def write_other_zip(root):
  return write_combined(root).joinpath('combined.zip').rename(root / 'mine.zip')


LAYOUTS = [write_folders, write_zips, write_combined, write_other_zip]
