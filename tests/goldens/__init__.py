"""What the package computed when these files were made, for a rebuild to be held against.

`models.json` has drawn configs and `models.npz` projections of what each computes; `checkpoints/`
has small ones of four families and the losses that followed. The tests use configs, `apply`,
`load_run` and the commands, and nothing else of the package. `make.py` made the files.
"""
