"""Makes a run a pretrained model of the package: a folder with its name in ngrammer_jax/weights.

  python -m studies.ship_model --name=NAME --workdir=DIR --baseline=DIR --description=TEXT \
    --hardware=TEXT --command='--config=studies/FILE.py:VARIANT --config.KEY=VALUE'

The parameters become bfloat16. The shipped model is evaluated, sampled and compared with the
baseline: a Transformer with the same vocabulary, parameters and training tokens. Paths of this
machine are removed. An unsuitable run is refused, and leaves no files.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import shlex
import tempfile
from typing import Any

from ngrammer_jax import command_line, errors, flags, runs
from ngrammer_jax import config as experiment
from ngrammer_jax.checkpoints import workdirs
from ngrammer_jax.config import data, fields
from ngrammer_jax.models import model_variables
from ngrammer_jax.runs import pretrained
from ngrammer_jax.training.records import goodput
from studies import model_card

MAX_BYTES = 12_000_000  # of all models together
MAX_PARAMETER_DIFFERENCE = 0.01  # between a model and its baseline
MAX_LOSS_RATIO = 1.03  # bits per byte, over that of the baseline
NUM_SAMPLES = 5
SAMPLE_TOKENS = 100
# Optional blocks of a model that its description names.
NAMED_BLOCKS = (
  'ngram',
  'ngram_memories',
  'memory',
  'span',
  'persistent',
  'convolution',
  'adaptive_softmax',
)
# Keys of the data that may differ on another machine.
PATH_KEYS = [key.path for key in fields.keys(data.DataConfig).values() if key.free_on_resume]


def main(argv: list[str]) -> int:
  """Writes the folder, or says why the run cannot be shipped."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--name', required=True, help='name of the model: a-z, 0-9 and _')
  parser.add_argument('--workdir', required=True, help='the run')
  parser.add_argument('--baseline', required=True, help='the run of the Transformer')
  parser.add_argument('--description', required=True, help='the model in one line')
  parser.add_argument('--hardware', required=True, help='hardware of the training')
  parser.add_argument('--command', required=True, help='flags of the training')
  options = parser.parse_args(argv)
  check_name(options.name)
  run = runs.load_run(options.workdir)
  baseline = runs.load_run(options.baseline)
  check_run(run)
  check_command(run.config, options.command)
  check_baseline(run, baseline)
  pretrained.FOLDER.mkdir(exist_ok=True)
  with tempfile.TemporaryDirectory(prefix='.', dir=pretrained.FOLDER) as scratch:
    folder = pathlib.Path(scratch) / options.name
    exported = export(run, folder)
    texts = {
      'name': options.name,
      'description': options.description,
      'command': f'python -m ngrammer_jax.train {options.command}',
      'hardware': options.hardware,
    }
    model = describe(run, exported, baseline, texts)
    check_loss(model)
    write_description(model, folder)
    check_bytes(folder)
    folder.rename(pretrained.FOLDER / options.name)
  print(f'wrote {pretrained.FOLDER / options.name}')
  return 0


def check_name(name: str) -> None:
  """Raises BadInput for an invalid or a used name."""
  if not re.fullmatch('[a-z][a-z0-9_]*', name):
    raise errors.BadInput(f'--name={name}: expected a-z, 0-9 and _')
  if (pretrained.FOLDER / name).exists():
    raise errors.BadInput(f'--name={name} exists: delete {pretrained.FOLDER / name} first')


def check_run(run: runs.Run) -> None:
  """Raises BadInput unless a run is a finished language model of a text with a known licence."""
  config = run.config
  if config.finetune is not None:
    raise errors.BadInput(f'{run.workdir} is fine-tuned: a pretrained model is a language model')
  if config.data.corpus not in model_card.SOURCES:
    raise errors.BadInput(
      f'{run.workdir} was trained on data.corpus={config.data.corpus!r}, whose licence is unknown: '
      f'expected one of {", ".join(model_card.SOURCES)}'
    )
  for key, value in {
    'data.vocabulary_path': config.data.vocabulary_path,
    'init_from': config.init_from,
  }.items():
    if value is not None:
      raise errors.BadInput(f'{run.workdir} has {key}={value}, whose licence is unknown')
  if run.restored.step != config.training.steps:
    raise errors.BadInput(
      f'{run.workdir} has {run.restored.step} of {config.training.steps} steps: train it to the end'
    )


def describe_model(config: experiment.ModelConfig) -> str:
  """Describes a model in one line: its size and its optional blocks."""
  model = f'{config.layers} layers of width {config.width}'
  if config.recurrent is not None:
    recurrent = config.recurrent
    model = f'{recurrent.cell} of {recurrent.hidden}, readout {recurrent.readout}'
  used = [name.replace('_', ' ') for name in NAMED_BLOCKS if getattr(config, name)]
  return ', '.join([model, *used])


def check_command(config: experiment.Config, command: str) -> None:
  """Raises BadInput if a run with this config was not trained by the command."""
  for key, old, new in experiment.differences(config, resolve_command(command)):
    raise errors.BadInput(
      f'--command={command} trains with {key.path}={new!r}, the run has {old!r}'
    )


def resolve_command(command: str) -> experiment.Config:
  """Returns the config that a command trains. Raises BadInput if it has other flags."""
  overrides, plain = command_line.split(shlex.split(command))
  if len(plain) != 1 or not plain[0].startswith('--config='):
    raise errors.BadInput(f'--command={command}: expected --config=FILE and --config.KEY=VALUE')
  return command_line.resolve(plain[0].removeprefix('--config='), overrides)


def check_baseline(run: runs.Run, baseline: runs.Run) -> None:
  """Raises BadInput unless the baseline is a Transformer of the same size, text and tokens."""
  model = baseline.config.model
  blocks = [name for name in (*NAMED_BLOCKS, 'recurrent') if getattr(model, name)]
  if blocks:
    raise errors.BadInput(f'--baseline={baseline.workdir} has {blocks[0]}: it is no baseline')
  if _content_hash(run) != _content_hash(baseline):
    raise errors.BadInput(f'--baseline={baseline.workdir} was trained on another text')
  tokens = _tokens(baseline)
  expected_tokens = _tokens(run)
  if tokens != expected_tokens:
    raise errors.BadInput(
      f'--baseline={baseline.workdir} was trained on {tokens:,} tokens, expected '
      f'{expected_tokens:,}'
    )
  parameters = _parameters(baseline)
  expected = _parameters(run)
  if abs(parameters - expected) > MAX_PARAMETER_DIFFERENCE * expected:
    raise errors.BadInput(
      f'--baseline={baseline.workdir} has {parameters:,} parameters, expected {expected:,} within '
      f'{MAX_PARAMETER_DIFFERENCE:.0%}'
    )


def export(run: runs.Run, folder: pathlib.Path) -> runs.Run:
  """Exports a run in bfloat16 without the paths of this machine; returns it, with the paths."""
  run.export(folder, 'bfloat16')
  without_paths = dataclasses.replace(run.config.data, **dict.fromkeys(PATH_KEYS))
  config = dataclasses.replace(run.config, data=without_paths)
  experiment.save(config, folder / workdirs.CONFIG)
  return dataclasses.replace(runs.load_run(folder), config=run.config)


def describe(
  run: runs.Run, exported: runs.Run, baseline: runs.Run, texts: dict[str, str]
) -> dict[str, Any]:
  """Returns the content of model.json.

  Args:
    run: the run.
    exported: the model that is shipped.
    baseline: the Transformer.
    texts: name, description, command of the training and hardware.
  """
  config = run.config
  completions = exported.generate([''] * NUM_SAMPLES, SAMPLE_TOKENS)
  return {
    'name': texts['name'],
    'description': texts['description'],
    'corpus': config.data.corpus,
    'vocabulary': {'kind': config.data.vocabulary, 'size': run.vocabulary.size},
    'architecture': describe_model(config.model),
    'context': config.evaluation_context(),
    'parameters': _parameters(run),
    'bytes': (exported.workdir / workdirs.EXPORTED).stat().st_size,
    'training': {
      'command': texts['command'],
      'steps': run.restored.step,
      'tokens': _tokens(run),
      'hours': goodput.training_seconds(run.workdir) / 3600,
      'hardware': texts['hardware'],
    },
    'test': exported.evaluate('test'),
    'baseline': {
      'parameters': _parameters(baseline),
      'tokens': _tokens(baseline),
      'test': baseline.evaluate('test'),
    },
    'sample_tokens': SAMPLE_TOKENS,
    'samples': [completion.text for completion in completions],
  }


def check_loss(model: dict[str, Any]) -> None:
  """Raises BadInput if a model is worse than its baseline by more than the limit."""
  bits, baseline = (scores['test']['bits_per_byte'] for scores in (model, model['baseline']))
  if not bits <= MAX_LOSS_RATIO * baseline:
    raise errors.BadInput(
      f'the model has {bits:.4f} bits per byte, more than {MAX_LOSS_RATIO} times the '
      f'{baseline:.4f} of the baseline'
    )


def write_description(model: dict[str, Any], folder: pathlib.Path) -> None:
  """Writes model.json, the card, and the checksums of all files of the folder."""
  text = json.dumps(model, indent=2, ensure_ascii=False, allow_nan=False) + '\n'
  (folder / pretrained.DESCRIPTION).write_text(text, encoding='utf-8')
  card = model_card.format_card(model)
  (folder / pretrained.CARD).write_text(card, encoding='utf-8')
  checksums = pretrained.compute_checksums(folder)
  (folder / pretrained.CHECKSUMS).write_text(checksums, encoding='utf-8')


def check_bytes(folder: pathlib.Path) -> None:
  """Raises BadInput if all models have too many bytes with this one."""
  shipped = [pretrained.FOLDER / name for name in pretrained.names()]
  size = sum(path.stat().st_size for f in [*shipped, folder] for path in f.iterdir())
  if size > MAX_BYTES:
    raise errors.BadInput(
      f'all models would have {size:,} bytes with this one, at most {MAX_BYTES:,} are allowed'
    )


def _content_hash(run: runs.Run) -> str:
  return json.loads((run.workdir / workdirs.CORPUS).read_text(encoding='utf-8'))['content_hash']


def _tokens(run: runs.Run) -> int:
  return run.restored.step * run.config.training.tokens_per_step


def _parameters(run: runs.Run) -> int:
  return model_variables.count_elements(run.restored.params)


if __name__ == '__main__':
  flags.run(main)
