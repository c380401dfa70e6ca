"""The engine's batch over time, one panel for each side, as SVG."""

from collections.abc import Iterator
from html import escape

from polar.bench.pipeline import STEP, PipelineReport, Side

_WIDTH, _HEIGHT = 760, 110  # of a panel's plot
_LEFT, _RIGHT, _TOP, _GAP, _BOTTOM = 50, 20, 50, 46, 44
_TICKS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600)  # seconds from one to the next
_MOST_TICKS = 12
_COLOURS = ("#1a7f5a", "#b4532a", "#8a6d1d")


def draw_svg(report: PipelineReport) -> str:
    sides = (report.stages, report.one_by_one, report.as_many_workers)
    seconds = max(side.whole.seconds for side in sides)
    height = _TOP + len(sides) * (_HEIGHT + _GAP) + _BOTTOM - _GAP
    width = _LEFT + _WIDTH + _RIGHT
    title = f"Calls in the engine's batch of {report.plan.slots}, over time"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="20" font-size="15">{escape(title)}</text>',
    ]
    for number, side in enumerate(sides):
        top = _TOP + number * (_HEIGHT + _GAP)
        lines += _panel(side, report.plan.slots, top, _WIDTH / seconds, _COLOURS[number])
    bottom = height - _BOTTOM
    for tick in _ticks(seconds):
        x = _LEFT + tick * _WIDTH / seconds
        lines.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick}</text>')
    lines.append(f'<text x="{_LEFT}" y="{bottom + 34}">shaded: while there was more to do</text>')
    lines.append(f'<text x="{_LEFT + _WIDTH}" y="{bottom + 34}" text-anchor="end">seconds from the first task</text>')
    return "\n".join([*lines, "</svg>", ""])


def _panel(side: Side, slots: int, top: int, scale: float, colour: str) -> Iterator[str]:
    """`scale` is in pixels a second."""
    bottom = top + _HEIGHT
    told = f"{side.name}: {side.steady.slots:.1%} busy, {side.whole.slots:.1%} of the whole run"
    begin, end = (_LEFT + at * scale for at in (side.steady_from, side.steady_until))
    yield f'<text x="{_LEFT}" y="{top - 6}">{escape(told)}</text>'
    yield f'<rect x="{begin:.1f}" y="{top}" width="{end - begin:.1f}" height="{_HEIGHT}" fill="#eef1f4"/>'
    points = [f"M{_LEFT},{bottom}"]
    for number, used in enumerate(side.batch):
        y = bottom - used / slots * _HEIGHT
        points.append(f"L{_LEFT + number * STEP * scale:.1f},{y:.1f}H{_LEFT + (number + 1) * STEP * scale:.1f}")
    yield f'<path d="{"".join(points)}V{bottom}Z" fill="{colour}" fill-opacity="0.75"/>'
    yield f'<path d="M{_LEFT},{top}H{_LEFT + _WIDTH}" stroke="#888" stroke-dasharray="4 3"/>'
    yield f'<path d="M{_LEFT},{top}V{bottom}H{_LEFT + _WIDTH}" stroke="#333" fill="none"/>'
    for value, y in ((slots, top), (0, bottom)):
        yield f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{value}</text>'


def _ticks(seconds: float) -> range:
    step = next((step for step in _TICKS if seconds / step <= _MOST_TICKS), _TICKS[-1])
    return range(0, int(seconds) + 1, step)
