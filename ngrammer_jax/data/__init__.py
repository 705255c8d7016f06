"""From files to batches. Each folder imports only earlier ones.

files/: `file_formats` identifies a file, `compression` and `buckets` read its bytes, `split_files`
finds its split by name, `fingerprints` detect changed files.

formats/: the records of a file, from any position on. A new column format is a module there, and a
row in the tables of `formats` and `file_formats`; other formats need a branch in their functions. A
record is a text, or with `data.chat` the messages of a conversation (`conversations`).

documents/: `corpora` opens the corpus of a config as a `corpus.Corpus`, documents by split, from
whole files, parts of them (`sections`, `held_out`) or `shards`. `split_reader` parses the documents
of all splits once, without `duplicates`.

vocabularies/: text to ids and back; conversations to text (`chat_template`).

tokens/: a vocabulary is read or learned (`learned_vocabulary`). A `document_encoder` turns a text
or a conversation into tokens, with their loss mask. A corpus is encoded once into the
`token_cache`, a local folder with the tokens of each split.

rows/: the tokens of each row of a `token_batch` at a step, from one corpus (`interface.TrainRows`).
`cached_rows` read the token cache: their tokens are a function of the step, and nothing is saved.
`streamed_rows` read shards, tokenised during training: each row has a state, saved in checkpoints
and restored by a resumed run. `data.shuffle` is the order of shards and documents (`row_reader`);
cached rows are not shuffled. `evaluation_streams` read a split for evaluation.

`mixture`: the corpora of a run. `train_segments`: the batch of a step, from the rows of each
corpus, and the row states of a checkpoint (`rows.json`). `prefetch` makes batches ahead.

`prompts`, `cloze` and `token_classes` serve inference and memories.
"""
