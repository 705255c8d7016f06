"""Parts of a model, by the scopes of its instructions: `op_name` of a compiled program."""

import re

# The last match in a scope counts.
PARTS = {
  'saves of the scan': r'_run/(?:while/body/)?(?:jit\(dynamic|dynamic_|stack|concatenate|squeeze)',
  'feed-forward': 'feed_forward/',
  'projections': r'attention/(?:attention\.\w+/)*(?:query|key|value|out)/',
  'attention kernels': 'splash|dot_product_attention',
  'rotary': r'rotary|attention\._rotate_and_scale',
  'other attention': 'attention/',
  'residual': r'\._residual/',
  'norms': r'\w*norm/',
  'cross-entropy': r'\.(?:scores|logits)\b',
  'optimizer': 'optimizer',
  'codebook': 'quantizer|codebook',
  'table': r'ngrammer|ngram_memory',
  'embedding': r'\.embed\b',
}
SCOPES = re.compile('|'.join(f'({pattern})' for pattern in PARTS.values()))


def part_of(scope: str) -> str:
  """Returns the part of the model that the scope of an instruction belongs to."""
  matches = [*SCOPES.finditer(scope)]
  if not matches:
    return 'other'
  return [*PARTS][matches[-1].lastindex - 1]
