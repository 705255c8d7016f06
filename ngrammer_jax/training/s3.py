"""Orbax on s3://, which it leaves out.

TensorStore, through which Orbax writes, knows S3 as it knows GCS; Orbax asks it for gs:// alone.
"""

import functools
import os
from typing import Any

from orbax.checkpoint._src.serialization import tensorstore_utils

ENDPOINT = 'AWS_ENDPOINT_URL'  # of a store that is not Amazon's, in the environment


@functools.cache
def teach() -> None:
  """From now on Orbax asks TensorStore for s3:// too."""
  of_gcs = tensorstore_utils.build_kvstore_tspec

  def build(directory, *given, **options):
    if not directory.startswith('s3://'):
      return of_gcs(directory, *given, **options)
    return _of_s3(of_gcs(directory.replace('s3://', 'gs://', 1), *given, **options))

  tensorstore_utils.build_kvstore_tspec = build


def _of_s3(spec: Any) -> Any:
  """The same place of TensorStore, in S3 instead of GCS."""
  if not isinstance(spec, dict):
    return spec
  spec = {key: _of_s3(value) for key, value in spec.items()}
  if spec.get('driver') == 'gcs':
    spec['driver'] = 's3'
    if ENDPOINT in os.environ:
      region = os.environ.get('AWS_REGION') or os.environ.get('AWS_DEFAULT_REGION', 'us-east-1')
      spec |= {'endpoint': os.environ[ENDPOINT], 'aws_region': region}
  return spec
