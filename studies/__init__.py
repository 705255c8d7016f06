"""The gain of each memory: the runs behind docs/results.md.

`ngram_memories` and the other config files hold the models, `cells` the runs of each table, and
`results.jsonl` one line for each finished run. From the top of a checkout,

  python -m studies.run --data=/path/to/corpora

trains the missing runs, and `python -m studies.report` writes the tables and figures.
`python -m studies.ship_model` makes a run a pretrained model of the package.
"""
