"""Every example is answered once on any number of hosts."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from tests.evaluation import hosts


@pytest.mark.slow
def test_two_hosts_answer_as_one():
  alone = hosts.found()
  assert len(set(alone['rank'])) > 1 and len(set(alone['greedy'])) > 1
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  root = pathlib.Path(__file__).resolve().parents[2]
  processes = [
    subprocess.Popen(
      [sys.executable, '-m', 'tests.evaluation.hosts', '2', str(me), str(port)],
      cwd=root,
      env=os.environ | {'PYTHONPATH': str(root)},
      stdout=subprocess.PIPE,
      text=True,
    )
    for me in range(2)
  ]
  try:
    for process in processes:
      found = json.loads(process.communicate(timeout=240)[0].splitlines()[-1])
      assert found['nats'] == pytest.approx(alone['nats'], rel=1e-5)
      assert found['rank'] == alone['rank'] and found['greedy'] == alone['greedy']
  finally:
    for process in processes:
      process.kill()
