"""Conversations as documents: their tokens, and which of them count in the loss."""

import json

import numpy as np
import pyarrow as pa
from pyarrow import parquet
import pytest

from ngrammer_jax.config import data as data_config
from ngrammer_jax.data import mixture, train_segments
from ngrammer_jax.data.documents import shards
from ngrammer_jax.data.files import text_files
from ngrammer_jax.data.formats import ReadOptions, conversations
from ngrammer_jax.data.rows import evaluation_streams
from ngrammer_jax.data.tokens import document_encoder, token_cache, token_split
from ngrammer_jax.data.vocabularies import tokenizer as tokenizers
from tests import tiny_run, tokenizer_files
from tests.campaigns import conversations as drawn
from tests.checks import bad_input
from tests.data import document_files
from tests.loops import each

SPECIAL = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
CHATML = """{% for m in messages %}
{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
B, T = 4, 16


def user(content):
  return {'role': 'user', 'content': content}


def assistant(content):
  return {'role': 'assistant', 'content': content}


def conversation(i):
  """One to three turns, the first ones after a system message."""
  messages = [{'role': 'system', 'content': f'line {i}'}] if i % 3 == 0 else []
  for turn in range(1 + i % 3):
    messages += [
      user(f'a few <|im_end|> {i}'),
      assistant(f' more text {turn} \U0001f642' * (i % 2)),
    ]
  return messages


CONVERSATIONS = [conversation(i) for i in range(60)]


@pytest.fixture
def tokenizer(tmp_path):
  """A folder with a tokenizer and a chat template."""

  def make(template=CHATML, name='tokenizer'):
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    (folder / 'tokenizer.json').write_bytes(tokenizer_files.byte_level(special=SPECIAL))
    settings = {'eos_token': '<|endoftext|>', 'chat_template': template}
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
    return folder

  return make


def write(path, conversations=CONVERSATIONS, field='messages'):
  path.parent.mkdir(parents=True, exist_ok=True)
  if path.suffix == '.parquet':
    table = {'id': range(len(conversations)), field: conversations}
    parquet.write_table(pa.table(table), path, row_group_size=7)
  else:
    lines = [json.dumps({'id': i, field: c}) + '\n' for i, c in enumerate(conversations)]
    path.write_text(''.join(lines))
  return path


def config(path, folder, corpus='text', loss_on='assistant', **more):
  return data_config.DataConfig(
    corpus,
    str(path),
    vocabulary='tokenizer',
    vocabulary_path=str(folder),
    chat=True,
    loss_on=loss_on,
    **more,
  )


def expected_tokens(messages, vocabulary):
  """Ids, and whether they count, piece by piece: special tokens are never a part of others."""
  pieces = []
  for m in messages:
    pieces += [('<|im_start|>', True, False), (m['role'] + '\n', False, False)]
    is_said = m['role'] == 'assistant'
    for i, text in enumerate(m['content'].split('<|im_end|>')):
      if i:
        pieces.append(('<|im_end|>', False, is_said))
      pieces.append((text, False, is_said))
    pieces += [('<|im_end|>', True, is_said), ('\n', False, is_said)]
  ids, counts = [], []
  for text, special, is_said in pieces:
    part = vocabulary.encode(text.encode(), special=special).tolist()
    ids += part
    counts += [is_said] * len(part)
  return ids, counts


def expected_stream(conversations, vocabulary):
  """Ids, counts and starts of conversations one after another."""
  ids, counts, starts = [], [], []
  for messages in conversations:
    if ids:
      ids.append(0)
      counts.append(False)
    starts.append(len(ids))
    of_messages = expected_tokens(messages, vocabulary)
    ids += of_messages[0]
    counts += of_messages[1]
  return ids, counts, starts


@each('name', ['x.jsonl', 'x.parquet'])
def test_the_cache_has_tokens_and_counts(tmp_path, tokenizer, name):
  prepared = document_files.prepare(config(write(tmp_path / name), tokenizer()))
  for split in ('train', 'validation', 'test'):
    of_split = [
      c
      for i, c in enumerate(CONVERSATIONS)
      if {9: 'validation', 19: 'test'}.get(i % 20, 'train') == split
    ]
    ids, counts, starts = expected_stream(of_split, prepared.vocabulary)
    actual = prepared.splits[split]
    assert actual.tokens.tolist() == ids
    assert actual.counts.tolist() == counts
    assert actual.starts.tolist() == starts
    assert actual.text_bytes is None
    assert f'{split}: {len(ids):,} tokens ({sum(counts):,} count in the loss)' in prepared.counts


def test_without_a_mask_nothing_is_added_to_the_cache(tmp_path, tokenizer, caplog):
  path = write(tmp_path / 'x.jsonl')
  prepared = document_files.prepare(config(path, tokenizer(), loss_on='all'))
  masked = document_files.prepare(config(path, tokenizer()))
  for split, tokens in prepared.splits.items():
    assert tokens.counts is None
    np.testing.assert_array_equal(tokens.tokens, masked.splits[split].tokens)
  assert 'count in' not in prepared.counts
  assert 'damaged' not in caplog.text  # each has its own folder


def test_a_long_conversation_is_whole(tmp_path, tokenizer, monkeypatch):
  path = write(tmp_path / 'x.jsonl')
  whole = document_files.prepare(config(path, tokenizer())).splits['train']
  monkeypatch.setattr(text_files, 'LONG', 30)
  monkeypatch.setattr(text_files, 'CHUNK_SIZE', 20)
  pieces = document_files.prepare(
    config(path, tokenizer(), cache_dir=str(tmp_path / 'other'))
  ).splits['train']
  np.testing.assert_array_equal(pieces.tokens, whole.tokens)


def test_rows_of_the_cache_have_the_counts_of_their_targets(tmp_path, tokenizer):
  run = tiny_run.config(tmp_path, training={'batch_size': B, 'segment_length': T})
  run = run.__class__(**vars(run) | {'data': config(write(tmp_path / 'x.jsonl'), tokenizer())})
  prepared = mixture.prepare(run.data)
  segments = train_segments.TrainSegments(prepared, run, None)
  split = prepared.parts[''].splits['train']
  stride = len(split.tokens) // B
  for step in range(90):  # beyond the end of the split
    batch = segments.segment(step)
    indices = (np.arange(B)[:, None] * stride + step * T + np.arange(T)) % len(split.tokens)
    np.testing.assert_array_equal(batch.targets_BxT, split.tokens[indices])
    np.testing.assert_array_equal(batch.counts_BxT, split.counts[indices])
    assert batch.counts_BxT.dtype == np.float32


def test_streamed_rows_have_the_counts_of_the_cache(tmp_path, tokenizer):
  """One row that reads one shard has the tokens of the file, in their order."""
  folder = tmp_path / 'shards'
  for split in ('train', 'valid'):
    write(folder / f'{split}.parquet')
  prepared = document_files.prepare(config(folder, tokenizer(), corpus='shards'))
  ids, counts, _ = expected_stream(CONVERSATIONS, prepared.vocabulary)
  rows = train_segments.streamed_rows.StreamedRows(
    prepared.train_shards,
    prepared.encoder,
    document_files.whole_batch(1),
    T,
    tmp_path / 'w',
    None,
    False,
  )
  read = [rows.rows(step, range(1))[0] for step in range(len(ids) // T)]
  targets = np.concatenate([row.targets for row in read])
  np.testing.assert_array_equal(targets, ids[: len(targets)])
  np.testing.assert_array_equal(
    np.concatenate([row.counts for row in read]), counts[: len(targets)]
  )
  assert prepared.splits['validation'].counts.tolist() == counts


def test_all_batches_of_a_mixture_have_counts(tmp_path, tokenizer):
  """A part that is text counts everywhere, and so do batches that read nothing else."""
  text = tmp_path / 'text.jsonl'
  text.write_text(
    ''.join(json.dumps({'text': f'some lines of text {i}'}) + '\n' for i in range(99))
  )
  parts = (
    data_config.PartConfig(
      path=str(write(tmp_path / 'chat.jsonl')), chat=True, loss_on='assistant'
    ),
    data_config.PartConfig(path=str(text)),
  )
  data = data_config.DataConfig(
    'text', vocabulary='tokenizer', vocabulary_path=str(tokenizer()), mixture=parts, mixture_block=2
  )
  run = tiny_run.config(tmp_path, training={'batch_size': 1, 'segment_length': T})
  run = run.__class__(**vars(run) | {'data': data})
  prepared = mixture.prepare(data)
  segments = train_segments.TrainSegments(prepared, run, None)
  kinds = set()
  for step in range(20):
    batch = segments.segment(step)
    assert batch.counts_BxT.shape == (1, T)
    kinds.add(bool(batch.counts_BxT.all()))
  assert kinds == {True, False}
  joined = prepared.split('train')
  chat, plain = (prepared.parts[name].splits['train'] for name in ('chat', 'text'))
  assert joined.counts.tolist() == [*chat.counts, False, *[True] * len(plain.tokens)]


@each('protocol', ['streams', 'transformer_xl', 'sliding_window'])
def test_evaluation_streams_have_the_counts_of_their_targets(protocol):
  tokens = np.arange(50)
  split = token_split.TokenSplit(tokens, np.array([0]), None, 99, counts=tokens % 3 == 0)
  streams = evaluation_streams.EvaluationStreams(split, 3, 8, protocol=protocol)
  counted = []
  if protocol == 'sliding_window':
    batch = streams.window(0, 56)
    last = (batch.valid_BxT.sum(axis=1) - 1).astype(int)
    rows = np.arange(56)
    is_counted = batch.counted[rows, last] > 0
    counted = batch.targets_BxT[rows, last][is_counted].tolist()
  else:
    for index in range(streams.segments):
      batch = streams.segment(index, 0, 4)
      assert not batch.counted[batch.valid_BxT == 0].any()
      counted += batch.targets_BxT[batch.counted > 0].tolist()
  skipped = [] if protocol != 'transformer_xl' else [0, 16, 32, 48, 49]
  assert sorted(counted) == [i for i in range(0, 50, 3) if i not in skipped]


# The template.

MARKED = CHATML.replace(
  "m['content'] + '<|im_end|>\\n' }}",
  "'' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}"
  "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}",
)


def test_a_generation_tag_says_what_counts(tmp_path, tokenizer):
  """Here, unlike what is added to the text, it leaves out the line end after the answer."""
  path = write(tmp_path / 'x.jsonl')
  by_tag, by_prefix = (
    document_files.prepare(config(path, tokenizer(template, name))).splits['train']
    for template, name in ((MARKED, 'tag'), (CHATML, 'prefix'))
  )
  np.testing.assert_array_equal(by_tag.tokens, by_prefix.tokens)
  line_end = by_tag.tokens[-1]
  differs = np.flatnonzero(by_tag.counts != by_prefix.counts)
  assert by_prefix.counts[differs].all()
  assert set(by_tag.tokens[differs]) == {line_end}
  assert (by_tag.tokens[differs - 1] == 2).all() and by_tag.counts[differs - 1].all()


def test_a_document_start_of_the_template_is_that_between_documents(tmp_path, tokenizer):
  """Else a conversation would begin with two of them, as no prompt of a chat does."""
  template = "{{ '<|endoftext|>' }}" + CHATML
  path = write(tmp_path / 'x.jsonl')
  first, second = (
    document_files.prepare(config(path, tokenizer(t, name))).splits['train']
    for t, name in ((CHATML, 'without'), (template, 'with'))
  )
  np.testing.assert_array_equal(first.tokens, second.tokens)
  np.testing.assert_array_equal(first.counts, second.counts)


def prepare_one(tmp_path, tokenizer, messages, template=CHATML, loss_on='assistant', **more):
  path = write(tmp_path / 'x.jsonl', [*CONVERSATIONS[:2], messages] * 20)
  return document_files.prepare(config(path, tokenizer(template), loss_on=loss_on, **more))


STRICT = (
  "{% for m in messages %}{% if m['role'] not in ['user', 'assistant', 'system'] %}"
  "{{ raise_exception('the role ' + m['role'] + ' is not supported') }}{% endif %}{% endfor %}"
)
LAST_IS_OTHER = (
  "{% for m in messages %}{{ m['role'] + ':' }}{% if loop.last and not add_generation_prompt %}"
  "{{ '(last)' }}{% endif %}{{ m['content'] }}{% endfor %}"
)


@pytest.mark.parametrize(
  'messages, template, message',
  [
    (
      [user('a'), {'role': 'tool', 'content': 'b'}],
      STRICT + CHATML,
      ', document 3: the chat template of the model cannot show this conversation: the role tool '
      'is not supported',
    ),
    (
      [user('a'), {'role': 'tool', 'content': 'b'}],
      CHATML.replace('messages %}', "messages if m['role'] != 'tool' %}"),
      ", document 3: the chat template of the model leaves out the role 'tool': put its text into "
      "a message of the role 'user'",
    ),
    (
      [user('a'), assistant('b'), user('c')],
      LAST_IS_OTHER,
      ', document 2: message 2: data.loss_on=assistant cannot find the text of the assistant, '
      'because the chat template writes a message otherwise when another one follows: use a '
      'template with {% generation %} around that text, or data.loss_on=all',
    ),
  ],
)
def test_what_a_template_cannot_show_is_refused(tmp_path, tokenizer, messages, template, message):
  with bad_input(f'{tmp_path}/x.jsonl{message}'):
    prepare_one(tmp_path, tokenizer, messages, template)


def encoder(template):
  """An encoder whose tokens of the assistant count in the loss."""
  content = tokenizer_files.byte_level(special=SPECIAL)
  vocabulary = tokenizers.TokenizerVocabulary(content, chat_template=template)
  return document_encoder.ConversationEncoder(vocabulary, 'assistant')


def test_a_system_message_is_checked_wherever_it_is():
  """A template may show it as the first message only."""
  system = {'role': 'system', 'content': 'LOST'}
  chat = encoder(
    "{{ messages[0]['content'] }}{% for m in messages[1:] if m['role'] != 'system' %}"
    "{{ m['content'] }}{% endfor %}"
  )
  assert chat.prepare(json.dumps([system, user('a')]).encode()) == b'LOSTa'
  assert chat.prepare(json.dumps([system, user('b')]).encode()) == b'LOSTb'
  with bad_input(
    "the chat template of the model leaves out the role 'system': put its text into a message of "
    "the role 'user'"
  ):
    chat.prepare(json.dumps([user('a'), system]).encode())


@pytest.mark.parametrize('content', ['a few', ' more', ''])
def test_a_conversation_may_begin_with_the_assistant(content):
  """Also if the template reads the first message, to find a system message."""
  messages = [assistant(content), user('b'), assistant('c')]
  chat = encoder("{% if messages[0]['role'] == 'system' %}{% endif %}" + CHATML)
  (encoded,) = chat.encode_all([chat.prepare(json.dumps(messages).encode())])
  ids, counts = expected_tokens(messages, chat.vocabulary)
  assert (encoded.ids.tolist(), encoded.counts.tolist()) == (ids, counts)


def test_a_vocabulary_without_a_template_is_refused(tmp_path, tokenizer):
  with bad_input(
    'data.chat=True needs a vocabulary with a chat template: name the folder or the GGUF file of a '
    'model for chats as data.vocabulary_path, such as a folder with chat_template.jinja or '
    'tokenizer_config.json beside its tokenizer.json'
  ):
    document_files.prepare(config(write(tmp_path / 'x.jsonl'), tokenizer() / 'tokenizer.json'))


def test_a_training_text_in_which_nothing_counts_is_refused(tmp_path, tokenizer):
  path = write(tmp_path / 'x.jsonl', [[user('a')]] * 60)
  with bad_input(
    'no token of the train split of text counts in the loss: with data.loss_on=assistant the '
    'conversations need messages with the role "assistant"'
  ):
    document_files.prepare(config(path, tokenizer()))


def test_the_first_conversation_of_shards_is_written_before_training(tmp_path, tokenizer):
  for split in ('train', 'valid'):
    write(tmp_path / 'shards' / f'{split}.jsonl', [[user('a'), {'role': 'tool', 'content': 'b'}]])
  with bad_input(
    f'{tmp_path}/shards/train.jsonl, document 1: the chat template of the model cannot show this '
    f'conversation: the role tool is not supported'
  ):
    document_files.prepare(config(tmp_path / 'shards', tokenizer(STRICT + CHATML), corpus='shards'))


# Files.

LINE = ', line 1'


@pytest.mark.parametrize(
  'value, message',
  [
    ([], ': "messages" is an empty list, without a message: leave it out'),
    (
      'a text',
      ': "messages" is text, not a list of messages such as {"role": "user", "content": "..."}: '
      'set data.text_field to the name of the one with the messages, or leave out data.chat to '
      'train on texts',
    ),
    (
      {'role': 'user'},
      ': "messages" is an object, not a list of messages such as {"role": "user", "content": "..."}'
      ': set data.text_field to the name of the one with the messages',
    ),
    (['a'], ', message 1 is text, not an object such as {"role": "user", "content": "..."}'),
    (
      [{'from': 'human', 'value': 'a'}],
      ', message 1 has "from" and "value", not "role" and "content": rename them, and write the '
      'roles of the chat template, such as user and assistant for human and gpt',
    ),
    (
      [{'content': 'a'}],
      ', message 1 has no role: expected an object such as {"role": "user", "content": "..."}',
    ),
    (
      [user('a'), assistant(None)],
      ', message 2: "content" is null, not text: expected an object such as {"role": "user", '
      '"content": "..."}',
    ),
    (
      [user([{'type': 'text', 'text': 'a'}, {'type': 'image_url', 'image_url': 'b'}])],
      ", message 1: a part of its content is of the type 'image_url', not text: only text is read, "
      'so leave the conversation out',
    ),
  ],
)
def test_what_is_no_conversation_is_refused(tmp_path, value, message):
  path = write(tmp_path / 'x.jsonl', [value])
  options = ReadOptions(('messages',), is_chat=True, remedy=conversations.REMEDY)
  with bad_input(f'{path}{LINE}{message}'):
    list(shards.ShardDocuments(shards.FileShards((path,), options)))


def test_messages_are_read_as_chat_templates_expect_them(tmp_path):
  messages = [
    {'role': 'user', 'content': [{'type': 'text', 'text': 'a '}, {'type': 'text', 'text': 'b'}]},
    {'role': 'assistant', 'content': None, 'tool_calls': [{'name': 'f'}], 'name': None},
    {'role': 'tool', 'content': 'half \ud83d'},
  ]
  expected = [
    {'role': 'user', 'content': 'a b'},
    {'role': 'assistant', 'tool_calls': [{'name': 'f'}]},
    {'role': 'tool', 'content': 'half \ufffd'},
  ]
  options = ReadOptions(('messages',), is_chat=True)
  path = write(tmp_path / 'x.jsonl', [messages, None])
  documents = shards.ShardDocuments(shards.FileShards((path,), options))
  (document,) = documents
  assert json.loads(b''.join(document.read_chunks())) == expected
  assert (documents.counts.empty, documents.counts.null, documents.counts.replaced) == (1, 1, 1)


@pytest.mark.full
def test_drawn_conversations_and_records():
  """A small part of the trial in `tests/campaigns/conversations.py`; many are accepted."""
  outcomes = [drawn.check(seed) for seed in range(100)]
  conversations_accepted, records_accepted = np.array(outcomes).sum(axis=0)
  assert 50 < conversations_accepted < 100 and 20 < records_accepted < 100


def test_a_text_file_holds_no_conversations(tmp_path, tokenizer):
  (tmp_path / 'x.txt').write_text('a text')
  with bad_input(
    f'{tmp_path}/x.txt is text, but data.chat=True reads conversations, which are JSON lines, '
    f'Parquet or Arrow with a field "messages": use data.chat=False and data.loss_on=all to '
    f'read text'
  ):
    document_files.prepare(config(tmp_path / 'x.txt', tokenizer()))


def test_the_field_of_the_conversations_can_be_named(tmp_path, tokenizer):
  path = write(tmp_path / 'x.parquet', field='conversations')
  with bad_input(
    f"{path} has no column 'messages', but id, conversations: set data.text_field=conversations"
  ):
    document_files.prepare(config(path, tokenizer()))
  prepared = document_files.prepare(config(path, tokenizer(), text_field='conversations'))
  assert len(prepared.splits['train'].starts) == 54


def test_a_file_of_conversations_is_evaluated_with_its_counts(tmp_path, tokenizer):
  path = write(tmp_path / 'x.jsonl', CONVERSATIONS[:5])
  vocabulary = document_files.prepare(config(write(tmp_path / 'y.jsonl'), tokenizer())).vocabulary
  options = ReadOptions(('messages',), is_chat=True)
  split = token_cache.encode_file(path, vocabulary, options, 'assistant')
  ids, counts, _ = expected_stream(CONVERSATIONS[:5], vocabulary)
  assert split.tokens.tolist() == ids and split.counts.tolist() == counts
  assert token_cache.encode_file(path, vocabulary, options).counts is None
