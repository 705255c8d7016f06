"""A headless browser, where one is installed."""

import pathlib
import shutil
import subprocess

import pytest

BROWSERS = ('chromium', 'chromium-browser', 'google-chrome', 'chrome')


def dump_dom(address: str, profile: pathlib.Path, width: int, *flags: str) -> str:
  """Returns the HTML of a page after its scripts have run; skips the test without a browser."""
  browser = next(filter(None, map(shutil.which, BROWSERS)), None)
  if browser is None:
    pytest.skip(f'no browser: none of {", ".join(BROWSERS)} is installed')
  command = [browser, '--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', *flags]
  command += ['--no-first-run', '--disable-background-networking', '--disable-component-update']
  command += ['--disable-sync', '--hide-scrollbars', f'--user-data-dir={profile}']
  command += ['--allow-file-access-from-files', '--virtual-time-budget=5000', '--dump-dom']
  command += [f'--window-size={width},1000', address]
  return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
