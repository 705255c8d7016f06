"""From files to batches, in five nouns.

Files: `file_formats` says what a file is, `compression` and `buckets` read its bytes, `formats` its
documents from any position on, `split_files` finds the split that its name speaks of.

Documents: `corpora` opens the corpus of a config as a `corpus.Corpus`, documents by split, from
whole files (`text_files`), parts of them (`sections`, `held_out`) or `shards`. `split_reader` reads
those of all splits once, without `duplicates`.

Tokens: `vocabularies` are text to ids and back, learned by `learned_vocabulary`; `token_writer`
encodes documents into the folder of a `token_cache`, whose tokens are a `token_split`.

Rows: what each row of the batch reads. `streams` are rows of a token cache, a function of the step
alone. `packing` reads the rows of shards: a `row_reader` has the state of its row,
`document_blocks` are read once for all rows of a shard, `fingerprints` notice a changed one, and
`saved_places` reads the states of earlier versions.

Mixture: `mixture_schedule` says which part each row reads at a step, `mixture` makes the batches,
and `prefetch` makes them ahead of the devices.

`prompts`, `cloze` and `token_classes` serve inference and memories.
"""
