"""Inference of a language model: scores of segments, ranking of choices, generation of tokens.

Batches are padded to few shapes, see `padding`, so that few programs are compiled.

B batch, T segment length, P tokens of a padded prompt, K choices, C tokens of a choice.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np

from ngrammer_jax import errors, memory_limits, sharding
from ngrammer_jax.checkpoints import checksums
from ngrammer_jax.config import model as model_config
from ngrammer_jax.data import prefetch
from ngrammer_jax.data.rows import token_batch
from ngrammer_jax.inference import padding, programs, row_reader, sampling
from ngrammer_jax.layers.ngram import host_rows
from ngrammer_jax.models import embedding_and_head, host_tables, language_model, spans

MAX_ROWS = 8  # default batch size of texts

Variables = dict[str, Any]  # `params` and `codebook`


def check_can_continue(config: model_config.ModelConfig) -> None:
  """Raises BadInput for a model that cannot rank choices or generate."""
  if config.position in model_config.SEGMENT_POSITIONS:
    raise errors.BadInput(
      f'model.position={config.position!r} is the position in the segment: such a model can be '
      f'evaluated on a split, but cannot continue a text'
    )


class Engine:
  """Runs a model on batches; the result of a row does not depend on the other rows.

  Every program is compiled once for each shape of its arguments. Batch sizes (`rows`) are rounded
  up to a multiple of the devices of the batch axes.

  Args:
    model: the model, with the memory of evaluation.
    mesh: the device mesh of the variables.
  """

  @classmethod
  @functools.lru_cache(maxsize=8)
  def shared(cls, model: language_model.LanguageModel, mesh: jax.sharding.Mesh) -> 'Engine':
    """Returns the engine of a model on a mesh: equal models share their compiled programs.

    The last eight engines stay in memory.
    """
    return cls(model, mesh)

  def __init__(self, model: language_model.LanguageModel, mesh: jax.sharding.Mesh):
    self.model = model
    self.mesh = mesh
    self._row_sharding = sharding.rows_sharding(mesh)
    # A scan over layers would stack, and so copy, the cache of all layers at every token.
    unrolled = model.clone(config=dataclasses.replace(model.config, scan_layers=False))
    # Every host reads the scores and the tokens of all rows.
    everywhere = sharding.replicated(mesh)
    rows = self._row_sharding
    scored = (everywhere, rows)
    state = programs.DecodingState(rows, everywhere, token_B=rows, is_used_BxV=rows)
    decoded = (everywhere, state)
    self._prepare = jax.jit(functools.partial(embedding_and_head.for_serving, model.config))
    self._score_segment = _jit(programs.score_segment, model, 'memory', scored)
    self._score_last_target = _jit(programs.score_last_target, model, 'memory', scored)
    self._rank_choices = _jit(programs.rank_choices, model, (), everywhere)
    decode_first = functools.partial(programs.decode_prompt, is_first=True)
    self._decode_first = _jit(decode_first, unrolled, 'state', decoded)
    self._decode_prompt = _jit(programs.decode_prompt, unrolled, 'state', decoded)
    self._decode_next = _jit(programs.decode_next, unrolled, 'state', decoded)
    # Eagerly, each array would be a program of its own.
    self._empty_memory = jax.jit(model.empty_memory, static_argnums=(0, 1), out_shardings=rows)

  def prepare(self, variables: Variables) -> Variables:
    """Returns variables with a precomputed cluster for each token of the vocabulary.

    Otherwise every token of a text is compared with all centroids.
    """
    on_devices = host_tables.without_tables(self.model.config, variables)
    with sharding.use(self.mesh):
      return variables | {'codebook': self._prepare(on_devices['params'], variables['codebook'])}

  def round_rows(self, rows: int) -> int:
    """Rounds a number of rows up to a valid batch size."""
    return sharding.round_rows(rows, self.mesh)

  def score_segments(
    self,
    variables: Variables,
    rows: int,
    num_segments: int,
    make_segment: Callable[[int, slice], token_batch.Batch],
    are_windows: bool = False,
  ) -> Iterator[programs.Scores]:
    """Yields the scores of each segment of a batch of streams while the next one is computed.

    The memory of a stream starts empty and is carried from segment to segment. A window is the only
    segment of its stream, and only has the score of its last target, [B, 1].

    Args:
      variables: parameters and codebook.
      rows: number of streams.
      num_segments: number of segments.
      make_segment: returns the segment with an index, for a slice of the rows.
      are_windows: whether the segments are windows.
    """
    rows = self.round_rows(rows)
    score = self._score_segment
    slots = spans.cache_slots(self.model.config, variables['params'], self.mesh)
    if are_windows:
      score = self._score_last_target
      if slots and self.model.config.memory.first == 'empty':
        slots = 1  # no memory: the slot has no token

    def dispatch() -> Iterator[programs.Scores]:
      memory = self._empty_memory(rows, slots)
      for segment, inputs in self._read(variables, rows, num_segments, make_segment):
        with sharding.use(self.mesh):
          scores, memory = score(inputs, segment, memory=memory)
        yield scores

    return _fetch_one_behind(dispatch())

  def _read(
    self,
    variables: Variables,
    rows: int,
    num_segments: int,
    make_segment: Callable[[int, slice], token_batch.Batch],
  ) -> Iterator[tuple[token_batch.Batch, Variables]]:
    """Yields every segment, with the variables of the model for it.

    For tables in host memory the variables have the rows of the segment, read while the previous
    segment is scored.
    """
    has_host_tables = host_tables.exist(self.model.config)
    if has_host_tables:
      reader = row_reader.RowReader(self.model, self.mesh, variables, rows)

    def read() -> Iterator[tuple[token_batch.Batch, Variables]]:
      for index in range(num_segments):
        parts = {}

        def load(
          row_slice: slice, index: int = index, parts: dict[int, token_batch.Batch] = parts
        ) -> token_batch.Batch:
          parts[row_slice.start] = make_segment(index, row_slice)
          return parts[row_slice.start]

        segment = sharding.global_rows(self.mesh, rows, load)
        if has_host_tables:
          yield segment, reader.read_local(parts)
        else:
          yield segment, variables

    if not has_host_tables:
      yield from read()
      return
    # The reader is closed before its thread is waited for.
    with prefetch.run_ahead(read(), depth=1) as segments, contextlib.closing(reader):
      yield from segments

  def score_documents(
    self,
    variables: Variables,
    documents: Sequence[np.ndarray],
    start: int | None,
    length: int,
    max_rows: int = MAX_ROWS,
  ) -> Iterator[np.ndarray]:
    """Yields the nats of every token of each document, float64 [tokens].

    Without a document start, the first token has no nats.

    Args:
      variables: parameters and codebook.
      documents: token ids without the document start.
      start: id of the document start, the first input of each document. None: the first input is
        the first token of the document.
      length: maximum length of a segment, T.
      max_rows: maximum batch size.
    """
    V = self.model.vocabulary_size
    rows = self.round_rows(min(max_rows, padding.bucket(len(documents))))
    for group in padding.chunks(documents, rows):
      if start is not None:
        group = [np.insert(ids, 0, start) for ids in group]
      counts = [max(len(ids) - 1, 0) for ids in group]  # of targets
      # Short texts need no long segment.
      T = min(length, padding.bucket(max(counts), padding.MIN_TEXT_LENGTH))
      num_segments = -(-max(counts) // T)
      ids_BxS, valid_BxS = padding.pad(group, rows, num_segments * T + 1, V)
      starts = np.broadcast_to(np.arange(num_segments * T) == 0, ids_BxS[:, 1:].shape)
      valid = valid_BxS[:, 1:].astype(np.float32)
      padded = token_batch.Batch(ids_BxS[:, :-1], ids_BxS[:, 1:], starts, valid)

      def make_segment(index, row_slice, padded=padded, T=T):
        columns = slice(index * T, (index + 1) * T)
        return token_batch.map_batches(lambda array: array[row_slice, columns], padded)

      segments = self.score_segments(variables, rows, num_segments, make_segment)
      nll = np.concatenate([np.zeros((rows, 0)), *(scores.nll_BxT for scores in segments)], axis=1)
      for row, count in enumerate(counts):
        yield nll[row, :count].astype(np.float64)

  def rank(
    self,
    variables: Variables,
    prefixes: Sequence[np.ndarray],
    choices: Sequence[Sequence[np.ndarray]],
    rows: int,
    bidirectional: bool = False,
  ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yields the index, the scores and the greedy matches of each example.

    The scores are log p(choice | prefix), summed over the tokens of the choice, float64 [K]; a
    match is true if greedy decoding gives the choice, bool [K]. The prefix is computed once; its
    memory is reused for each choice. Examples of similar length are batched together, so their
    order changes.

    Args:
      variables: parameters and codebook.
      prefixes: token ids of each example, starting with the document start.
      choices: token ids of each choice of each example.
      rows: batch size in examples.
      bidirectional: whether the tokens of a prefix attend to the whole prefix.
    """
    V = self.model.vocabulary_size
    rows = self.round_rows(rows)
    shapes_PKC = padding.rank_shapes(prefixes, choices)
    by_shape = sorted(range(len(prefixes)), key=shapes_PKC.__getitem__)
    for (P, K, C), indices in itertools.groupby(by_shape, shapes_PKC.__getitem__):
      for group in padding.chunks(list(indices), rows):
        examples = [choices[i] for i in group]
        examples += [()] * (rows - len(group))
        padded = [padding.pad(example, K, C, V) for example in examples]
        prompt = padding.pad_prompts([prefixes[i] for i in group], rows, P, V, bidirectional)
        choices_2xKxBxC = tuple(np.stack(padded, axis=2))
        inputs, choice_inputs = self._read_choices(variables, prompt, *choices_2xKxBxC)
        with sharding.use(self.mesh):
          choices_2xKxBxC = jax.device_put(choices_2xKxBxC, sharding.rows_sharding(self.mesh, 1))
          ranked = self._rank_choices(inputs, self._place(prompt), *choices_2xKxBxC, choice_inputs)
          scores_KxB, is_greedy_KxB = jax.device_get(ranked)
        for row, i in enumerate(group):
          count = len(choices[i])
          yield i, scores_KxB[:count, row].astype(np.float64), is_greedy_KxB[:count, row]

  def generate(
    self,
    variables: Variables,
    prompts: Sequence[np.ndarray],
    seeds: Sequence[int],
    options: sampling.SamplingConfig,
    context: int,
    bidirectional: bool = False,
    rows: int | None = None,
    document_start: int | None = None,
  ) -> Iterator[np.ndarray]:
    """Yields the next token of every prompt, int32 [len(prompts)]; the iterator does not end.

    After the prompts, one compiled program generates all tokens, some of them in each call, with a
    KV cache. The next call is dispatched before the tokens of the current one are yielded.

    Args:
      variables: parameters and codebook.
      prompts: token ids, with the document start if the model reads one, of at most `context`
        tokens each.
      seeds: random seed of each row.
      options: options of sampling.
      context: each token is predicted from at most this many preceding tokens.
      bidirectional: whether the tokens of a prompt attend to the whole prompt.
      rows: batch size, at least the number of prompts. None: the next power of two.
      document_start: id of the document start; as first token of a prompt it has no repetition
        penalty. None: no such token.
    """
    V = self.model.vocabulary_size
    if rows is None:
      rows = padding.bucket(len(prompts))
    rows = self.round_rows(rows)
    longest = max(map(len, prompts))
    T = min(padding.bucket(longest, padding.MIN_PROMPT_LENGTH), max(context, longest))

    def dispatch() -> Iterator[jax.Array]:
      sampler, seeds_B, state = self._start_decoding(
        variables, seeds, options, context, rows, document_start
      )
      read = self._row_reader(variables, rows)
      prompt = padding.pad_prompts(prompts, rows, T, V, bidirectional)
      inputs = read(prompt)
      with sharding.use(self.mesh):
        prompt = self._place(prompt)
        tokens_KxB, state = self._decode_first(inputs, seeds_B, sampler, prompt, state=state)
      while True:
        yield tokens_KxB
        if not host_tables.exist(self.model.config):
          with sharding.use(self.mesh):
            tokens_KxB, state = self._decode_next(variables, seeds_B, sampler, state=state)
          continue
        # The rows of a token are read once it is known.
        token_Bx1 = jax.device_get(tokens_KxB).T
        token = token_batch.Batch(
          token_Bx1, None, np.zeros_like(token_Bx1, bool), np.ones_like(token_Bx1)
        )
        inputs = read(token)
        with sharding.use(self.mesh):
          token = self._place(token)
          tokens_KxB, state = self._decode_prompt(inputs, seeds_B, sampler, token, state=state)

    calls = dispatch()
    first = jax.device_get(next(calls))  # before the program of the others is compiled
    for tokens_KxB in itertools.chain([first], _fetch_one_behind(calls)):
      yield from tokens_KxB[:, : len(prompts)]

  def start_incremental_decoding(
    self,
    variables: Variables,
    seed: int,
    options: sampling.SamplingConfig,
    context: int,
    document_start: int | None = None,
  ) -> Callable[[Sequence[int]], int]:
    """Returns a function that reads tokens after all earlier ones, and samples the next token.

    The KV cache only has the tokens read so far: nothing is computed ahead. The sampled token is
    not read; the caller passes it, or another token. Tokens are read in pieces of few lengths, so
    texts of other lengths compile no new program.

    Args: see `generate`; there is one row.
    """
    V = self.model.vocabulary_size
    rows = self.round_rows(1)
    sampler, seeds_B, state = self._start_decoding(
      variables, [seed], options, context, rows, document_start
    )
    look_up = self._row_reader(variables, rows)
    num_sampled = 0
    is_first = True

    def read(ids: Sequence[int]) -> int:
      nonlocal state, num_sampled, is_first
      for piece, length in padding.divide(ids, context):
        # Only the token sampled after the last piece is a token of the text.
        state = state._replace(index=self._replicate(num_sampled))
        prompt = padding.pad_prompts([piece], rows, length, V, False, is_first)
        inputs = look_up(prompt)
        with sharding.use(self.mesh):
          prompt = self._place(prompt)
          tokens_1xB, state = self._decode_prompt(inputs, seeds_B, sampler, prompt, state=state)
        is_first = False
      num_sampled += 1
      return int(jax.device_get(tokens_1xB)[0, 0])

    return read

  def _start_decoding(
    self,
    variables: Variables,
    seeds: Sequence[int],
    options: sampling.SamplingConfig,
    context: int,
    rows: int,
    document_start: int | None,
  ) -> tuple[sampling.SamplerParams, jax.Array, programs.DecodingState]:
    """Returns the parameters of the sampler, the seed of each row, and the first state."""
    slots = self._decoding_slots(context, variables)
    cache = checksums.named_leaves(self._abstract(self.model.empty_memory, rows, slots))
    memory_limit = memory_limits.device_memory(self.mesh)
    memory_limits.check_fits(cache, memory_limit, f'keys and values of context={context:,}')
    V = self.model.vocabulary_size

    def shard_rows(array: np.ndarray) -> jax.Array:
      return jax.device_put(array, self._row_sharding)

    with sharding.use(self.mesh):
      sampler = sampling.SamplerParams.from_config(options, V, document_start)
      seeds_B = shard_rows(np.resize(np.asarray(seeds, np.uint32), rows))
      is_used_BxV = None
      if sampler.repetition_penalty is not None:
        is_used_BxV = shard_rows(np.zeros((rows, V), bool))
      token_B = shard_rows(np.zeros(rows, np.int32))
      memory = self._empty_memory(rows, slots)
      state = programs.DecodingState(memory, self._replicate(0), token_B, is_used_BxV)
    return sampler, seeds_B, state

  def _replicate(self, index: int) -> jax.Array:
    """Returns a token index with the sharding of program outputs, to avoid a second compilation."""
    return jax.device_put(np.int32(index), sharding.replicated(self.mesh))

  def trace_score(self, variables: Variables, rows: int, length: int) -> jax.stages.Traced:
    """Traces the program that scores a segment of T tokens. The variables may be abstract."""
    rows = self.round_rows(rows)
    segment = programs.abstract_segment((rows, length), self._row_sharding)
    memory = self.model.config.memory
    slots = 0 if memory is None else memory.length
    memory = self._abstract(self.model.empty_memory, rows, slots)
    variables = self._abstract_inputs(variables, (rows, length))
    with sharding.use(self.mesh):
      return self._score_segment.trace(variables, segment, memory=memory)

  def _abstract_inputs(self, variables: Variables, shape: tuple[int, int]) -> Variables:
    """Returns the abstract variables for a segment [B, T]."""
    config = self.model.config
    if not host_tables.exist(config):
      return variables
    values = row_reader.abstract_values(
      self.model, variables['codebook'], shape, self._row_sharding
    )
    return host_tables.without_tables(config, variables) | {host_rows.VALUES: values}

  def _abstract(self, make: Callable[..., Any], *args: Any) -> Any:
    """Returns the abstract results of a function for all rows."""
    return sharding.abstract(jax.eval_shape(lambda: make(*args)), self._row_sharding)

  def trace_generate(self, variables: Variables, rows: int, context: int) -> jax.stages.Traced:
    """Traces the program that generates tokens after a prompt. The variables may be abstract.

    Its KV cache has the whole context, ignoring learned spans.
    """
    rows = self.round_rows(rows)
    memory = self._abstract(self.model.empty_memory, rows, self._decoding_slots(context))
    seeds_B = sharding.abstract(np.zeros(rows, np.uint32), self._row_sharding)
    token_B = sharding.abstract(np.zeros(rows, np.int32), self._row_sharding)
    everywhere = sharding.replicated(self.mesh)
    sampler = sampling.SamplerParams.from_config(
      sampling.SamplingConfig(), self.model.vocabulary_size
    )
    sampler = sharding.abstract(sampler, everywhere)
    index = sharding.abstract(np.int32(0), everywhere)
    state = programs.DecodingState(memory, index, token_B)
    with sharding.use(self.mesh):
      if not host_tables.exist(self.model.config):
        return self._decode_next.trace(variables, seeds_B, sampler, state=state)
      token = programs.abstract_segment((rows, 1), self._row_sharding)._replace(targets_BxT=None)
      inputs = self._abstract_inputs(variables, (rows, 1))
      return self._decode_prompt.trace(inputs, seeds_B, sampler, token, state=state)

  def _decoding_slots(self, context: int, variables: Variables | None = None) -> int:
    """Returns the slots of the KV cache: the context, cut to the learned spans."""
    config = self.model.config
    slots = context - 1  # the context has the current token
    if config.span is not None and variables is not None:
      slots = min(slots, spans.cache_slots(config, variables['params'], self.mesh))
    # Without a KV cache, a segment memory would keep the inputs of all its tokens.
    least = 0 if config.memory is None else 1
    return max(slots, least)

  def _place(self, inputs: token_batch.Batch) -> token_batch.Batch:
    """Returns the inputs of all rows on the devices."""
    return jax.device_put(inputs, self._row_sharding)

  def _row_reader(
    self, variables: Variables, rows: int
  ) -> Callable[[token_batch.Batch], Variables]:
    """Returns a function from the next inputs of all rows to their variables."""
    if not host_tables.exist(self.model.config):
      return lambda inputs: variables
    reader = row_reader.RowReader(self.model, self.mesh, variables, rows)
    return lambda inputs: _outside_the_mesh(reader, inputs)

  def _read_choices(
    self,
    variables: Variables,
    prompt: token_batch.Batch,
    choices_KxBxC: np.ndarray,
    valid_KxBxC: np.ndarray,
  ) -> tuple[Variables, Variables]:
    """Returns the variables for the prompts, and the variables of each choice."""
    if not host_tables.exist(self.model.config):
      return variables, {}
    choices = []
    for ids_BxC, valid_BxC in zip(choices_KxBxC[..., :-1], valid_KxBxC[..., :-1], strict=True):
      choices.append(token_batch.Batch(ids_BxC, None, np.zeros_like(ids_BxC, bool), valid_BxC))
    reader = row_reader.RowReader(self.model, self.mesh, variables, len(prompt.tokens_BxT))
    inputs = _outside_the_mesh(reader, prompt)
    return inputs, _outside_the_mesh(reader.peek, choices)


def _jit(program: Callable[..., Any], model: Any, donated: Any, outputs: Any) -> Callable[..., Any]:
  """Compiles a program of a model.

  Args:
    program: a function of `programs`, whose first argument is the model.
    model: the model.
    donated: names of the arguments whose buffers are reused.
    outputs: shardings of the results.
  """
  bound = functools.partial(program, model)
  return jax.jit(bound, donate_argnames=donated, out_shardings=outputs)


def _outside_the_mesh(function: Callable[..., Any], *args: Any) -> Any:
  """Calls a function in a new thread, without an active mesh."""
  with futures.ThreadPoolExecutor(1) as thread:
    return thread.submit(function, *args).result()


def _fetch_one_behind(results: Iterable[Any]) -> Iterator[Any]:
  """Yields results on the host, each after dispatching the next one."""
  for result, _ in itertools.pairwise(itertools.chain(results, [None])):
    yield jax.device_get(result)
