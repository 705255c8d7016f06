"""What the package computed when these files were made, for a rebuild to be held against.

`models.json` has drawn configs, `models.npz` projections of what each computes; `runs/` has small
checkpoints and the losses that followed them. They use configs, `apply`, `load_run` and the verbs
and nothing else of the package. `python -m tests.goldens.make` made them.
"""
