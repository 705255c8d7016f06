"""Attention LSTMs and N-gram RNNs (Daniluk et al. 2017, arXiv 1702.04521).

  python -m ngrammer_jax.train --config=configs/attention_lstm.py:key_value_predict \\
    --config.data.path=/path/to/text --workdir=runs/key_value_predict

Rows of Tables 2a to 2c, hidden sizes and numbers of parameters without the embeddings of 77,000
words (23,100,000 more), and the perplexity that the paper reports on its Wikipedia corpus, test:

  rnn                         307   23,902,656  125.7
  lstm                        300   23,898,200   85.2
  recurrent_memory            300   70,642,700   80.1   RM(+tM-g), 15 words
  attention                   296   23,926,608   82.0   window 10
  key_value                   560   23,879,520   78.2   window 10
  key_value_predict           786   23,943,366          window 5, by the rule of the other rows
  key_value_predict_printed   834   25,578,774   75.8   as the paper prints it: 23.9M it is not
  2gram                       564   23,901,488   77.1
  3gram                       786   23,874,460   75.9
  4gram                       968   23,858,824   75.9
  5gram                      1120   23,941,960   77.3

A window can be named with the row, as in Table 2a: recurrent_memory_1, attention_15, ... Reported
for windows of 1, 5, 10 and 15: recurrent_memory 83.5 80.5 80.3 80.1, attention 82.2 82.2 82.0
82.8, key_value 78.7 79.0 78.2 78.9, key_value_predict 76.1 75.8 76.0 75.8. The rows of HORNNs,
other people's models, are not here: the paper has no equations for them.

What attention looks back at ends with a segment of 20 tokens, as the authors have said of their
runs: --config.model.recurrent.carry_memory=True keeps it. Their corpus (7,500 articles, 22.5M words
of training) is not to be had; here it is `text`, and the vocabulary its 77,000 most frequent words.
Neither steps nor a decay of the rate are reported: both are ours. Nothing of this was trained here.

Twins for 2 CPU cores, of equal numbers of parameters, on WikiText-2 with 10,000 words and on the
raw books of the Children's Book Test: wikitext2_ROW and cbt_ROW. Perplexity on WikiText-2, test,
mean and standard error of seeds 0 to 2 (docs/attention_lstm.md):

  wikitext2_lstm                  125.3 +- 0.5
  wikitext2_attention_10          114.3 +- 0.4
  wikitext2_key_value_10          120.9 +- 0.9
  wikitext2_key_value_predict_5   122.8 +- 0.8
  wikitext2_4gram                 127.2 +- 1.3
"""

from ngrammer_jax import config, errors

# Readout, hidden size of the paper, window or slices.
ROWS = {
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
# Corpus, its words, width of the embedding, parameters without it, steps.
SMALL = {
  'wikitext2': ('wikitext_articles', 10_000, 64, 1_076_000, 780),
  'cbt': ('cbt', 10_000, 64, 1_076_000, 780),
}


def get_config(row: str = 'key_value_predict'):
  """One of ROWS, of a window; or its small twin on one of SMALL."""
  corpus, _, rest = row.partition('_')
  name, window = _named(rest if corpus in SMALL else row)
  if name not in ROWS or (corpus in SMALL and name.endswith('_printed')):
    raise errors.BadInput(
      f'no row {row!r}; there are: {", ".join(ROWS)}; windows of all attention and of '
      f'recurrent_memory, as in key_value_10; small twins, as in wikitext2_lstm and cbt_attention_5'
    )
  readout, hidden, size = ROWS[name]
  c = config.default()
  m, t = c.model, c.training
  m.recurrent = r = config.block('model.recurrent', readout=readout, hidden=hidden)
  if name == 'rnn':
    r.cell = 'rnn'
  if readout == 'ngram':
    r.slices = size
  elif size is not None:
    r.window = size if window is None else window
  m.width = 300
  m.vocabulary_chunk = 7_700
  m.tie_embeddings = m.scale_embeddings = False

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
  t.evaluate_every = t.checkpoint_every = 5000
  c.evaluation.streams = 64
  if corpus in SMALL:
    _small(c, corpus)
  return c


def _named(row):
  """A row, and the window that is named with it."""
  name, _, last = row.rpartition('_')
  of_windows = {key for key, (readout, *_) in ROWS.items() if readout not in ('none', 'ngram')}
  return (name, int(last)) if name in of_windows and last.isdecimal() else (row, None)


def _small(c, corpus):
  """The same for 2 CPU cores, of as many parameters as an LSTM of 100 units has there."""
  m = c.model.recurrent
  c.model.vocabulary_chunk = None
  c.data.corpus, words, c.model.width, budget, c.training.steps = SMALL[corpus]
  c.data.vocabulary_size = words
  # From [-0.1, 0.1], which is for layers of 300 units, the readouts here learn no more than the
  # frequencies of words in their first 240 steps; range and rate are found with those steps.
  m.initial = 0.3
  c.optimizer.learning_rate = 1e-2
  c.optimizer.schedule = 'cosine'
  c.optimizer.warmup_steps = 20
  c.training.segments_per_call = 10
  c.training.log_every = 10
  c.training.evaluate_every = c.training.checkpoint_every = 390
  read = config.resolve(c).model.recurrent
  m.hidden = read.matched(budget, c.model.width, words).hidden
