"""Keeps JAX from loading libtpu on a machine without a TPU.

JAX loads libtpu wherever it is installed. Without a TPU, libtpu prints several lines of errors.
"""

from collections.abc import Iterator
import contextlib
import glob
import os
import sys

# Google's kernel drivers create these. Containers with a TPU have them too.
DEVICE_FILES = ('/dev/accel*', '/dev/vfio/*')
LIBRARY = 'TPU_LIBRARY_PATH'  # environment variable
# These say nothing about devices: libtpu and JAX set them on every machine.
NOT_A_SIGN = {LIBRARY, 'TPU_SKIP_MDS_QUERY'}


def may_have_tpu() -> bool:
  """Whether JAX may look for a TPU, by a device file or the user's environment."""
  if os.environ.get('JAX_PLATFORMS') or 'JAX_FORCE_TPU_INIT' in os.environ:
    return True
  if any(glob.glob(pattern) for pattern in DEVICE_FILES):
    return True
  # Clusters describe their TPUs in TPU_WORKER_ID, TPU_TOPOLOGY and others.
  return any(name.startswith('TPU_') for name in os.environ.keys() - NOT_A_SIGN)


def skip_without_tpu() -> None:
  """Hides libtpu from JAX in this process if there is no TPU. Other backends are unaffected.

  Call it before JAX looks for devices.
  """
  if not may_have_tpu():
    sys.modules['libtpu'] = None  # an import raises ImportError
    os.environ.pop(LIBRARY, None)


@contextlib.contextmanager
def skipped_without_tpu() -> Iterator[None]:
  """Like `skip_without_tpu`, but only within the body, for processes of others."""
  was_imported = 'libtpu' in sys.modules
  module = sys.modules.get('libtpu')
  library = os.environ.get(LIBRARY)
  skip_without_tpu()
  try:
    yield
  finally:
    if was_imported:
      sys.modules['libtpu'] = module
    else:
      sys.modules.pop('libtpu', None)
    if library is not None:
      os.environ[LIBRARY] = library
