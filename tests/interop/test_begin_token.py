"""The begin token: folders are read, and read again after an export, as transformers 5 does it."""

import dataclasses
import json
import os
import random

import numpy as np
import pytest

from ngrammer_jax import runs
from ngrammer_jax.data import vocabularies
from ngrammer_jax.data.vocabularies import post_processor, published
from ngrammer_jax.training import train_task
from tests import gguf_files, published_folders, tokenizer_files
from tests.campaigns import tokenizer_folders
from tests.campaigns.tokenizer_folders import BYTE_LEVEL, sequence, template

START, END, OTHER = '<s>', '</s>', '<|x|>'  # with the ids 0, 1 and 2
ROBERTA = {
  'type': 'RobertaProcessing',
  'sep': [END, 1],
  'cls': [START, 0],
  'trim_offsets': True,
  'add_prefix_space': False,
}
BERT = {'type': 'BertProcessing', 'sep': [END, 1], 'cls': [START, 0]}
PROCESSORS = {
  'none': None,
  'byte level': BYTE_LEVEL,
  'template': template((START, 0)),
  'template without tokens': template(),
  'sequence': sequence(BYTE_LEVEL, template((START, 0))),
  'another token': template((OTHER, 2)),
  'two tokens': template((START, 0), (OTHER, 2)),
  'end': template((START, 0), end=((END, 1),)),
  'only an end': template(end=((END, 1),)),
  'two templates': sequence(template((START, 0)), template((OTHER, 2))),
  'nested': sequence(sequence(BYTE_LEVEL), sequence(template((START, 0)), BYTE_LEVEL)),
  'roberta': ROBERTA,
  'bert': BERT,
}


def with_processor(content, processor):
  return json.dumps(json.loads(content) | {'post_processor': processor}).encode()


@pytest.fixture(scope='module')
def byte_level():
  return tokenizer_files.byte_level(special=(START, END, OTHER))


@pytest.mark.parametrize('name', PROCESSORS)
def test_post_processors(byte_level, name):
  """As the library of tokenizers reads them; an empty text has the added ids alone."""
  from tokenizers import Tokenizer

  content = with_processor(byte_level, PROCESSORS[name])
  plain = Tokenizer.from_buffer(content).encode('a few', add_special_tokens=False).ids
  before, after = post_processor.added_ids(PROCESSORS[name])
  assert Tokenizer.from_buffer(content).encode('a few').ids == [*before, *plain, *after]
  for begin in (None, 0, 2):
    changed = post_processor.with_begin_token(content, OTHER if begin else START, begin)
    expected = plain if begin is None else [begin, *plain]
    assert Tokenizer.from_buffer(changed).encode('a few').ids == expected
    assert (changed == content) == ((before, after) == ((begin,) if begin is not None else (), ()))
    others = json.loads(changed) | {'post_processor': None}
    assert others == json.loads(content) | {'post_processor': None}
    is_kept = 'ByteLevel' in str(json.loads(changed)['post_processor'])
    assert is_kept == ('ByteLevel' in str(PROCESSORS[name]))


# What transformers 5.24 does: the model_type, the class in tokenizer_config.json, the files of the
# tokenizer, and whether a text has a begin token if add_bos_token is absent, true and false.
ALWAYS, NEVER, AS_SET = (True, True, True), (False, False, False), (False, True, False)
READ = [
  *[
    (model_type, name, 'json', ALWAYS)
    for model_type, name in [
      ('llama', None),
      ('llama', 'PreTrainedTokenizerFast'),
      ('llama', 'LlamaTokenizerFast'),
      ('llama', 'GPT2Tokenizer'),
      ('llama', 'BloomTokenizerFast'),
      ('mistral', 'LlamaTokenizer'),
      ('mistral', 'GPTNeoXTokenizerFast'),
      ('qwen2', 'Qwen2Tokenizer'),
      ('qwen2', 'GPTNeoXTokenizer'),
      ('qwen3', None),
      ('gemma2', 'GemmaTokenizer'),
      ('gemma3_text', None),
      ('smollm3', 'PreTrainedTokenizer'),
      ('olmo2', 'GPTNeoXTokenizer'),
      ('phi3', 'GPTNeoXTokenizer'),
      ('gpt2', 'GPT2TokenizerFast'),
      ('gpt2', None),
      ('gpt_neox', 'PreTrainedTokenizerFast'),
      ('gpt_neox', 'GPT2Tokenizer'),
    ]
  ],
  ('gpt_neox', None, 'json', NEVER),
  ('gpt_neox', 'GPTNeoXTokenizerFast', 'json', NEVER),
  ('llama', 'GPTNeoXTokenizer', 'json', NEVER),
  ('llama', 'LlamaTokenizer', 'json without', NEVER),
  ('gemma', 'GemmaTokenizer', 'json without', NEVER),
  ('llama', 'LlamaTokenizer', 'model', AS_SET),
  ('llama', None, 'model', AS_SET),
  ('mistral', 'LlamaTokenizerFast', 'model', AS_SET),
  ('gemma', 'GemmaTokenizer', 'model', AS_SET),
  ('llama', 'CodeLlamaTokenizer', 'model', (True, True, False)),
  ('llama', 'CodeLlamaTokenizerFast', 'pairs of pieces', ALWAYS),
  ('gpt2', 'GPT2Tokenizer', 'pairs', AS_SET),
  ('gpt2', None, 'pairs', AS_SET),
  ('gpt_neox', None, 'pairs', AS_SET),
  ('qwen2', 'Qwen2Tokenizer', 'pairs', AS_SET),
  ('qwen3', None, 'pairs', AS_SET),
]


def write_tokenizer(folder, files, byte_level):
  """Writes the files of a tokenizer, `files` of a row of READ."""
  if files == 'model':
    from tests.data import test_published

    (folder / 'tokenizer.model').write_bytes(test_published.train(True))
    return
  content = byte_level
  if files == 'pairs of pieces':
    content = tokenizer_files.metaspace()
  elif files == 'json':
    content = with_processor(byte_level, PROCESSORS['template'])
  (folder / 'tokenizer.json').write_bytes(content)
  if files == 'pairs':
    published_folders.divide_tokenizer(folder)


def written(tmp_path, byte_level):
  """Yields a folder for each row of READ and each setting, and whether texts get a begin token."""
  for number, (model_type, name, files, begins) in enumerate(READ):
    for setting, expected in zip((None, True, False), begins, strict=True):
      folder = tmp_path / f'{number}_{setting}'
      folder.mkdir()
      write_tokenizer(folder, files, byte_level)
      settings = {'bos_token': START, 'eos_token': END, 'tokenizer_class': name}
      settings |= {'add_bos_token': setting}
      settings = {key: value for key, value in settings.items() if value is not None}
      (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
      (folder / 'config.json').write_text(json.dumps({'model_type': model_type}))
      yield folder, expected, (model_type, name, files, setting)


def test_folders_begin_texts_as_transformers_5_does(tmp_path, byte_level):
  for folder, expected, case in written(tmp_path, byte_level):
    vocabulary = published.read(folder, None)
    assert vocabulary.adds_start is expected, case
    assert vocabulary.token(vocabulary.document_start) == START, case


@pytest.mark.slow
def test_what_transformers_5_does(tmp_path, byte_level):
  """The table above is right."""
  transformers = pytest.importorskip('transformers', minversion='5.0')
  for folder, expected, case in written(tmp_path, byte_level):
    ids = transformers.AutoTokenizer.from_pretrained(folder)('a')['input_ids']
    start = 1 if case[2] in ('model', 'pairs of pieces') else 0
    assert (ids[0] == start) is expected, case


@pytest.mark.slow
def test_drawn_folders_begin_texts_as_transformers_5_does(tmp_path):
  transformers = pytest.importorskip('transformers', minversion='5.0')
  contents = tokenizer_folders.contents()
  rng = random.Random(int(os.environ.get('NGRAMMER_JAX_TEST_SEED', 0)))
  compared = 0
  for number in range(150):
    case = tokenizer_folders.draw(rng, tmp_path / str(number), contents)
    try:
      tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / str(number))
      ids = tokenizer('a')['input_ids']
      plain = tokenizer('a', add_special_tokens=False)['input_ids']
      vocabulary = published.read(tmp_path / str(number), None)
    except Exception:  # one of the two cannot read such a folder
      continue
    if max(ids) >= vocabulary.size:  # the default begin token of the class is not in the file
      continue
    count = next(i for i in range(len(ids) + 1) if ids[i : i + len(plain)] == plain)
    assert vocabulary.adds_start is (count > 0), case
    assert ids[:count][:1] in ([], [vocabulary.document_start]), case
    compared += 1
  assert compared > 100


def test_what_is_read_otherwise_is_logged(tmp_path, byte_level, caplog):
  cases = [
    ('none', True, False, 'without a begin token, although add_bos_token is True'),
    ('template', False, True, 'with a begin token, although add_bos_token is False'),
    ('two tokens', None, True, 'puts 2 tokens before a text and 0 after it'),
    ('only an end', None, False, 'puts 0 tokens before a text and 1 after it'),
    ('template', True, True, None),
    ('none', None, False, None),
  ]
  for number, (name, setting, adds_start, message) in enumerate(cases):
    folder = tmp_path / str(number)
    folder.mkdir()
    (folder / 'tokenizer.json').write_bytes(with_processor(byte_level, PROCESSORS[name]))
    (folder / 'tokenizer_config.json').write_text(json.dumps({'add_bos_token': setting}))
    caplog.clear()
    vocabulary = published.read(folder, None)
    published.read(folder, None)  # said once
    assert [message in text for text in caplog.messages] == ([] if message is None else [True])
    assert vocabulary.adds_start is adds_start


# Exports.

PAIRS, WORDS = tokenizer_files.metaspace, tokenizer_files.word_level
EXPORTED = {
  'byte pairs': (tokenizer_files.byte_level, None),
  'byte pairs, ByteLevel': (tokenizer_files.byte_level, BYTE_LEVEL),
  'byte pairs of SentencePiece': (PAIRS, None),
  'byte pairs of SentencePiece, begin token': (PAIRS, template(('<s>', 1))),
  'words': (WORDS, None),
  'words, begin and end': (WORDS, template(('<s>', 1), end=(('</s>', 2),))),
  'Unigram': (tokenizer_files.unigram, None),
  'WordPiece': (tokenizer_files.word_pieces, None),
}
CASES = [(name, adds_start) for name in EXPORTED for adds_start in (True, False)]


def export(folder, name, adds_start):
  """Exports a Llama with a tokenizer; returns its vocabulary."""
  make, processor = EXPORTED[name]
  content = make()
  if processor is not None:
    content = with_processor(content, processor)
  vocabulary = vocabularies.TokenizerVocabulary(content, adds_start=adds_start)
  size = max(vocabulary.size, published_folders.V)
  published_folders.write(folder, vocabulary_size=size, vocabulary=vocabulary, scale=0.3)
  return vocabulary


def drawn_texts():
  """20 texts of words that each of the tokenizers has."""
  rng = random.Random(0)
  words = 'a few lines of some text and more it'.split()
  return [' '.join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(20)]


@pytest.mark.parametrize(('name', 'adds_start'), CASES)
def test_an_exported_tokenizer_adds_what_the_run_reads(tmp_path, name, adds_start):
  """Also once more after it was read here; llama.cpp's converter finds the setting."""
  from tokenizers import Tokenizer

  vocabulary = export(tmp_path / 'out', name, adds_start)
  tokenizer = Tokenizer.from_file(str(tmp_path / 'out' / 'tokenizer.json'))
  again = published.read(tmp_path / 'out', None)
  for text in drawn_texts():
    expected = vocabulary.add_start(vocabulary.encode(text.encode())).tolist()
    assert tokenizer.encode(text).ids == expected
    assert again.add_start(again.encode(text.encode())).tolist() == expected
  settings = json.loads((tmp_path / 'out' / 'tokenizer_config.json').read_text())
  assert settings['add_bos_token'] is adds_start
  assert ('bos_token' in settings) == adds_start


def test_a_published_folder_keeps_its_own_files(tmp_path, byte_level, one_device):
  """Also those that say what is not followed, and a tokenizer that is not a tokenizer.json."""
  for name in ('json', 'pairs'):
    folder = tmp_path / name
    published_folders.write(folder)
    content = with_processor(byte_level, PROCESSORS['end'])
    (folder / 'tokenizer.json').write_bytes(content)
    published_folders.write_settings(folder)
    if name == 'pairs':
      settings = json.loads((folder / 'tokenizer_config.json').read_text())
      (folder / 'tokenizer_config.json').write_text(json.dumps(settings | {'add_bos_token': True}))
      published_folders.divide_tokenizer(folder)
    runs.load_run(folder).export(tmp_path / f'{name}_out', format='huggingface')
    out = {path.name: path.read_bytes() for path in (tmp_path / f'{name}_out').iterdir()}
    own = {path.name: path.read_bytes() for path in folder.iterdir()}
    for generated in ('config.json', 'model.safetensors', 'generation_config.json'):
      own.pop(generated, None)
      out.pop(generated)
    assert out == own


def test_a_gguf_file_becomes_a_folder_with_its_begin_token(tmp_path, one_device):
  pytest.importorskip('gguf')
  from tokenizers import Tokenizer

  for adds_start in (True, False):
    path, out = tmp_path / f'{adds_start}.gguf', tmp_path / str(adds_start)
    metadata = gguf_files.tokenizer(add_bos_token=adds_start)
    tensors = gguf_files.tensors()
    rows = np.ones((len(metadata['tokenizer.ggml.tokens']), gguf_files.D))
    tensors['token_embd.weight'] = gguf_files.plain(rows)
    path.write_bytes(gguf_files.content(gguf_files.metadata(**metadata), tensors))
    runs.load_run(path).export(out, format='huggingface')
    ids = Tokenizer.from_file(str(out / 'tokenizer.json')).encode('a few').ids
    assert (ids[0] == 0) is adds_start


def test_an_export_whose_words_transformers_cuts_otherwise_warns(tmp_path, caplog):
  """Transformers 5 has rules of its own for all tokenizers of Qwen 2."""
  qwen = published.from_gguf(gguf_files.tokenizer('qwen2'), None)
  gpt2 = vocabularies.TokenizerVocabulary(tokenizer_files.byte_level())
  unigram = vocabularies.TokenizerVocabulary(tokenizer_files.unigram())
  cases = [(qwen, 'qwen2', 0), (gpt2, 'qwen2', 1), (unigram, 'qwen2', 1), (gpt2, 'llama', 0)]
  for number, (vocabulary, family, warnings) in enumerate(cases):
    caplog.clear()
    options = {'attention': {'query_key_value_bias': family == 'qwen2'}}
    published_folders.write(tmp_path / str(number), vocabulary=vocabulary, **options)
    config = json.loads((tmp_path / str(number) / 'config.json').read_text())
    assert config['model_type'] == family
    assert len(caplog.messages) == warnings
    assert all('transformers 5 cuts into words like Qwen 2' in text for text in caplog.messages)


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'adds_start'), CASES)
def test_transformers_scores_texts_of_an_export_alike(tmp_path, name, adds_start, one_device):
  transformers = pytest.importorskip('transformers', minversion='5.0')
  torch = pytest.importorskip('torch')
  export(tmp_path / 'out', name, adds_start)
  run = runs.load_run(tmp_path / 'out')
  tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / 'out')
  model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out', dtype=torch.float32)
  texts = [text for text in drawn_texts() if len(tokenizer(text)['input_ids']) > 1]
  for text, score in zip(texts, run.score(texts), strict=True):
    ids = torch.tensor([tokenizer(text)['input_ids']])
    with torch.no_grad():
      logits = model.eval()(ids).logits[0, :-1].log_softmax(-1)
    expected = -logits.gather(1, ids[0, 1:, None])[:, 0].numpy()
    np.testing.assert_allclose(score.nats, expected, rtol=0, atol=1e-4)


def test_a_resumed_run_begins_texts_as_before(tmp_path, byte_level, tiny, monkeypatch):
  """Its folder is read otherwise now; with another tokenizer the stored one is not used."""
  folder, workdir = tmp_path / 'model', tmp_path / 'run'
  folder.mkdir()
  workdir.mkdir()
  (folder / 'tokenizer.json').write_bytes(byte_level)
  vocabularies.TokenizerVocabulary(byte_level, document_start=0, adds_start=True).save(workdir)
  data = dataclasses.replace(tiny().data, vocabulary='tokenizer', vocabulary_path=str(folder))
  monkeypatch.setattr(train_task.reader, 'steps', lambda workdir: [1])
  assert not published.read(folder, None).adds_start
  assert train_task._vocabulary_before(data, workdir).adds_start
  (folder / 'tokenizer.json').write_bytes(with_processor(byte_level, BYTE_LEVEL))
  assert train_task._vocabulary_before(data, workdir) is None
