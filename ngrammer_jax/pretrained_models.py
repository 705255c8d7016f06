"""The trained models that come with the package.

<package>/weights/<name>/   an exported run (see `exported_runs`), and:
  model.json      description, sizes, training, results on the test split, first samples
  MODEL_CARD.md   the same as a page
  SHA256SUMS      SHA-256 of every other file, as `sha256sum` writes and checks it

Lists the models without JAX; `runs.load_pretrained` opens one.
"""

import contextlib
import difflib
import hashlib
import pathlib

from ngrammer_jax import errors
from ngrammer_jax.system import files

FOLDER = pathlib.Path(__file__).with_name('weights')
DESCRIPTION, CARD, CHECKSUMS = 'model.json', 'MODEL_CARD.md', 'SHA256SUMS'
PREFIX = 'pretrained:'  # before the name of a model, where it stands for a run or a config
NO_MODELS = 'none in this installation'


def pretrained() -> dict[str, str]:
  """Returns the description in one line of every pretrained model, by name.

  Raises:
    BadInput: a description is missing or damaged.
  """
  descriptions = {}
  for name in names():
    with _translate_damage(FOLDER / name):
      descriptions[name] = files.read_json(FOLDER / name / DESCRIPTION)['description']
  return descriptions


def format_list() -> str:
  """Formats the names and descriptions of all models, one line each."""
  lines = [f'  {name}: {description}' for name, description in pretrained().items()]
  return '\n'.join(['pretrained models, for --pretrained=NAME', *(lines or [f'  {NO_MODELS}'])])


def names() -> list[str]:
  """Returns the names of all models."""
  return sorted(path.parent.name for path in FOLDER.glob(f'*/{CHECKSUMS}'))


def find(name: str) -> pathlib.Path:
  """Returns the folder of a model, after its files were verified by checksum.

  Raises:
    BadInput: there is no model of this name, or a file of it is missing or damaged.
  """
  available = names()
  if name not in available:
    near = difflib.get_close_matches(name, available, n=1)
    hint = f'did you mean {near[0]}?' if near else f'available: {", ".join(available) or NO_MODELS}'
    raise errors.BadInput(f'no pretrained model has the name {name}: {hint}')
  folder = FOLDER / name
  with _translate_damage(folder):
    listed = set((folder / CHECKSUMS).read_text(encoding='utf-8').splitlines())
    if differences := listed ^ set(compute_checksums(folder).splitlines()):
      file = min(line.rpartition(' ')[2] for line in differences)
      raise ValueError(f'{file} differs from {CHECKSUMS}')
  return folder


def compute_checksums(folder: pathlib.Path) -> str:
  """Returns the content of SHA256SUMS for the files of a folder, hidden ones excluded."""
  paths = sorted(path for path in folder.glob('[!.]*') if path.is_file() and path.name != CHECKSUMS)
  digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
  return ''.join(f'{digest}  {name}\n' for name, digest in digests.items())


def _translate_damage(folder: pathlib.Path) -> contextlib.AbstractContextManager:
  return files.translate_damage(f'the pretrained model in {folder}', 'install ngrammer_jax again')
