"""The page of a pretrained model, MODEL_CARD.md, written from its model.json alone."""

from collections.abc import Mapping
import textwrap
from typing import Any, NamedTuple


class Source(NamedTuple):
  """The text that a model was trained on.

  Attributes:
    text: what it is, and its splits.
    address: where it is from.
    licence: licence of the text.
    limits: what follows for a model of this text.
  """

  text: str
  address: str
  licence: str
  limits: str


WIKIPEDIA = dict(
  address='http://mattmahoney.net/dc/textdata.html',
  licence='that of Wikipedia: CC BY-SA 3.0 and GFDL',
)
SOURCES = {
  'sotu': Source(
    'State of the Union addresses of U.S. presidents since 1790, in whole addresses: every 20th is '
    'for validation, every 20th for test',
    'https://github.com/DH-Oz/sotu (texts of the American Presidency Project)',
    'the addresses are works of the U.S. government in the public domain; the package: MIT',
    'It writes as presidents spoke, mostly those of the 19th century, with their views.',
  ),
  'enwik8': Source(
    'the first 100 MB of a dump of the English Wikipedia of 2006, with its markup: 90 MB for '
    'training, 5 MB each for validation and test',
    **WIKIPEDIA,
    limits='It writes wiki markup, and statements that look like facts but are not.',
  ),
  'text8': Source(
    'the first 100 MB of the cleaned text of the English Wikipedia of 2006: 90 MB for training, '
    '5 MB each for validation and test',
    **WIKIPEDIA,
    limits='It knows the 26 letters and the space: a prompt with other characters is refused.',
  ),
}
LIMITS = (
  'A small model, trained to compare architectures. It continues texts of the kind that it was '
  'trained on for some words, knows no facts and follows no instructions. Its training text was '
  'not filtered: what it writes may be wrong or offensive.'
)


def format_card(model: Mapping[str, Any]) -> str:
  """Formats the page of a model.

  Args:
    model: the content of its model.json, see `ship_model.describe`.
  """
  name = model['name']
  source = SOURCES[model['corpus']]
  path = '' if model['corpus'] == 'sotu' else ' --config.data.path=/path/to/text'
  samples = '\n\n'.join(
    f"`--prompt='' --tokens={model['sample_tokens']} --seed={seed}`\n\n"
    f'{textwrap.indent(sample, "    ", lambda line: True)}'
    for seed, sample in enumerate(model['samples'])
  )
  return f"""# {name}

{model['description']}

```
python -m ngrammer_jax.generate --pretrained={name} --prompt=''
python -m ngrammer_jax.evaluate --pretrained={name} --split=test{path}
```

{_sizes(model, source)}

## Results

The whole test split. Parameters are in bfloat16, as in this folder; the Transformer's in float32.

{_results(model)}

## Limits

{LIMITS} {source.limits} Each token is predicted from at most {model['context']:,} tokens.

## Samples

The first {len(model['samples'])}, not chosen.

{samples}
"""


def _sizes(model: Mapping[str, Any], source: Source) -> str:
  training = model['training']
  vocabulary = model['vocabulary']
  rows = {
    'text': source.text,
    'from': source.address,
    'licence of the text': source.licence,
    'vocabulary': f'{vocabulary["size"]:,} token ids, {vocabulary["kind"]}',
    'model': model['architecture'],
    'parameters': f'{model["parameters"]:,}',
    'file': f'{model["bytes"]:,} bytes, bfloat16',
    'training': (
      f'{training["steps"]:,} steps, {training["tokens"]:,} tokens, {training["hours"]:.1f} hours '
      f'on {training["hardware"]}'
    ),
    'command': f'`{training["command"]}`',
  }
  return '\n'.join(['| | |', '|---|---|', *(f'| {key} | {text} |' for key, text in rows.items())])


def _results(model: Mapping[str, Any]) -> str:
  columns = 'parameters', 'bits per byte', 'nats per token', 'perplexity', 'top-1 accuracy'
  lines = [f'| | {" | ".join(columns)} |', '|---' * (1 + len(columns)) + '|']
  baseline = model['baseline']
  names = {
    model['name']: (model['parameters'], model['test']),
    f'Transformer, {baseline["tokens"]:,} training tokens': (
      baseline['parameters'],
      baseline['test'],
    ),
  }
  for name, (parameters, test) in names.items():
    scores = (
      f'{test["bits_per_byte"]:.4f}',
      f'{test["nll_nats_per_token"]:.4f}',
      f'{test["perplexity"]:.3f}',
      f'{test["top1_accuracy"]:.2%}',
    )
    lines.append(f'| {name} | {parameters:,} | {" | ".join(scores)} |')
  return '\n'.join(lines)
