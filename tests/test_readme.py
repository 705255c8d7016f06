"""Files, links, errors and configs in the README and the docs are correct."""

import pathlib
import re
import runpy

import pytest

import ngrammer_jax
from ngrammer_jax import command_line, config, errors

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEXT = (ROOT / 'README.md').read_text(encoding='utf-8')


def test_files_that_are_named_exist():
  paths = re.findall(r'(?:configs|launch|notebooks|docs|ngrammer_jax)/[\w/]+\.\w+', TEXT)
  assert paths and not [name for name in paths if not (ROOT / name).exists()]


def test_every_page_of_the_docs_is_in_the_navigation():
  navigation = (ROOT / 'mkdocs.yml').read_text().partition('\nnav:')[2]
  listed = re.findall(r'[\w/]+\.md', navigation)
  pages = {path.name for path in (ROOT / 'docs').glob('*.md')}
  assert sorted(listed) == sorted(pages | {'configuration.md'})  # generated


def find_anchors(page):
  """Returns the anchors of the headings of a page."""
  headings = re.findall(r'(?m)^#+ (.+)$', page.read_text(encoding='utf-8'))
  plain = [re.sub(r'[^\w\- ]', '', heading.lower()) for heading in headings]
  return {heading.strip().replace(' ', '-') for heading in plain}


def test_links_between_pages_lead_somewhere():
  for path in [ROOT / 'README.md', *(ROOT / 'docs').glob('*.md')]:
    links = re.findall(r'\]\(([^)#:]+)(?:#([^)]*))?\)', path.read_text(encoding='utf-8'))
    for link, anchor in links:
      target = path.parent / link
      assert target.exists() or target.name == 'configuration.md', (path.name, link)
      if anchor and target.suffix == '.md' and target.exists():
        assert anchor in find_anchors(target), (path.name, link, anchor)


def test_the_version_to_cite_is_that_of_the_package():
  index = (ROOT / 'docs' / 'index.md').read_text(encoding='utf-8')
  assert f'version = {{{ngrammer_jax.__version__}}}' in index
  assert f'version: {ngrammer_jax.__version__}\n' in (ROOT / 'CITATION.cff').read_text()


def test_errors_are_quoted_to_the_letter():
  settings = {'model.ngram.vocab': 8, 'model.ngram.dim': 64}
  guide = (ROOT / 'docs' / 'training.md').read_text(encoding='utf-8')
  quoted = re.findall(r'^error: (.*)$', guide, re.M)
  for (key, value), message in zip(settings.items(), quoted, strict=True):
    fields = command_line.load_file(str(ROOT / 'configs' / 'quickstart.py'))
    fields['model']['ngram'][key.split('.')[-1]] = value
    with pytest.raises(errors.BadInput) as caught:
      config.resolve(fields)
    assert str(caught.value) == message


def test_every_config_resolves():
  matches = sorted((ROOT / 'configs').glob('[!_]*.py'))
  assert matches
  for path in matches:
    variants = runpy.run_path(str(path)).get('VARIANTS', ())
    specs = [str(path), *(f'{path}:{name}' for name in variants)]
    resolved = [config.resolve(command_line.load_file(spec)) for spec in specs]
    # The default is a variant.
    assert len({repr(r) for r in resolved}) == max(len(specs) - 1, 1), path
