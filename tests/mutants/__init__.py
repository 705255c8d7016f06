"""Small wrong changes of the package, which the quick tests have to catch.

Each TOML file holds the mutants of one folder of the package: the file, a text that occurs there
once, what it becomes, and one sentence of what breaks. CONTRIBUTING.md says how to run them.
"""

import dataclasses
import hashlib
import pathlib
import tomllib

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parents[1]


@dataclasses.dataclass(frozen=True)
class Mutant:
  """One wrong change.

  Attributes:
    name: unique over all files.
    file: path of the changed file, relative to the project.
    original: text that occurs in it exactly once.
    replacement: what the text becomes.
    breaks: what is wrong then, in one sentence.
  """

  name: str
  file: str
  original: str
  replacement: str
  breaks: str

  def digest(self) -> str:
    """Changes with the mutant."""
    return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

  def mutated(self, root: pathlib.Path = ROOT) -> str:
    """The text of the changed file. Raises ValueError unless the original occurs once."""
    text = (root / self.file).read_text(encoding='utf-8')
    if text.count(self.original) != 1:
      raise ValueError(
        f'mutant {self.name}: its original occurs {text.count(self.original)} times in '
        f'{self.file}, expected once: {self.original!r}'
      )
    return text.replace(self.original, self.replacement)


def load() -> dict[str, Mutant]:
  """All mutants by name. Raises ValueError where two share a name."""
  mutants: dict[str, Mutant] = {}
  for path in sorted(FOLDER.glob('*.toml')):
    for name, fields in tomllib.loads(path.read_text(encoding='utf-8')).items():
      if name in mutants:
        raise ValueError(f'{path.name}: there is another mutant {name}')
      mutants[name] = Mutant(name, **fields)
  return mutants
