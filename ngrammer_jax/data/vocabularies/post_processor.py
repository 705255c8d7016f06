"""The post-processor of a tokenizer.json: it puts special tokens before and after a text."""

from collections.abc import Mapping
import json
from typing import Any, NamedTuple

Processor = Mapping[str, Any]  # as a tokenizer.json has it


class AddedIds(NamedTuple):
  """The ids added before and after a text."""

  before: tuple[int, ...]
  after: tuple[int, ...]


def added_ids(processor: Processor | None) -> AddedIds:
  """Returns the ids added to a single text by a post-processor; empty for None.

  Raises KeyError or TypeError for a damaged one.
  """
  before: tuple[int, ...] = ()
  after: tuple[int, ...] = ()
  for part in _parts(processor):  # each one encloses the result of earlier ones
    added = _added_by(part)
    before = added.before + before
    after = after + added.after
  return AddedIds(before, after)


def with_begin_token(content: bytes, token: str, token_id: int | None) -> bytes:
  """Returns a tokenizer.json that adds only one token, before each text.

  Other steps of its post-processor are kept. A tokenizer.json that already does so is unchanged.

  Args:
    content: the content of the file.
    token: the spelling of the token.
    token_id: its id; None: no token.
  """
  tokenizer = json.loads(content)
  processor = tokenizer.get('post_processor')
  before = () if token_id is None else (token_id,)
  if added_ids(processor) == AddedIds(before, ()):
    return content
  parts = [part for part in _parts(processor) if _added_by(part) == AddedIds((), ())]
  if token_id is not None:
    parts.append(_template(token, token_id))
  if len(parts) > 1:
    tokenizer['post_processor'] = {'type': 'Sequence', 'processors': parts}
  else:
    tokenizer['post_processor'] = parts[0] if parts else None
  return json.dumps(tokenizer, ensure_ascii=False).encode()


def _parts(processor: Processor | None) -> list[Processor]:
  """Returns the post-processors of a sequence, in order."""
  if processor is None:
    return []
  if processor['type'] != 'Sequence':
    return [processor]
  return [part for inner in processor['processors'] for part in _parts(inner)]


def _added_by(processor: Processor) -> AddedIds:
  """Returns the ids added by a post-processor other than a sequence."""
  if processor['type'] in ('BertProcessing', 'RobertaProcessing'):
    _, begin = processor['cls']
    _, end = processor['sep']
    return AddedIds((begin,), (end,))
  if processor['type'] != 'TemplateProcessing':
    return AddedIds((), ())
  before: list[int] = []
  after: list[int] = []
  added = before
  for piece in processor['single']:
    if 'Sequence' in piece:
      added = after
    else:
      name = piece['SpecialToken']['id']
      added += processor['special_tokens'][name]['ids']
  return AddedIds(tuple(before), tuple(after))


def _template(token: str, token_id: int) -> Processor:
  """Returns a post-processor with a token before a text; a pair of texts is one text."""
  begin = {'SpecialToken': {'id': token, 'type_id': 0}}
  first = {'Sequence': {'id': 'A', 'type_id': 0}}
  second = {'Sequence': {'id': 'B', 'type_id': 0}}
  return {
    'type': 'TemplateProcessing',
    'single': [begin, first],
    'pair': [begin, first, second],
    'special_tokens': {token: {'id': token, 'ids': [token_id], 'tokens': [token]}},
  }
