"""The documentation site: nothing of it is loaded from outside, and it is searched on the disk."""

import re
import subprocess
import sys

import pytest

from tests import browser, code_lines
from tests.documentation import ROOT

pytest.importorskip('mkdocs', reason='the extra docs is not installed')
pytestmark = pytest.mark.slow
# The site keeps its own links; what a page loads has these attributes.
LOADED = re.compile(r'<(?:script|img|iframe|source)[^>]*\bsrc="([^"]+)|<link[^>]*\bhref="([^"]+)')


@pytest.fixture(scope='module')
def site(tmp_path_factory):
  folder = tmp_path_factory.mktemp('site')
  subprocess.run(
    [sys.executable, '-m', 'mkdocs', 'build', '--quiet', '--site-dir', folder], cwd=ROOT, check=True
  )
  return folder


def test_pages_load_nothing_from_outside(site):
  pages = list(site.rglob('*.html'))
  assert len(pages) >= 32
  for page in pages:
    loaded = [script or link for script, link in LOADED.findall(page.read_text(encoding='utf-8'))]
    assert loaded and not [address for address in loaded if re.match(r'\w+:|//', address)], page
  for style in site.rglob('*.css'):
    assert not re.search(r'url\(["\']?(https?:|//)', style.read_text(encoding='utf-8')), style


def test_reading_lists_have_their_lengths(site):
  page = (site / 'reading.html').read_text(encoding='utf-8')
  lists = code_lines.reading_lists()
  assert len(lists) >= 7
  for name, paths in lists.items():
    files, code, _ = code_lines.count(paths)
    assert re.search(rf'>{name}<.*\n<p>{files} files, {code:,} lines of code', page), name


def test_cells_of_tables_can_be_narrow(site):
  """Long names break, numbers and their errors do not."""
  memories = (site / 'ngram_memories.html').read_text(encoding='utf-8')
  assert '<code>before_<wbr>attention</code>' in memories
  assert '<wbr>' not in re.sub(r'<td.*?</td>', '', memories, flags=re.DOTALL)
  results = (site / 'results.html').read_text(encoding='utf-8')
  assert '±&nbsp;0.00' in results and '± 0.00' not in results


def test_a_page_on_the_disk_can_be_searched(site, tmp_path):
  page = f'{(site / "index.html").as_uri()}?q=accumulator'
  shown = browser.dump_dom(page, tmp_path, 1300)
  found = re.findall(r'href="([^"]+)" class="md-search-result__link"', shown)
  assert any('results.html' in address for address in found)
