"""SuperGLUE from local files as tasks of lm_eval, with the texts of finetune.format="question".

  python -m ngrammer_jax.tasks.lm_eval --model_args pretrained=smollm2_135m_instruct \\
    --include_path studies/lm_eval --tasks ngrammer_cb,ngrammer_rte \\
    --metadata '{"superglue_dir": "/path/to/superglue"}'
"""

import dataclasses

import datasets

from ngrammer_jax.tasks.superglue import formats, reader


def load(task: str, superglue_dir: str, **others) -> dict[str, datasets.Dataset]:
  """Returns the validation split of a task."""
  examples = reader.read(superglue_dir, formats.find_task(task).config, 'validation')
  rows = formats.format_rows(task, examples, 'validation', format='question')
  return {'validation': datasets.Dataset.from_list([dataclasses.asdict(row) for row in rows])}
