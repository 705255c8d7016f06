"""Writes the tables and figures of docs/results.md and README.md: python -m studies.report

A table stands between two comments, `<!-- main -->` and `<!-- end -->`; all other text is kept.
"""

import pathlib

from studies import (
  answers,
  domain_tables,
  long_documents,
  missing_runs,
  plots,
  pretrained_tables,
  program_tables,
  results,
  study_tables,
)
from studies.markdown import markdown, replace_tables

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / 'docs' / 'results.md'
README = ROOT / 'README.md'


def format_tables(lines: results.Lines) -> dict[str, str]:
  """Returns the tables of docs/results.md by name."""
  compared = answers.runs_by_name(lines.runs, lines.program, lines.pretrained)
  tables = {
    'answers': markdown(answers.table(compared)),
    'program, progress': program_tables.format_progress(lines.program),
    'frequency': study_tables.frequency_table(lines.frequency),
    'long documents': markdown(long_documents.table(lines.long_documents)),
    'domain': domain_tables.format_table(lines.domain),
    'not run': markdown(missing_runs.table(lines)),
  }
  for name, rows in program_tables.format_tables(lines.program).items():
    tables[name] = markdown(rows)
  return tables | study_tables.format_tables(lines.runs) | pretrained_tables.format_tables(lines)


def format_readme_tables(lines: results.Lines) -> dict[str, str]:
  """Returns the tables of README.md by name."""
  main_runs = [line for line in lines.runs if line['table'] == 'main']
  return {'results': study_tables.readme_table(main_runs)}


def main() -> None:
  """Writes the pages and the figures."""
  lines = results.read_all()
  for page, tables in ((PAGE, format_tables(lines)), (README, format_readme_tables(lines))):
    text = replace_tables(page.read_text(encoding='utf-8'), tables)
    page.write_text(text, encoding='utf-8')
  plots.save_all(lines.runs, lines.longer, lines.program, PAGE.parent)


if __name__ == '__main__':
  main()
