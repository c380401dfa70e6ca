"""Seconds of a training step, a panel for each group, as SVG."""

from collections.abc import Iterator
from html import escape

from polar.bench.tree import TimedStep, TreeReport

_BAR, _GAP, _GROUP_GAP = 18, 4, 26
_LEFT, _WIDTH, _RIGHT, _TOP, _BOTTOM = 130, 440, 310, 56, 16
_COLOURS = {"prefix_tree": "#1a7f5a", "prefix_merging": "#b4532a", "per_request": "#8a6d1d"}
_OTHER = "#5a6b8a"


def draw_svg(report: TreeReport) -> str:
    """Bars of a group are drawn to the scale of its longest one, so that each group can be read by itself."""
    groups: dict[str, list[TimedStep]] = {}
    for cell in report.cells:
        groups.setdefault(cell.counted.group, []).append(cell)
    lines: list[str] = []
    top = _TOP
    for name, cells in groups.items():
        lines += _panel(name, cells, top)
        top += _GROUP_GAP + len(cells) * (_BAR + _GAP)
    width, height = _LEFT + _WIDTH + _RIGHT, top + _BOTTOM
    title = f"Seconds of a training step ({report.plan.shape}, {report.dtype}, {report.device})"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="16" y="22" font-size="15">{escape(title)}</text>',
    ]
    return "\n".join([*head, *lines, "</svg>", ""])


def _panel(name: str, cells: list[TimedStep], top: int) -> Iterator[str]:
    longest = max(cell.seconds for cell in cells)
    quickest = min(cell.seconds for cell in cells)
    yield f'<text x="16" y="{top}" font-weight="bold">{escape(name)}</text>'
    for number, cell in enumerate(cells):
        y = top + 8 + number * (_BAR + _GAP)
        width = max(cell.seconds / longest * _WIDTH, 1.0)
        colour = _COLOURS.get(cell.counted.builder, _OTHER)
        style = 'fill-opacity="0.45"' if cell.sampled else 'fill-opacity="0.85"'
        told = f"{cell.seconds:.1f} s, {cell.seconds / quickest:.2f} times"
        if cell.sampled:
            told += f" (scaled: {cell.share:.1%} was timed)"
        baseline = y + _BAR - 5
        yield f'<text x="{_LEFT - 6}" y="{baseline}" text-anchor="end">{escape(cell.counted.builder)}</text>'
        yield f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}" {style}/>'
        yield f'<text x="{_LEFT + width + 6:.1f}" y="{baseline}">{escape(told)}</text>'
