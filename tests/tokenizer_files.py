"""Small Hugging Face tokenizers, made by their own library: the content of a tokenizer.json."""

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
