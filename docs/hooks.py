"""What MkDocs cannot do by itself: pages that are generated, and links to the code."""

import contextlib
import importlib
import io
import pathlib
import re
import runpy

from mkdocs.structure.files import File

from ngrammer_jax import __main__ as script
from ngrammer_jax.config import experiment, fields

CODE_LINES = pathlib.Path(__file__).resolve().parents[1] / 'tests' / 'code_lines.py'
README = pathlib.Path(__file__).resolve().parents[1] / 'README.md'
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
  """Adds generated parts of pages, and shows links to code as text."""
  if page.file.src_path == 'commands.md':
    helps = (f'\n## {command}\n\n```text\n{help_of(command)}```\n' for command in script.COMMANDS)
    markdown += ''.join(helps)
  if page.file.src_path == 'index.md':
    markdown = markdown.replace('<!-- memories of the README -->', table_of_memories())
  if page.file.src_path == 'reading.md':
    markdown = with_lengths(markdown)
  return re.sub(r'\[([^]]+)\]\(\.\./[^)]+\)', r'\1', markdown)


def on_page_content(html, page, config, files):
  """Keeps a standard error on one line, and lets long names in tables break after _, . and =."""
  html = html.replace('± ', '±&nbsp;')
  return re.sub(r'<td[^>]*>.*?</td>', with_breaks, html, flags=re.DOTALL)


def with_breaks(cell: re.Match) -> str:
  """Returns a cell of a table with places for line breaks in its code; the style allows them."""

  def add_places(code: re.Match) -> str:
    return re.sub(r'(?<=[_.=])(?=\w)', '<wbr>', code[0])

  return re.sub(r'(?<=<code>)[^<]+', add_places, cell[0])


def table_of_memories() -> str:
  """Returns the table of memories of the README, with links from this folder."""
  text = README.read_text(encoding='utf-8')
  table = re.search('<!-- memories -->\n(.*?)<!-- end -->', text, re.DOTALL)[1]
  return table.replace('](docs/', '](')


def with_lengths(markdown: str) -> str:
  """Returns the page with the length of each of its reading lists below its heading."""
  code_lines = runpy.run_path(str(CODE_LINES))
  for name, paths in code_lines['reading_lists']().items():
    files, code, lines = code_lines['count'](paths)
    length = f'{files} files, {code:,} lines of code, {lines:,} lines with docstrings and comments.'
    markdown = markdown.replace(f'\n### {name}\n', f'\n### {name}\n\n{length}\n')
  return markdown


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
  meaning = '; '.join(filter(None, [key.comment, _allowed_values(key)]))
  return f'| {name} | {types} | `{fields.format_value(key.default)}` | {meaning} |'


def _allowed_values(key: fields.Key) -> str:
  if key.choices is not None:
    return f'one of {", ".join(f"`{choice}`" for choice in key.choices)}'
  bounds = {'at least': key.at_least, 'above': key.above}
  bounds |= {'at most': key.at_most, 'below': key.below}
  texts = [f'{words} {bound:,}' for words, bound in bounds.items() if bound is not None]
  return ', '.join([*(f'{value} or' for value in key.also), *texts]).replace(' or,', ' or')


def _type_name(kind) -> str:
  return getattr(kind, '__name__', str(kind)) if not getattr(kind, '__args__', None) else str(kind)


def help_of(command: str) -> str:
  """Returns the output of --help of a command."""
  output = io.StringIO()
  main = importlib.import_module(f'ngrammer_jax.{command}').main
  with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
    main(['--help'])
  return output.getvalue()
