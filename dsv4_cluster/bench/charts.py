"""Line charts as inline SVG: no script, no external file, colours from the page's style sheet.

Text is escaped here and nowhere else. Colours are the classes `s0` to `s7`, in order, the same for a series everywhere.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

NUM_COLOURS = 8
_WIDTH, _HEIGHT = 460, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 24, 14, 42  # room for tick labels and axis names
_NUM_TICKS = 5
_FLAT = 1e-6  # a range this small, or this small against its values, is a single value


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line. `colour` picks the class; a series with `has_markers` shows its points, one with `is_area` is filled."""

    label: str
    points: tuple[tuple[float, float], ...]
    colour: int = 0
    has_markers: bool = False
    is_area: bool = False
    is_dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One plot. With `x_names`, x values are indices of these names, equally spaced."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_names: tuple[str, ...] = ()


def render(chart: Chart) -> str:
    """A `<figure>` with caption, legend (for two series or more) and the plot."""
    drawn = [series for series in chart.series if series.points]
    if not drawn:
        return ""
    keys = "".join(_legend_entry(series) for series in drawn)
    legend = f'<div class="legend">{keys}</div>' if len(drawn) > 1 else ""
    return f"<figure><figcaption>{escape(chart.title)}</figcaption>{legend}{_plot(chart, drawn)}</figure>"


def nice_ticks(low: float, high: float) -> list[float]:
    """About _NUM_TICKS round values (1, 2, 2.5 or 5 times a power of ten) that cover [low, high]."""
    span, size = high - low, max(abs(low), abs(high))
    if span <= _FLAT * max(size, 1.0):
        span = size if size > _FLAT else 1.0
    rough = span / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil((low + span) / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def number(value: float) -> str:
    """Short decimal: three significant digits, thousands with a thin separator, no exponent."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(digits, 4)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@dataclass(frozen=True, slots=True)
class _Frame:
    """Data coordinates to pixels."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (_HEIGHT - _TOP - _BOTTOM)


def _plot(chart: Chart, drawn: Sequence[Series]) -> str:
    xs = [x for series in drawn for x, _ in series.points]
    ys = [y for series in drawn for _, y in series.points]
    y_ticks = nice_ticks(min(0.0, *ys), max(*ys, 0.0))
    if chart.x_names:
        x_ticks = [(float(index), name) for index, name in enumerate(chart.x_names)]
        frame = _Frame(-0.5, len(chart.x_names) - 0.5, y_ticks[0], y_ticks[-1])
    else:
        values = nice_ticks(min(xs), max(xs))
        x_ticks = [(value, number(value)) for value in values]
        frame = _Frame(values[0], values[-1], y_ticks[0], y_ticks[-1])
    parts = [_axes(chart, frame, x_ticks, y_ticks), *(_line(frame, chart, series) for series in drawn)]
    name = quoteattr(f"{chart.title}: {chart.y_label} over {chart.x_label}")
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label={name}>{"".join(parts)}</svg>'


def _axes(chart: Chart, frame: _Frame, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[float]) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for value in y_ticks:
        y = frame.y(value)
        kind = "axis" if value == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">{number(value)}</text>')
    for value, name in x_ticks:
        x = frame.x(value)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{escape(name)}</text>')
    middle_x, middle_y = (_LEFT + right) / 2, (_TOP + bottom) / 2
    parts.append(
        f'<text class="label" x="{middle_x}" y="{_HEIGHT - 7}" text-anchor="middle">{escape(chart.x_label)}</text>'
    )
    parts.append(
        f'<text class="label" transform="translate(13 {middle_y}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y_label)}</text>"
    )
    return "".join(parts)


def _line(frame: _Frame, chart: Chart, series: Series) -> str:
    pixels = [(frame.x(x), frame.y(y)) for x, y in series.points]
    path = " ".join(f"{'M' if index == 0 else 'L'}{x:.1f} {y:.1f}" for index, (x, y) in enumerate(pixels))
    kind = f"s{series.colour % NUM_COLOURS}"
    parts = []
    if series.is_area:
        base = frame.y(0)
        closed = f"{path} L{pixels[-1][0]:.1f} {base:.1f} L{pixels[0][0]:.1f} {base:.1f} Z"
        parts.append(f'<path class="area {kind}" d="{closed}"/>')
    dashes = ' stroke-dasharray="5 4"' if series.is_dashed else ""
    parts.append(f'<path class="line {kind}" d="{path}"{dashes}/>')
    if series.has_markers:
        for (x, y), (x_value, y_value) in zip(pixels, series.points, strict=True):
            x_name = chart.x_names[int(x_value)] if chart.x_names else number(x_value)
            tip = escape(f"{series.label}: {number(y_value)} at {x_name}")
            parts.append(f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{tip}</title></circle>')
    return "".join(parts)


def _legend_entry(series: Series) -> str:
    return f'<span class="key s{series.colour % NUM_COLOURS}"><i></i>{escape(series.label)}</span>'
