"""Line charts as HTML with inline SVG, without scripts.

The drawing of a chart is 100 x 100 units and is stretched to the width of the page. Strokes do not
stretch, and the numbers at the axes are HTML, so that a chart is legible on a phone and on a desk.
`web_page.css` has the sizes and the colors.
"""

from collections.abc import Sequence
import html
import math
from typing import NamedTuple

COLORS = 8  # of lines, c0 to c7 in web_page.css; further lines repeat them
MAX_POINTS = 400  # points drawn of a line, at equal distances
MAX_TICKS = 6
INK = -1  # the color of the text


class Line(NamedTuple):
  """A line of a chart.

  Attributes:
    name: text of the legend.
    points: x and y of each point.
    color: number of the color, or INK.
    has_dots: whether points are visible; if not, they only show their values to the pointer.
  """

  name: str
  points: Sequence[tuple[float, float]]
  color: int
  has_dots: bool = True


class Axis(NamedTuple):
  """An axis of a chart.

  Attributes:
    label: what is drawn, with its unit.
    is_log: whether the axis is logarithmic, for values above 0.
    from_zero: whether it begins at 0.
    names: names of the values 0, 1, 2, ..., instead of numbers.
  """

  label: str
  is_log: bool = False
  from_zero: bool = False
  names: Sequence[str] | None = None


class _Scale:
  """Places the values of an axis between 0 and 100, and chooses its ticks."""

  def __init__(self, axis: Axis, values: Sequence[float], margin: float):
    self._axis = axis
    self._convert = math.log10 if axis.is_log else float
    low, high = self._convert(min(values)), self._convert(max(values))
    low = min(low, 0.0) if axis.from_zero else low
    margin *= (high - low) or abs(high) or 1.0
    self._low, self._high = low - margin * (not axis.from_zero), high + margin

  def place(self, value: float) -> float:
    """Returns the place of a value in percent, from the low end."""
    return 100 * (self._convert(value) - self._low) / (self._high - self._low)

  def ticks(self) -> list[tuple[float, str]]:
    """Returns the place and the text of each tick."""
    if self._axis.names is not None:
      stride = -(-len(self._axis.names) // MAX_TICKS)
      return [(self.place(i), name) for i, name in enumerate(self._axis.names) if i % stride == 0]
    if self._axis.is_log and self._high - self._low > 1:
      exponents = range(math.floor(self._low), math.ceil(self._high) + 1)
      factors = (1, 2, 5) if len(exponents) <= 4 else (1,)
      ticks = [factor * 10.0**exponent for exponent in exponents for factor in factors]
    else:  # a logarithmic axis of less than a decade may have no power of ten
      low, high = (10.0**x if self._axis.is_log else x for x in (self._low, self._high))
      step = _round_step((high - low) / MAX_TICKS)
      ticks = [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
    placed = [(self.place(tick), format_number(tick)) for tick in ticks]
    return [(place, text) for place, text in placed if -1e-6 <= place <= 100 + 1e-6]


def _round_step(step: float) -> float:
  """Returns the next larger 1, 2 or 5 times a power of ten."""
  power = 10.0 ** math.floor(math.log10(step))
  return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def format_number(value: float) -> str:
  """Formats a number briefly, as 1.5M, 20k or 0.05."""
  for unit, name in ((1e12, 'T'), (1e9, 'B'), (1e6, 'M'), (1e3, 'k')):
    if abs(value) >= unit:
      return f'{value / unit:.4g}{name}'
  return f'{value:.4g}'


def line_chart(lines: Sequence[Line], x: Axis, y: Axis) -> str:
  """Returns a chart of lines, with a legend if there are several.

  The title of a point, which a browser shows under the pointer, has its values.
  """
  points = [point for line in lines for point in line.points]
  x_scale = _Scale(x, [point[0] for point in points], 0.02)
  y_scale = _Scale(y, [point[1] for point in points], 0.06)
  horizontal = [(100 - place, text) for place, text in y_scale.ticks()]
  grid = ''.join(f'M0 {place:.2f}H100' for place, _ in horizontal)
  drawn = ''.join(_draw(line, x, x_scale, y_scale) for line in lines)
  label = html.escape(f'{y.label} by {x.label}', quote=True)
  ticks = [
    f'<span class="x" style="left:{p:.2f}%">{html.escape(t)}</span>' for p, t in x_scale.ticks()
  ]
  ticks += [f'<span class="y" style="top:{place:.2f}%">{text}</span>' for place, text in horizontal]
  keys = [f'<span class="{_color(line)}">{html.escape(line.name)}</span>' for line in lines]
  return (
    f'<figure class="chart"><div class="y-label">{html.escape(y.label)}</div><div class="plot">'
    f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{label}">'
    f'<path class="grid" d="{grid}"/>{drawn}</svg>{"".join(ticks)}</div>'
    f'<div class="x-label">{html.escape(x.label)}</div>'
    + (f'<figcaption class="legend">{"".join(keys)}</figcaption>' if len(lines) > 1 else '')
    + '</figure>\n'
  )


def _color(line):
  return 'ink' if line.color == INK else f'c{line.color % COLORS}'


def _draw(line, x, x_scale, y_scale):
  """Returns the SVG of a line: its path, and points of length 0 with round ends."""
  stride = -(-len(line.points) // MAX_POINTS)
  # The last point of all is drawn.
  points = list(line.points)[::-1][::stride][::-1]
  places = [f'{x_scale.place(a):.2f} {100 - y_scale.place(b):.2f}' for a, b in points]
  name, dots = html.escape(line.name), []
  for (a, b), place in zip(points, places, strict=True):
    value = format_number(a) if x.names is None else html.escape(x.names[round(a)])
    dots.append(f'<path d="M{place}h0"><title>{name}: {value}, {b:.6g}</title></path>')
  kind = 'dots' if line.has_dots else 'dots hidden'
  return (
    f'<g class="{_color(line)}"><path class="line" d="M{"L".join(places)}"/>'
    f'<g class="{kind}">{"".join(dots)}</g></g>'
  )
