"""Figures of analyses."""

import json
import math
import pathlib
import types

import numpy as np
import pytest

from ngrammer_jax import analyze, runs
from ngrammer_jax.analysis import clusters, figures, spans
from tests.checks import bad_input


def test_a_figure_is_an_image_beside_its_result(tmp_path):
  path, contents = tmp_path / 'folder' / 'figure.png', {}
  with pytest.raises(ZeroDivisionError), figures.drawn_figure(contents, path):
    _ = 1 / 0
  assert not contents
  with figures.drawn_figure(contents, path) as axes:
    axes.plot([1, 2])
  assert contents[path].startswith(b'\x89PNG') and not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.parametrize('image_format', ['png', 'svg', 'pdf'])
def test_a_figure_is_the_same_bytes_when_it_is_drawn_again(tmp_path, monkeypatch, image_format):
  path, images = tmp_path / f'figure.{image_format}', []
  for start in ('1', '1000000000'):  # of the date in the file
    monkeypatch.setenv('SOURCE_DATE_EPOCH', start)
    with figures.drawn_figure(contents := {}, path) as axes:
      axes.plot([1, 2], label='a')
      axes.legend()
    images.append(contents[path])
  assert images[0] == images[1]


def test_panels_without_data_are_not_drawn(tmp_path):
  with figures.drawn_figure({}, tmp_path / 'spans.png', panels=2) as (left, right):
    figure = left.figure
    right.plot([1, 2])
  assert figure.axes == [right] and right.get_position().width > 0.6
  with figures.drawn_figure({}, tmp_path / 'both.png', panels=2) as axes:
    for panel in axes:
      panel.plot([1, 2])
  assert len(axes[0].figure.axes) == 2


def test_unwritable_path_is_reported_before_the_analysis(tmp_path):
  (tmp_path / 'file').write_text('')
  (tmp_path / 'folder').mkdir()
  for name, message in (
    ('folder', f'folder is a folder: name a file, such as {tmp_path}/folder/figure.png'),
    ('figure.txt', 'figure.txt has no suffix of an image: use .png, .svg or .pdf'),
    ('file/figure.png', f'file/figure.png: {tmp_path}/file is a file, expected a folder'),
  ):
    with bad_input(f'--figure={tmp_path}/{message}'), figures.drawn_figure({}, tmp_path / name):
      pytest.fail('the analysis ran')


def test_labels_of_tokens_show_spaces_and_line_breaks():
  labels = figures.token_labels(['', ' a', '.\n\n', '\t', '$5'])
  assert labels == ['¶', '_a', '.↵↵', '→', r'\$5']


def test_shaded_tokens_stand_side_by_side_and_are_darker_for_higher_values(panels):
  from matplotlib import patches

  texts = ['', 'word', ' ' + 'x' * 60, ' a']
  axes = panels(1)
  figures.draw_shaded_texts(axes, ['first', 'second'], texts, np.array([[0, 0.5, 1, 0.7]] * 2))
  shades = [patch for patch in axes.patches if isinstance(patch, patches.Rectangle)]
  corners = [patch.get_xy() for patch in shades]
  columns = [x for x, _ in corners]
  lines = [y for _, y in corners]
  assert columns == [0, 1, 0, 61] * 2 and [patch.get_width() for patch in shades[:2]] == [1, 4]
  assert lines[0] == lines[1] < lines[2] == lines[3] < lines[4]
  lightness = [sum(patch.get_facecolor()[:3]) for patch in shades[:4]]
  assert lightness[0] > lightness[1] > lightness[3] > lightness[2]
  # Everything is inside the panel, which is read from top to bottom.
  bottom, top = axes.get_ylim()
  for patch in axes.patches:
    box = patch.get_path().transformed(patch.get_patch_transform()).get_extents()
    assert 0 <= box.xmin and box.xmax <= axes.get_xlim()[1] and top < box.ymin < box.ymax < bottom


@pytest.fixture
def panels():
  """Returns a function that makes the panels of a figure."""
  from matplotlib import pyplot

  yield lambda count: pyplot.subplots(1, count, layout='constrained')[1]
  pyplot.close('all')


def labels_of(axes):
  return axes.get_legend_handles_labels()[1]


def test_names_of_runs_tell_them_apart():
  workdirs = [pathlib.Path('runs/a/seed_0'), pathlib.Path('runs/b/seed_0')]
  assert figures.run_labels(workdirs, None) == ['a/seed_0', 'b/seed_0']
  assert figures.run_labels([*workdirs[:1], pathlib.Path('x')], None) == ['seed_0', 'x']
  assert figures.run_labels([pathlib.Path('x')] * 2, None) == ['x', 'x']
  assert figures.run_labels(workdirs, ['first', 'second']) == ['first', 'second']
  with bad_input(
    '--label is given 1 times, but --workdir 2 times: set one for each, in the same order, or none'
  ):
    figures.run_labels(workdirs, ['first'])


def test_every_span_is_inside_the_figure_and_has_its_head(panels):
  result = {'spans': [[32.0, 256.0], [64.0, 40.0]], 'limit': 256, 'along': None}
  left, right = axes = panels(2)
  spans.plot(result | {'persistent': None}, axes)
  assert labels_of(left) == ['head 0', 'head 1', 'mean', 'limit'] and not right.has_data()
  dots = np.concatenate([dots.get_offsets() for dots in left.collections[:2]])
  assert dots[:, 1].tolist() == [32, 64, 256, 40] and len(set(dots[:, 0])) == 4
  for values, (low, high) in zip(dots.T, (left.get_xlim(), left.get_ylim()), strict=True):
    assert low < values.min() and values.max() < high
  assert left.lines[-1].get_ydata() == [256, 256]  # the limit
  left, right = axes = panels(2)
  spans.plot({'spans': None, 'along': None, 'persistent': [[0.1, 1.0]]}, axes)
  assert not left.has_data() and right.get_ylim()[1] > 1
  assert [text.get_text() for text in right.figure.legends[0].get_texts()] == [
    'head 0',
    'head 1',
    'mean',
  ]


def test_heads_of_clusters_are_bars_not_points_of_a_line(panels):
  coherence = {'clusters': 0.2, 'random': 0.0}
  head = {'members': {0: {'tokens': ['a', 'b']}, 1: {'tokens': ['c']}}}
  head |= {'coherence': coherence, 'coherence_elsewhere': coherence}
  axes = panels(2)
  clusters.plot({'heads': [head, head]}, axes)
  _, coherences = axes
  assert [bar.get_height() for bar in coherences.patches] == [0.2] * 4
  assert sorted(labels_of(coherences)) == [
    'all features',
    "other heads' features",
    'random clusters',
  ]
  assert coherences.get_ylim()[1] < 0.22  # no empty band


def test_an_analysis_that_fails_writes_nothing(tmp_path, monkeypatch):
  """Here its result has no form in JSON."""
  run = types.SimpleNamespace(split=lambda name: None)
  monkeypatch.setattr(spans, 'check_applicable', lambda run: None)
  monkeypatch.setattr(runs, 'load_run', lambda *args: run)
  result = {
    'step': 4,
    'spans': [[math.nan]],
    'limit': 8,
    'ramp': 2,
    'along': None,
    'persistent': None,
  }
  monkeypatch.setattr(spans, 'analyze', lambda *args: result)
  with pytest.raises(ValueError, match='Out of range float'):
    analyze.main(['spans', f'--workdir={tmp_path}'])
  assert not list(tmp_path.iterdir())
  result['spans'] = [[2.0, 8.0]]
  titles = []
  monkeypatch.setattr(figures, 'set_title', lambda axes, title: titles.append(title))
  analyze.main(['spans', f'--workdir={tmp_path}', '--label=short', '--split=test'])
  assert sorted(path.name for path in tmp_path.iterdir()) == [
    'spans_test.json',
    'spans_test.png',
  ]
  assert json.loads((tmp_path / 'spans_test.json').read_text()) == result
  assert titles == ['short, step 4, test']
