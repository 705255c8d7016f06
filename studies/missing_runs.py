"""The list of studies with missing runs, each with the command that trains them."""

from collections.abc import Sequence

from studies import cells, domain, domain_tables, long_documents, program, step_seconds
from studies.results import Lines


def table(lines: Lines) -> list[Sequence[str]]:
  """Returns the header and a row for each study that has runs to do."""
  rows: list[Sequence[str]] = [('runs', 'finished', 'planned', 'command')]

  def add(name: str, missing: int, planned: int, command: str) -> None:
    if missing:
      rows.append((name, str(planned - missing), str(planned), f'`{command}`'))

  missing = len(list(cells.missing_cells(lines.runs)))
  add('the older study', missing, len(lines.runs) + missing, 'python -m studies.run --data=DIR')
  missing = len(list(program.planned_cells(lines.program)))
  planned = len(list(program.planned_cells([])))
  add('stage 0 on enwik8', missing, planned, 'python -m studies.program --data=DIR')
  timed = {line['model'] for line in lines.program if line['table'] == step_seconds.TABLE}
  planned = len(program.ARMS)
  add('times of a step', planned - len(timed), planned, 'python -m studies.step_seconds')
  for (name, text), stage in program.STAGES.items():
    missing = len(list(stage.planned_cells(lines.program)))
    planned = len(list(stage.planned_cells([])))
    command = f'python -m studies.program --stage={name} --text={text} --data=DIR'
    add(f'stage {name} on {text}', missing, planned, command)
  steps = domain.TOKENS // domain.TOKENS_PER_STEP
  missing = len(list(domain.planned_cells(steps, lines.domain)))
  planned = len(list(domain.planned_cells(steps, [])))
  add('SmolLM2 learns C source', missing, planned, domain_tables.COMMAND)
  planned = long_documents.DOCUMENTS * len(long_documents.VARIANTS)
  # --documents may have added lines.
  missing = max(planned - len(lines.long_documents), 0)
  add('SmolLM2 on long documents', missing, planned, long_documents.COMMAND)
  return rows
