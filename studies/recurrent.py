"""Attention LSTMs on WikiText-2, with two changes towards the order of the paper.

  python -m ngrammer_jax.train --config=studies/recurrent.py:key_value_predict_5 \
    --config.data.path=/path/to/wikitext2 --workdir=runs/key_value_predict

The small variants of configs/attention_lstm.py have outputs of 68 to 97 units and see half of the
text, where the paper has 242 to 296 units and several epochs. A suffix changes one of the two:

  long  four times the steps: two epochs
  wide  the LSTM has three times the parameters, and its outputs are wider accordingly
"""

from configs import attention_lstm
from ngrammer_jax import config

READOUTS = ('lstm', 'attention_10', 'key_value_10', 'key_value_predict_5', '4gram')
CHANGES = ('long', 'wide')
PILOT = ('lstm', 'attention_10', 'key_value_predict_5')
VARIANTS = {
  **{readout: (readout, '') for readout in READOUTS},
  **{f'{readout}_{change}': (readout, change) for change in CHANGES for readout in PILOT},
}
LEARNING_RATE = 0.01
WIDE_BUDGET = 3 * attention_lstm.SMALL['wikitext2'][3]  # parameters without the embedding


def get_config(variant: str = 'key_value_predict_5'):
  """Returns the config of one of VARIANTS."""
  config.check_variant(variant, VARIANTS)
  readout, change = VARIANTS[variant]
  c = attention_lstm.get_config(f'wikitext2_{readout}')
  if change == 'long':
    c.training.steps *= 4
  elif change == 'wide':
    recurrent = config.resolve(c).model.recurrent
    matched = recurrent.matched(WIDE_BUDGET, c.model.width, c.data.vocabulary_size)
    c.model.recurrent.hidden = matched.hidden
  return c
