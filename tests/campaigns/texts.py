"""Draws texts, tokenizers and stop strings, and checks the way to ids and back.

  python -m tests.campaigns.texts --inputs=200 --seed=0

Each input is a small tokenizer of one of five kinds, a text that may spell its special tokens, in
whole or in part, and stop strings. The ids are compared with those of the tokenizers library, and
the text before a stop string with a loop over all tokens. Each failure prints its seed. The exit
status is 1 if there is any.
"""

from collections.abc import Callable
import random

import tokenizers

from ngrammer_jax.data import vocabularies
from ngrammer_jax.inference import detokenizer, encoding, sampling, text
from tests import tokenizer_files
from tests.campaigns import drawn_inputs

WORDS = ['a', 'few', ' lines', 'of', '\n', '  ', 'é', '日本', '\N{SNOWMAN}', 'x', '<', '|>', '']
SPECIAL = (tokenizer_files.END, '<|im_start|>', '<|im_end|>', '<s>')


def byte_level(rng: random.Random) -> vocabularies.Vocabulary:
  """Byte pairs over bytes with some special tokens, in any order."""
  special = [tokenizer_files.END, *rng.sample(SPECIAL[1:], rng.randint(0, 3))]
  rng.shuffle(special)
  content = tokenizer_files.byte_level(special=special)
  adds_start = rng.random() < 0.5
  return vocabularies.TokenizerVocabulary(content, adds_start=adds_start)


def metaspace(rng: random.Random) -> vocabularies.Vocabulary:
  """Pieces of SentencePiece with a space before a text, and bytes."""
  return vocabularies.TokenizerVocabulary(tokenizer_files.metaspace())


def word_level(rng: random.Random) -> vocabularies.Vocabulary:
  """Words and white space, with an unknown word."""
  names = ['[UNK]', '<s>', '</s>', 'a', 'few', 'lines', 'of', 'x']
  model = tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, '[UNK]')
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  tokenizer.add_special_tokens(['[UNK]', '<s>', '</s>'][rng.randint(0, 1) :])
  return vocabularies.TokenizerVocabulary(tokenizer.to_str().encode())


def sentencepiece(rng: random.Random) -> vocabularies.Vocabulary:
  """A learned SentencePiece vocabulary, whose control token is <s>."""
  return vocabularies.learn_sentencepiece([b'a few lines of some text, and more\n' * 9], 290)


def byte_values(rng: random.Random) -> vocabularies.Vocabulary:
  """No special tokens."""
  return vocabularies.ByteVocabulary()


KINDS: list[Callable[[random.Random], vocabularies.Vocabulary]] = [
  byte_level,
  metaspace,
  word_level,
  sentencepiece,
  byte_values,
]


def draw_text(rng: random.Random, vocabulary: vocabularies.Vocabulary) -> str:
  """Returns words, special tokens and parts of special tokens."""
  parts = []
  for _ in range(rng.randint(0, 12)):
    part = rng.choice([*WORDS, *SPECIAL, *vocabulary.special_tokens])
    if rng.random() < 0.2:
      part = part[: rng.randint(0, len(part))]
    parts.append(part)
  return rng.choice(['', ' ']).join(parts)


def check_ids(rng: random.Random, vocabulary: vocabularies.Vocabulary) -> None:
  """Compares the ids of a text with the tokenizers library."""
  drawn = draw_text(rng, vocabulary)
  ordinary = encoding.encode(vocabulary, drawn, 'text', special=False).ids
  special = encoding.encode(vocabulary, drawn, 'text', special=True).ids
  special_ids = set()
  for name in vocabulary.special_tokens:
    (special_id,) = vocabulary.encode(name.encode(), special=True).tolist()
    special_ids.add(special_id)
  assert not set(ordinary.tolist()) & (special_ids - {vocabulary.unknown}), drawn
  if not any(name in drawn for name in vocabulary.special_tokens):
    assert ordinary.tolist() == special.tolist(), drawn
  if isinstance(vocabulary, vocabularies.TokenizerVocabulary):
    library = tokenizers.Tokenizer.from_buffer(vocabulary.content)
    expected = library.encode(drawn, add_special_tokens=False).ids
    assert special.tolist() == expected, drawn
  # A text that is read twice, by its ids and by its spelling, is one prompt.
  config = text.CompletionConfig(sampling.SamplingConfig(), tokens=1, seed=0, context=1000)
  prompt = text.encode_prompt(vocabulary, drawn, 'text', config, special=True)
  again = text.encode_prompt(vocabulary, prompt.ids, 'text', config, special=False)
  assert prompt.ids.tolist() == again.ids.tolist() == again.text, drawn
  start = vocabulary.document_start
  begins = len(special) > 0 and special[0] == start and bool(special_ids)
  is_added = not len(special) or (vocabulary.adds_start and not begins)
  assert prompt.ids.tolist() == [start] * is_added + special.tolist(), drawn


def check_stop(rng: random.Random, vocabulary: vocabularies.Vocabulary) -> None:
  """Compares the text before a stop string with the text of all first tokens, one by one."""
  prompt = vocabulary.encode(draw_text(rng, vocabulary).encode(), special=True).tolist()
  ids = vocabulary.encode(draw_text(rng, vocabulary).encode(), special=True).tolist()
  stop = tuple(filter(None, (draw_text(rng, vocabulary)[:9] for _ in range(rng.randint(1, 3)))))
  stream = detokenizer.IncrementalDetokenizer(vocabulary, prompt, 100, stop)
  emitted = ''
  for i in ids:
    emitted += stream.add(i)
    assert emitted == stream.text, (prompt, ids, stop)
    if stream.is_done:
      break

  def show(tokens: list[int], special: bool) -> str:
    decode = lambda some: vocabulary.decode(some, special).decode('utf-8', 'replace')
    return decode([*prompt, *tokens])[len(decode(prompt)) :]

  special_stop = [s for s in stop if any(name in s for name in vocabulary.special_tokens)]
  has_ended = is_stopped = False
  plain = shown = ''
  for n in range(1, len(ids) + 1):
    has_ended = ids[n - 1] in vocabulary.end_tokens
    plain = show(ids[: n - has_ended], False)
    shown = show(ids[:n], True)
    is_stopped = any(s in plain for s in stop) or any(s in shown for s in special_stop)
    if has_ended or is_stopped:
      break
  assert stream.is_done == (has_ended or is_stopped), (ids, stop)
  # Some vocabularies have a space before a special token.
  assert plain.startswith((emitted, emitted.rstrip())), (ids, stop)
  if is_stopped:
    assert not any(s in emitted for s in stop), (ids, stop)


def check(seed: int) -> None:
  """Draws one input and checks it."""
  make_vocabulary = KINDS[seed % len(KINDS)]
  for check_one in (check_ids, check_stop):
    rng = random.Random(seed)
    check_one(rng, make_vocabulary(rng))


if __name__ == '__main__':
  drawn_inputs.run(__doc__, check, inputs=200)
