"""Draws a step as HTML and inline SVG, without scripts: lanes, memory over time, and throughput curves.

Text is HTML, so it stays legible on every screen; shapes are SVG, stretched to the width of the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from math import floor, log10

from lightning_protrain.planner import step_time as kinds
from lightning_protrain.planner.explain import short_bytes, short_seconds
from lightning_protrain.planner.lanes import LANES, Work, work_of
from lightning_protrain.report.chart_data import Charts, Moment, Rate

# Colour names in page.css; a chart shows at most as many kinds.
COLOURS = "abcdefg"
_KIND_COLOURS = {
    kinds.FORWARD: "a",
    kinds.BACKWARD: "d",
    kinds.RECOMPUTE: "e",
    kinds.UPDATE: "c",
    kinds.WEIGHTS: "b",
    kinds.GRADIENTS: "f",
}
# Width of a chart in SVG units. Two spans of one kind less than GAP apart are drawn as one if they are of the same
# unit, or if one of them is shorter than SHORT.
WIDTH, GAP, SHORT = 1000, 0.5, 2.0


def document(title: str, body: str) -> str:
    """Return a whole page that loads nothing from elsewhere."""
    style = files("lightning_protrain.report").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{style}</style></head>\n<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return a legend from pairs (colour, text)."""
    spans = (f'<span><i style="background:var(--{colour})"></i>{escape(text)}</span>' for colour, text in entries)
    return f'<p class="legend">{"".join(spans)}</p>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table that scrolls if it is too wide; cells are HTML."""
    cells = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{"".join(f"<th>{name}</th>" for name in head)}</tr>{cells}</table></div>'


def draw_lanes(spans: Sequence[Work], seconds: float) -> str:
    """Return the timeline of a step: one row for each resource, and a legend.

    Args:
        spans: Work of the resources.
        seconds: Duration of the step.
    """
    rows = []
    for lane in LANES:
        works = [span for span in spans if span.lane == lane]
        if not works:
            continue
        shapes = "".join(map(_shape, _merged(works, seconds)))
        rows.append(
            f'<div class="row"><span>{lane}</span><svg class="lane" viewBox="0 0 {WIDTH} 10" role="img" '
            f'aria-label="{lane}: works for {short_seconds(work_of(works, lane))}" preserveAspectRatio="none">'
            f"{shapes}</svg><span>{short_seconds(work_of(works, lane))}</span></div>"
        )
    used = dict.fromkeys(span.what for span in sorted(spans, key=lambda span: LANES.index(span.lane)))
    named = [(_KIND_COLOURS[what], what) for what in used if what in _KIND_COLOURS]
    if others := [what for what in used if what not in _KIND_COLOURS]:
        named.append(("g", ", ".join(others)))
    return f"{''.join(rows)}{_time_axis(seconds)}{legend(named)}"


def _merged(spans: Sequence[Work], seconds: float) -> list[tuple[float, float, str, str]]:
    """Return (begin, width, kind, title) of each rectangle of a row; begin and width in SVG units."""
    scale = WIDTH / seconds
    merged: list[tuple[float, float, Work, Work]] = []
    for span in spans:
        begin, end = span.begin * scale, span.end * scale
        if merged:
            since, until, first, last = merged[-1]
            near = span.what == last.what and begin - until < GAP
            if near and (span.unit == last.unit or min(end - begin, until - since) < SHORT):
                merged[-1] = (since, end, first, span)
                continue
        merged.append((begin, end, span, span))
    drawn = []
    for begin, end, first, last in merged:
        units = dict.fromkeys(unit for unit in (first.unit, last.unit) if unit)
        named = f"{first.what}{', ' if units else ''}{' to '.join(units)}"
        title = f"{named}: {short_seconds((end - begin) / scale)} from {short_seconds(begin / scale)} on"
        drawn.append((begin, end - begin, first.what, title))
    return drawn


def _shape(drawn: tuple[float, float, str, str]) -> str:
    begin, width, what, title = drawn
    colour = _KIND_COLOURS.get(what, "g")
    # Leave a gap to the next rectangle if this one is wide enough.
    width = max(width - (GAP if width > 2 * SHORT else 0), GAP)
    return (
        f'<rect x="{begin:.2f}" width="{width:.2f}" height="10" fill="var(--{colour})">'
        f"<title>{escape(title)}</title></rect>"
    )


def _time_axis(seconds: float) -> str:
    return f'<div class="row"><span></span>{_axis(seconds, 1.0, short_seconds)}<span></span></div>'


def _axis(most: float, unit: float, text: Callable[[float], str]) -> str:
    ticks = ((tick / most, text(tick) if tick else "0") for tick in _round_numbers(most, unit))
    return _places(ticks)


def _places(ticks: Iterable[tuple[float, str]]) -> str:
    """Return the labels below a chart, each at its fraction of the width."""
    marks = "".join(f'<span style="left:{100 * share:.1f}%">{escape(text)}</span>' for share, text in ticks)
    return f'<div class="axis">{marks}</div>'


def _round_numbers(most: float, unit: float = 1.0) -> list[float]:
    """Return about four round numbers, multiples of a unit, from 0 to `most`."""
    power = 10.0 ** floor(log10(most / unit / 2))
    step = next(step * power for step in (5, 2, 1, 0.5, 0.2) if most / unit / (step * power) >= 3)
    return [number * step * unit for number in range(int(most / unit / step) + 1)]


def coloured(terms: Iterable[Mapping[str, int]]) -> dict[str, str]:
    """Return a colour for each kind of memory, largest first; all remaining kinds share the last colour."""
    most: dict[str, int] = {}
    for phase in terms:
        for term, nbytes in phase.items():
            most[term] = max(most.get(term, 0), nbytes)
    largest = sorted((term for term in most if most[term] > 0), key=lambda term: -most[term])
    return {term: COLOURS[min(place, len(COLOURS) - 1)] for place, term in enumerate(largest)}


def memory_legend(colours: Mapping[str, str], terms: Iterable[Mapping[str, int]]) -> str:
    """Return the legend for `coloured`."""
    shown = {term for phase in terms for term, nbytes in phase.items() if nbytes > 0}
    present = [(colour, term.replace("_", " ")) for term, colour in colours.items() if term in shown]
    named = [entry for entry in present if entry[0] != COLOURS[-1]]
    return legend([*named, (COLOURS[-1], "others")] if len(named) < len(present) else named)


def draw_memory(moments: Sequence[Moment], seconds: float, budget: int, colours: Mapping[str, str]) -> str:
    """Return a chart of the device memory over a step, by kind, below its budget.

    Args:
        moments: Device memory over the step, in order of time.
        seconds: Duration of the step.
        budget: Bytes that the device may hold.
        colours: Colour of each kind of memory, from `coloured`.
    """
    height, top = 100, max(budget, *(sum(moment.terms.values()) for moment in moments)) * 1.05
    times = [moment.begin / seconds * WIDTH for moment in moments[1:]] + [WIDTH]
    below, shapes = [0.0] * len(moments), []
    for term in reversed([*colours]):  # Small terms stay near the bottom.
        above = [low + max(moment.terms.get(term, 0), 0) for low, moment in zip(below, moments, strict=True)]
        outline = _steps(above, times, height / top), _steps(below, times, height / top)
        points = [*outline[0], *outline[1][::-1]]
        path = "M" + "L".join(f"{x:.2f} {height - y:.2f}" for x, y in points) + "Z"
        shapes.append(f'<path d="{path}" fill="var(--{colours[term]})"><title>{term.replace("_", " ")}</title></path>')
        below = above
    line = height - budget * height / top
    shapes.append(
        f'<path d="M0 {line:.2f}H{WIDTH}" stroke="var(--limit)" stroke-width="2" stroke-dasharray="6 4" '
        'vector-effect="non-scaling-stroke"/>'
    )
    marks = _heights(top, _unit_of(top), lambda nbytes: short_bytes(int(nbytes)))
    limit = f'<span class="limit" style="top:{line:.1f}%">{short_bytes(budget)}</span>'
    return (
        f'<div class="row tall">{marks}<svg class="area" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="memory of the device over a step" preserveAspectRatio="none">{"".join(shapes)}</svg>'
        f'<div class="marks">{limit}</div></div>{_time_axis(seconds)}'
        f"{memory_legend(colours, [moment.terms for moment in moments])}"
    )


def _heights(top: float, unit: float, text: Callable[[float], str]) -> str:
    """Return the labels beside a chart, each at its height."""
    marks = "".join(
        f'<span style="top:{100 - 100 * tick / top:.1f}%">{text(tick) if tick else "0"}</span>'
        for tick in _round_numbers(top, unit)
    )
    return f'<div class="marks">{marks}</div>'


def _unit_of(nbytes: float) -> float:
    return float(next((size for size in (1 << 30, 1 << 20) if nbytes >= size), 1 << 10))


def _steps(levels: Sequence[float], times: Sequence[float], scale: float) -> list[tuple[float, float]]:
    """Return the corners of a step curve that changes its height at each time."""
    points, since = [], 0.0
    for level, until in zip(levels, times, strict=True):
        points += [(since, level * scale), (until, level * scale)]
        since = until
    return points


def draw_curves(charts: Charts, budget: int) -> str:
    """Return charts of throughput against device memory and against batch size, side by side; empty without figures."""
    rate = f"{charts.of.capitalize()} per second"
    drawn = []
    if len(charts.by_memory) > 1:
        drawn.append(_curve(f"{rate} by device memory", charts.by_memory, short_bytes, budget))
    if len(charts.by_batch) > 1:
        drawn.append(_curve(f"{rate} by samples of a micro-batch", charts.by_batch, str, None))
    if not drawn:
        return ""
    note = "The fastest plan at each point. What a batch takes is assumed to be in proportion to its samples."
    return f'<div class="curves">{"".join(drawn)}</div><p class="quiet">{note}</p>'


def _curve(title: str, rates: Sequence[Rate], text: Callable[[int], str], budget: int | None) -> str:
    top, most = max(rate.rate for rate in rates) * 1.08, max(rate.given for rate in rates)
    # Batch sizes double from point to point, so the points are equally far apart.
    places = [rate.given / most * WIDTH for rate in rates]
    if budget is None:
        places = [place * WIDTH / (len(rates) - 1) for place in range(len(rates))]
    points = [(x, 100 - 100 * rate.rate / top) for x, rate in zip(places, rates, strict=True)]
    lines = (100 - 100 * tick / top for tick in _round_numbers(top))
    shapes = "".join(f'<path d="M0 {y:.1f}H{WIDTH}" stroke="var(--line)" {_THIN}/>' for y in lines)
    if budget is not None:
        x = budget / most * WIDTH
        shapes += (
            f'<path d="M{x:.1f} 0V100" stroke="var(--limit)" stroke-width="2" stroke-dasharray="6 4" {_THIN}>'
            f"<title>budget: {short_bytes(budget)}</title></path>"
        )
    shapes += (
        f'<path d="M{"L".join(f"{x:.1f} {y:.2f}" for x, y in points)}" stroke="var(--a)" stroke-width="2" {_THIN}/>'
    )
    for (x, y), rate in zip(points, rates, strict=True):
        shapes += (
            f'<path d="M{x:.1f} {y:.2f}h0" stroke="var(--a)" stroke-width="9" stroke-linecap="round" {_THIN}>'
            f"<title>{text(rate.given)}: {rate.rate:,.0f} per second</title></path>"
        )
    axis = _places((x / WIDTH, text(rate.given)) for x, rate in zip(places, rates, strict=True))
    if budget is not None:
        axis = _axis(most, _unit_of(most), lambda nbytes: short_bytes(int(nbytes)))
    marks = _heights(top, 1.0, "{:,.0f}".format if top > 10 else "{:.2g}".format)
    table = "".join(f"<tr><td>{text(rate.given)}</td><td>{rate.rate:,.0f}</td></tr>" for rate in rates)
    line = f" The dashed line is the budget, {short_bytes(budget)}." if budget is not None else ""
    return (
        f'<section><h3>{escape(title)}</h3><div class="plot">{marks}'
        f'<svg class="curve" viewBox="0 0 {WIDTH} 100" role="img" aria-label="{escape(title)}" '
        f'preserveAspectRatio="none" fill="none">{shapes}</svg>{axis}</div>'
        f'<details><summary class="quiet">As a table.{line}</summary><table>{table}</table></details></section>'
    )


_THIN = 'vector-effect="non-scaling-stroke"'
