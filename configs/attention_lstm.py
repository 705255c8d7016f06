"""Attention LSTMs and N-gram RNNs (Daniluk et al. 2017, arXiv 1702.04521).

  python -m ngrammer_jax.train --config=configs/attention_lstm.py:key_value_predict \\
    --config.data.path=/path/to/text --workdir=runs/key_value_predict

Variants of Tables 2a to 2c: hidden size, number of parameters without the embeddings of 77,000
words (23,100,000), and the published test perplexity on the Wikipedia corpus of the paper:

  rnn                         307   23,902,656  125.7
  lstm                        300   23,898,200   85.2
  recurrent_memory            300   70,642,700   80.1   RM(+tM-g), 15 words
  attention                   296   23,926,608   82.0   window 10
  key_value                   560   23,879,520   78.2   window 10
  key_value_predict           786   23,943,366          window 5, same rule as the others
  key_value_predict_printed   834   25,578,774   75.8   as printed, which is not 23.9M
  2gram                       564   23,901,488   77.1
  3gram                       786   23,874,460   75.9
  4gram                       968   23,858,824   75.9
  5gram                      1120   23,941,960   77.3

A suffix sets another window, as in Table 2a: recurrent_memory_1, attention_15, ... Published for
windows of 1, 5, 10 and 15: recurrent_memory 83.5 80.5 80.3 80.1, attention 82.2 82.2 82.0 82.8,
key_value 78.7 79.0 78.2 78.9, key_value_predict 76.1 75.8 76.0 75.8. The HORNNs of the table are
not included, because the paper has no equations for them.

The attention window ends at the segment boundary, every 20 tokens, as the authors stated for their
runs; --config.model.recurrent.carry_memory=True carries it across segments. Their corpus (7,500
articles, 22.5M training words) is not available; these variants use `text` and its 77,000 most
frequent words. The paper reports neither the number of steps nor a learning rate decay; the values
here are our own. None of these has been trained with this code.

Small variants for 2 CPU cores, with equal numbers of parameters, on WikiText-2 with 10,000 words
and on the raw books of the Children's Book Test: wikitext2_VARIANT and cbt_VARIANT. Test perplexity
on WikiText-2, mean and standard error of seeds 0 to 2 (docs/attention_lstm.md):

  wikitext2_lstm                  125.3 +- 0.5
  wikitext2_attention_10          114.3 +- 0.4
  wikitext2_key_value_10          120.9 +- 0.9
  wikitext2_key_value_predict_5   122.8 +- 0.8
  wikitext2_4gram                 127.2 +- 1.3
"""

from ml_collections import ConfigDict

from ngrammer_jax import config, errors

# Readout, hidden size in the paper, window or number of slices.
READOUTS = {
  'rnn': ('none', 307, None),
  'lstm': ('none', 300, None),
  'recurrent_memory': ('recurrent_memory', 300, 15),
  'attention': ('attention', 296, 10),
  'key_value': ('key_value', 560, 10),
  'key_value_predict': ('key_value_predict', 786, 5),
  'key_value_predict_printed': ('key_value_predict', 834, 5),
  '2gram': ('ngram', 564, 2),
  '3gram': ('ngram', 786, 3),
  '4gram': ('ngram', 968, 4),
  '5gram': ('ngram', 1120, 5),
}
# Corpus, vocabulary size, embedding width, parameters without the embedding, steps.
SMALL = {
  'wikitext2': ('wikitext_articles', 10_000, 64, 1_076_000, 780),
  'cbt': ('cbt', 10_000, 64, 1_076_000, 780),
}

SMALL_NAMES = [name for name in READOUTS if not name.endswith('_printed')]
VARIANTS = (*READOUTS, *(f'{corpus}_{name}' for corpus in SMALL for name in SMALL_NAMES))


def get_config(variant: str = 'key_value_predict') -> ConfigDict:
  """Returns the config of [CORPUS_]NAME[_WINDOW]: a key of SMALL, a key of READOUTS, a window."""
  corpus, _, rest = variant.partition('_')
  name, window = _split_window(rest if corpus in SMALL else variant)
  if name not in READOUTS or (corpus in SMALL and name.endswith('_printed')):
    raise errors.BadInput(
      f'no variant {variant!r}; available: {", ".join(READOUTS)}; with a window, such as '
      f'key_value_10; small, such as wikitext2_lstm and cbt_attention_5'
    )
  readout, hidden, size = READOUTS[name]
  c = config.default()
  m = c.model
  t = c.training
  r = config.block('model.recurrent', readout=readout, hidden=hidden)
  m.recurrent = r
  if name == 'rnn':
    r.cell = 'rnn'
  if readout == 'ngram':
    r.slices = size
  elif size is not None:
    r.window = size if window is None else window
  m.width = 300
  m.vocabulary_chunk = 7_700
  m.tie_embeddings = False
  m.scale_embeddings = False

  c.data.corpus = 'text'
  c.data.vocabulary = 'words'
  c.data.vocabulary_size = 77_000

  c.optimizer.adam = config.block('optimizer.adam', beta2=0.999)
  c.optimizer.epsilon = 1e-8
  c.optimizer.learning_rate = 1e-3
  c.optimizer.schedule = 'constant'
  c.optimizer.warmup_steps = 0
  c.optimizer.clip_norm = 5.0

  t.batch_size = 64
  t.segment_length = 20
  t.steps = 175_000  # ten epochs of 22.5M words
  t.segments_per_call = 50
  t.log_every = 50
  t.evaluate_every = 5000
  t.checkpoint_every = 5000
  c.evaluation.streams = 64
  if corpus in SMALL:
    _use_small(c, corpus)
  return c


def _split_window(variant: str) -> tuple[str, int | None]:
  """Returns the name and the window of a variant; None if it names no window."""
  name, _, last = variant.rpartition('_')
  has_window = name in READOUTS and READOUTS[name][0] not in ('none', 'ngram')
  if has_window and last.isdecimal():
    return name, int(last)
  return variant, None


def _use_small(c: ConfigDict, corpus: str) -> None:
  """Changes a config to the small variant, with the parameters of an LSTM of 100 units."""
  m = c.model.recurrent
  name, words, width, budget, steps = SMALL[corpus]
  c.model.vocabulary_chunk = None
  c.model.width = width
  c.data.corpus = name
  c.data.vocabulary_size = words
  c.training.steps = steps
  # With the range of the paper, [-0.1, 0.1] for 300 units, the small readouts learn only word
  # frequencies in 240 steps. The range and the learning rate were selected by the loss after these.
  m.initial = 0.3
  c.optimizer.learning_rate = 1e-2
  c.optimizer.schedule = 'cosine'
  c.optimizer.warmup_steps = 20
  c.training.segments_per_call = 10
  c.training.log_every = 10
  c.training.evaluate_every = 390
  c.training.checkpoint_every = 390
  recurrent = config.resolve(c).model.recurrent
  m.hidden = recurrent.matched(budget, width, words).hidden
