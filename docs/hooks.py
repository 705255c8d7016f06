"""What MkDocs cannot do by itself: pages that are generated, and links to the code."""

import contextlib
import importlib
import io
import re

from mkdocs.structure.files import File

from ngrammer_jax import __main__ as script
from ngrammer_jax.config import experiment, fields

CONFIGURATION = """# Configuration

Every key of a config: its type, default and bounds. `--config.KEY=VALUE` sets a key on the command
line, and `--print_config` prints the keys of a config. Keys marked with * may change when a run is
resumed.
"""


def on_files(files, config):
  """Adds the pages that are generated."""
  files.append(File.generated(config, 'configuration.md', content=configuration()))
  return files


def on_page_markdown(markdown, page, config, files):
  """Adds the help of the commands, and shows links to the code as text."""
  if page.file.src_path == 'commands.md':
    helps = (f'\n## {command}\n\n```text\n{help_of(command)}```\n' for command in script.COMMANDS)
    markdown += ''.join(helps)
  return re.sub(r'\[([^]]+)\]\(\.\./[^)]+\)', r'\1', markdown)


def configuration() -> str:
  """Returns a page with a table for each section and block of the config."""
  tables: dict[str, list[str]] = {}
  free_sections: list[str] = []
  for key in fields.walk(experiment.Config):
    section, _, name = key.path.rpartition('.')
    is_free = key.free_on_resume or section.startswith(tuple(free_sections))
    if key.block is not None and is_free:
      free_sections.append(key.path)
    elif key.block is None and key.is_used:
      tables.setdefault(section, []).append(_row(key, f'`{name}`{"*" if is_free else ""}'))
  header = '| key | type | default | meaning |\n|---|---|---|---|\n'
  sections = (
    f'\n## {f"`{section}`" if section else "Top level"}\n\n{header}' + '\n'.join(rows) + '\n'
    for section, rows in tables.items()
  )
  return CONFIGURATION + ''.join(sections)


def _row(key: fields.Key, name: str) -> str:
  types = ', '.join('None' if kind is type(None) else _type_name(kind) for kind in key.types)
  meaning = '; '.join(filter(None, [key.comment, _allowed_values(key.rules)]))
  return f'| {name} | {types} | `{fields.format_value(key.default)}` | {meaning} |'


def _allowed_values(rules: fields.Rules) -> str:
  if rules.choices is not None:
    return f'one of {", ".join(f"`{choice}`" for choice in rules.choices)}'
  bounds = {'at least': rules.at_least, 'above': rules.above}
  bounds |= {'at most': rules.at_most, 'below': rules.below}
  texts = [f'{words} {bound:,}' for words, bound in bounds.items() if bound is not None]
  return ', '.join([*(f'{value} or' for value in rules.also), *texts]).replace(' or,', ' or')


def _type_name(kind) -> str:
  return getattr(kind, '__name__', str(kind)) if not getattr(kind, '__args__', None) else str(kind)


def help_of(command: str) -> str:
  """Returns the output of --help of a command."""
  output = io.StringIO()
  main = importlib.import_module(f'ngrammer_jax.{command}').main
  with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
    main(['--help'])
  return output.getvalue()
