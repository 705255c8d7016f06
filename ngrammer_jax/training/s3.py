"""Orbax on s3://, which it leaves out.

It asks TensorStore for files or for gs://, though TensorStore knows s3:// as well.
"""

import functools
import os
from typing import Any

ENDPOINT = 'AWS_ENDPOINT_URL'  # in the environment, of a store that is not Amazon's


@functools.cache
def teach() -> None:
  """From now on Orbax asks for s3:// as it does for gs://."""
  from orbax.checkpoint._src.serialization import tensorstore_utils

  known = tensorstore_utils.build_kvstore_tspec

  def build(directory, *given, **options):
    if not directory.startswith('s3://'):
      return known(directory, *given, **options)
    return _of_s3(known(directory.replace('s3://', 'gs://', 1), *given, **options))

  tensorstore_utils.build_kvstore_tspec = build


def _of_s3(spec: Any) -> Any:
  """A place that TensorStore is asked for, in S3 instead of GCS."""
  if not isinstance(spec, dict):
    return spec
  spec = {key: _of_s3(value) for key, value in spec.items()}
  if spec.get('driver') == 'gcs':
    spec['driver'] = 's3'
    if ENDPOINT in os.environ:
      region = os.environ.get('AWS_REGION') or os.environ.get('AWS_DEFAULT_REGION', 'us-east-1')
      spec |= {'endpoint': os.environ[ENDPOINT], 'aws_region': region}
  return spec
