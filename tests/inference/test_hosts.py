"""Results do not depend on the number of hosts."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from tests.inference import hosts


@pytest.mark.slow
def test_two_hosts_match_one_host():
  expected = hosts.evaluate()
  assert len(set(expected['rank'])) > 1 and len(set(expected['greedy'])) > 1
  with socket.socket() as unused:
    unused.bind(('localhost', 0))
    port = unused.getsockname()[1]
  root = pathlib.Path(__file__).resolve().parents[2]
  processes = [
    subprocess.Popen(
      [sys.executable, '-m', 'tests.inference.hosts', '2', str(host_id), str(port)],
      cwd=root,
      env=os.environ | {'PYTHONPATH': str(root)},
      stdout=subprocess.PIPE,
      text=True,
    )
    for host_id in range(2)
  ]
  try:
    for process in processes:
      results = json.loads(process.communicate(timeout=240)[0].splitlines()[-1])
      assert results['nats'] == pytest.approx(expected['nats'], rel=1e-5)
      assert results['rank'] == expected['rank'] and results['greedy'] == expected['greedy']
  finally:
    for process in processes:
      process.kill()
