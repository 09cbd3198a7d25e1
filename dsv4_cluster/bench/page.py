"""The frame of a report: one HTML file that needs nothing else, readable in light and dark, on screen and on paper."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from dsv4_cluster.bench.charts import number
from dsv4_cluster.bench.compare import Comparison

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5c6670; --rule: #e3e7eb; --page: #f6f7f9; --card: #fff;
  --warn: #fff4d6; --warn-ink: #6b4a00; --good: #1a7f37; --bad: #b42318;
  --c0: #2563c9; --c1: #d9622b; --c2: #1b8a6b; --c3: #8a4fc4; --c4: #b8860b; --c5: #c23b6f; --c6: #4a6a7c; 
  --c7: #6b8e23 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #98a3ad; --rule: #2d343b; --page: #14181c;
  --card: #1c2127; --warn: #3a2f10; --warn-ink: #f2d48a; --good: #4cc26a; --bad: #ff7b6b;
  --c0: #6ea8ff; --c1: #ff9a63; --c2: #4fcfa6; --c3: #c193f5; --c4: #e5be4f; --c5: #f283ac; --c6: #93b4c6; 
  --c7: #b0d05f } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
main { max-width: 1060px; margin: 0 auto; padding: 32px 20px 60px }
h1 { font-size: 24px; margin: 0 0 2px; letter-spacing: -0.01em }
h2 { font-size: 16px; margin: 34px 0 12px }
.sub { color: var(--soft); margin: 0 }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 22px }
.tile, figure, .card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px }
.tile { padding: 13px 15px }
.tile b { display: block; font-size: 24px; line-height: 1.25; font-weight: 650; font-variant-numeric: tabular-nums }
.tile b small { font-size: 13px; font-weight: 400; color: var(--soft) }
.tile span { color: var(--soft); font-size: 12.5px }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(360px, 100%), 1fr)); gap: 14px }
figure { margin: 0; padding: 13px 14px 8px; break-inside: avoid }
figcaption { font-weight: 600 }
svg { width: 100%; height: auto; display: block }
.legend { font-size: 12px; color: var(--soft) }
.key { margin-right: 14px; white-space: nowrap }
.key i { display: inline-block; width: 12px; height: 3px; border-radius: 2px; background: var(--c); 
  margin: 0 6px 3px 0 }
.grid line, line.grid { stroke: var(--rule) }
line.axis { stroke: var(--soft); stroke-opacity: 0.7 }
text { fill: var(--soft); font-size: 11px; font-family: inherit }
text.label { font-size: 11.5px }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round }
.area { fill: var(--c); opacity: 0.14 }
.dot { fill: var(--c); stroke: var(--card); stroke-width: 1.5 }
.card { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: 7px 12px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule) }
tr:last-child td { border-bottom: 0 }
th { color: var(--soft); font-weight: 500; font-size: 12.5px }
th:first-child, td:first-child { text-align: left }
th.text, td.text { text-align: left }
td.text { white-space: normal }
td.good { color: var(--good) } td.bad { color: var(--bad) }
.warning { background: var(--warn); color: var(--warn-ink); border-radius: 8px; padding: 9px 14px; margin: 14px 0 0 }
details { margin-top: 28px } summary { cursor: pointer; color: var(--soft) }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 12px 14px; overflow-x: auto;
  font-size: 12px }
@media print { body { background: none } main { padding: 0 } }
""" + "".join(f".s{index} {{ --c: var(--c{index}) }}\n" for index in range(8))


@dataclass(frozen=True, slots=True)
class Cell:
    """A table cell; `kind` is a class of the style sheet: good, bad or text."""

    text: str
    kind: str = ""


Row = Sequence[str | Cell]


@dataclass(frozen=True, slots=True)
class Tile:
    """One large number."""

    value: str
    unit: str
    caption: str


def page(title: str, subtitle: str, sections: Sequence[str]) -> str:
    """A whole document, well-formed as XML too. sections: markup."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><p class="sub">{escape(subtitle)}</p>{"".join(sections)}</main></body></html>\n'
    )


def tiles(entries: Sequence[Tile]) -> str:
    """A row of large numbers."""
    inner = "".join(
        f'<div class="tile"><b>{escape(tile.value)} <small>{escape(tile.unit)}</small></b>'
        f"<span>{escape(tile.caption)}</span></div>"
        for tile in entries
    )
    return f'<div class="tiles">{inner}</div>'


def warning(text: str) -> str:
    """A line that the reader must not miss."""
    return f'<p class="warning">{escape(text)}</p>'


def charts(title: str, figures: Sequence[str]) -> str:
    """A heading and its plots; nothing without plots."""
    drawn = [figure for figure in figures if figure]
    return f'<h2>{escape(title)}</h2><div class="grid">{"".join(drawn)}</div>' if drawn else ""


def table(title: str, header: Sequence[str], rows: Sequence[Row]) -> str:
    """A heading and a table."""
    kinds = [value.kind if isinstance(value, Cell) else "" for value in rows[0]] if rows else [""] * len(header)
    head = "".join(
        f'<th class="text">{escape(name)}</th>' if kind == "text" else f"<th>{escape(name)}</th>"
        for name, kind in zip(header, kinds, strict=True)
    )
    body = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    return f'<h2>{escape(title)}</h2><div class="card"><table><tr>{head}</tr>{body}</table></div>'


def comparison_section(comparison: Comparison) -> str:
    """A table of two runs; gains above 1 are better, whatever the metric."""
    if not comparison.changes:
        return warning("The baseline shares no measurement with this run: compare runs of the same load.")
    rows: list[Row] = [
        [
            change.key,
            f"{number(change.before)} {change.unit}",
            f"{number(change.after)} {change.unit}",
            Cell(f"{change.gain:.2f}x", change.verdict),
        ]
        for change in comparison.changes
    ]
    return table("Against the baseline", ["Metric", "baseline", "this run", "gain"], rows)


def fold(title: str, text: str) -> str:
    """Preformatted text, closed at first."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _cell(value: str | Cell) -> str:
    cell = value if isinstance(value, Cell) else Cell(value)
    kind = f' class="{cell.kind}"' if cell.kind else ""
    return f"<td{kind}>{escape(cell.text)}</td>"
