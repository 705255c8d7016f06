"""From files to batches, in five nouns, each a folder or file that imports those before it.

files/: `file_formats` says what a file is, `compression` and `buckets` read its bytes,
`split_files` finds the split that its name speaks of, `fingerprints` notice a file that changed.
formats/ read the records of files, from any position on. A new format is a module there, and a row
in the tables of `file_formats` and `formats`.

documents/: `corpora` opens the corpus of a config as a `corpus.Corpus`, documents by split, from
whole files, parts of them (`sections`, `held_out`) or `shards`. `split_reader` reads the documents
of all splits once, without `duplicates`.

tokens/: vocabularies/ are text to ids and back, read or learned by `learned_vocabulary`. A corpus
is encoded once into the `token_cache`, a folder on this machine with the tokens of each split.

rows/: what each row of a `token_batch` reads at a step, of one corpus. `streams` reads the token
cache: the tokens are a function of the step, and nothing is saved. `streamed_rows` reads shards,
tokenised during training: each row has a state, saved in checkpoints and restored by a resumed run.
`data.shuffle` is the order of its shards and documents (`row_reader`).

`mixture`: the corpora of a run, and the batch of a step from the rows of each (`TrainRows`). The
training loop asks it for batches, and for the row states of a checkpoint (`rows.json`); `prefetch`
makes batches ahead.

`prompts`, `cloze` and `token_classes` serve inference and memories.
"""
