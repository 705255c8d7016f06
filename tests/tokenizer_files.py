"""Small Hugging Face tokenizers, made by their own library: the content of a tokenizer.json."""

from ngrammer_jax.data.vocabularies import tokenizer_json

TEXT = 'a few lines of some text, and more of it\n' * 9
END = '<|endoftext|>'


def byte_level(text=TEXT, size=280, special=(END,), change=lambda tokenizer: None):
  """Byte pairs, as in GPT-2. `change` may change the tokenizer before it is written."""
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=size,
    special_tokens=list(special),
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator([text], trainer)
  change(tokenizer)
  return tokenizer.to_str().encode()


def unigram():
  """Pieces with their scores, as in T5: the end of a sentence is a piece, and one is unknown."""
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

  pieces = ['<pad>', '</s>', '<unk>', '\u2581', *'abc/<>s', '\u2581ab']
  scores = [0.0, 0.0, 0.0, *[-2.0] * 8, -1.0]
  tokenizer = Tokenizer(models.Unigram(list(zip(pieces, scores, strict=True)), unk_id=2))
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
  tokenizer.decoder = decoders.Metaspace()
  tokenizer.add_special_tokens(['<pad>', '</s>', '<unk>'])
  tokenizer.post_processor = processors.TemplateProcessing(
    single='$A </s>', special_tokens=[('</s>', 1)]
  )
  return tokenizer.to_str().encode()


def metaspace(text=TEXT):
  """Pieces of SentencePiece with a space before a text, and bytes: ASCII letters, <s> and </s>."""
  letters = sorted(set(filter(str.isascii, text.replace(' ', '\u2581'))) | {'\u2581'})
  tokens = ['<unk>', '<s>', '</s>', *(f'<0x{byte:02X}>' for byte in range(256)), *letters]
  control = [tokenizer_json.UNKNOWN, tokenizer_json.CONTROL, tokenizer_json.CONTROL]
  types = [*control, *[tokenizer_json.BYTE] * 256, *[tokenizer_json.NORMAL] * len(letters)]
  scores = [0.0] * len(tokens)
  prefix = tokenizer_json.SENTENCEPIECE
  return tokenizer_json.from_pieces(tokens, scores, types, prefix, charsmap=b'', added={})


def word_level():
  """Words, one of which is unknown, as they stand between spaces."""
  from tokenizers import Tokenizer, models, pre_tokenizers

  words = ['<unk>', '<s>', '</s>', *dict.fromkeys(TEXT.replace(',', '').split())]
  tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token='<unk>'))
  tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  tokenizer.add_special_tokens(['<unk>', '<s>', '</s>'])
  return tokenizer.to_str().encode()


def word_pieces():
  """Pieces of words, as in BERT: [CLS] is put before a text, and [SEP] after it."""
  from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

  pieces = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', 'few', 'line', '##s', 'some', 'te', '##xt', ',']
  pieces += [*'abcdefghijklmnopqrstuvwxyz', *(f'##{c}' for c in 'abcdefghijklmnopqrtuvwxyz')]
  model = models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token='[UNK]')
  tokenizer = Tokenizer(model)
  tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  tokenizer.decoder = decoders.WordPiece()
  tokenizer.add_special_tokens(['[PAD]', '[UNK]', '[CLS]', '[SEP]'])
  tokenizer.post_processor = processors.BertProcessing(('[SEP]', 3), ('[CLS]', 2))
  return tokenizer.to_str().encode()
