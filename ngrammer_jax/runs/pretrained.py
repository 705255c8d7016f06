"""The trained models of this package and of other installed packages.

<package>/weights/<name>/   an exported run (see `runs.exported`), and:
  model.json      description, sizes, training, results on the test split, first samples
  MODEL_CARD.md   the same as a page
  SHA256SUMS      SHA-256 of every other file, in the format of `sha256sum`

The folder of a model of another package has no weights and no SHA256SUMS. Its model.json has the
name of the package, the path of its file, and the SHA-256. The package is not imported.

Lists the models without JAX; `runs.load_pretrained` opens one.
"""

import difflib
import hashlib
import importlib.util
import pathlib

from ngrammer_jax import errors
from ngrammer_jax.system import file_errors, json_files

FOLDER = pathlib.Path(__file__).parents[1] / 'weights'
DESCRIPTION = 'model.json'
CARD = 'MODEL_CARD.md'
CHECKSUMS = 'SHA256SUMS'
NO_MODELS = 'none in this installation'
REMEDY = 'install ngrammer_jax again'


def pretrained() -> dict[str, str]:
  """Returns a one-line description of every pretrained model, by name.

  Raises:
    BadInput: a description is missing or damaged.
  """
  descriptions = {}
  for name in all_names():
    with file_errors.translate_damage(_title(FOLDER / name), REMEDY):
      descriptions[name] = json_files.read(FOLDER / name / DESCRIPTION)['description']
  return descriptions


def format_list() -> str:
  """Formats the names and descriptions of all models, one line each."""
  lines = [f'  {name}: {description}' for name, description in pretrained().items()]
  return '\n'.join(['pretrained models, for --pretrained=NAME', *(lines or [f'  {NO_MODELS}'])])


def names() -> list[str]:
  """Returns the names of the models of this package."""
  return sorted(path.parent.name for path in FOLDER.glob(f'*/{CHECKSUMS}'))


def external_names() -> list[str]:
  """Returns the names of the models of other packages, installed or not."""
  described = {path.parent.name for path in FOLDER.glob(f'*/{DESCRIPTION}')}
  return sorted(described - set(names()))


def all_names() -> list[str]:
  """Returns the names of all models, starting with this package."""
  return [*names(), *external_names()]


def find(name: str) -> pathlib.Path:
  """Returns the folder of a model after verifying its files by checksum.

  For a model of another package, returns the file of its weights.

  Raises:
    BadInput: an unknown name, a missing or damaged file, or a package that is not installed.
  """
  if name in external_names():
    return _find_external(name)
  available = all_names()
  if name not in available:
    near = difflib.get_close_matches(name, available, n=1)
    if near:
      hint = f'did you mean {near[0]}?'
    else:
      hint = f'available: {", ".join(available) or NO_MODELS}'
    raise errors.BadInput(f'no pretrained model has the name {name}: {hint}')
  folder = FOLDER / name
  with file_errors.translate_damage(_title(folder), REMEDY):
    listed = set((folder / CHECKSUMS).read_text(encoding='utf-8').splitlines())
    differences = listed ^ set(compute_checksums(folder).splitlines())
    if differences:
      file = min(line.rpartition(' ')[2] for line in differences)
      raise ValueError(f'{file} differs from {CHECKSUMS}')
  return folder


def _find_external(name: str) -> pathlib.Path:
  """Returns the file of a model in another package, verified by checksum."""
  with file_errors.translate_damage(_title(FOLDER / name), REMEDY):
    package = json_files.read(FOLDER / name / DESCRIPTION)['package']
    module = package['module']
    file = package['file']
    sha256 = package['sha256']
    install = package['install']
  path = _find_in_package(module, file)
  if path is None:
    raise errors.BadInput(f'the weights of {name} are in another package, not installed: {install}')
  with path.open('rb') as weights:
    digest = hashlib.file_digest(weights, 'sha256').hexdigest()
  if digest != sha256:
    raise errors.BadInput(
      f'{path} is not the file of {name}: its SHA-256 is {digest}, expected {sha256}; install '
      f'the package again: {install}'
    )
  return path


def _find_in_package(module: str, file: str) -> pathlib.Path | None:
  """Returns a file of an installed package without importing it; None: missing."""
  spec = importlib.util.find_spec(module)
  if spec is None:
    return None
  for folder in spec.submodule_search_locations or ():
    path = pathlib.Path(folder) / file
    if path.is_file():
      return path
  return None


def compute_checksums(folder: pathlib.Path) -> str:
  """Returns the content of SHA256SUMS for the files of a folder, hidden ones excluded."""
  paths = sorted(path for path in folder.glob('[!.]*') if path.is_file() and path.name != CHECKSUMS)
  digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
  return ''.join(f'{digest}  {name}\n' for name, digest in digests.items())


def _title(folder: pathlib.Path) -> str:
  """Returns the name of a model's folder in messages."""
  return f'the pretrained model in {folder}'
