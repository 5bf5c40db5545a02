"""Curves of the loss with what happened marked in them, as lines of text and as SVG. Pure; no library draws them."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

import msgspec

#: Of a panel of the SVG and of the axes in it, in pixels.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 460, 260, 46, 14, 34, 40
_CURVE, _MARK, _GRID, _TEXT = "#1f6feb", "#d1242f", "#d8dee4", "#424a53"


class LossCurve(msgspec.Struct, frozen=True):
    """The losses of one task: `points` are (iteration, loss), `marks` (iteration, what happened)."""

    title: str
    points: tuple[tuple[int, float], ...]
    marks: tuple[tuple[int, str], ...] = ()


class CurveAxes(msgspec.Struct, frozen=True):
    """What the axes of several curves cover: iterations from 0, losses from `low` to `high`."""

    last: int
    low: float
    high: float


def scale_of(curves: Sequence[LossCurve]) -> CurveAxes:
    """Return axes that hold all points and marks of these curves."""
    losses = [loss for curve in curves for _, loss in curve.points] or [0.0]
    iterations = [at for curve in curves for at, _ in (*curve.points, *curve.marks)]
    low, high = min(losses), max(losses)
    return CurveAxes(max([1, *iterations]), low, high if high > low else low + 1.0)


def text_plot(curve: LossCurve, width: int = 72, height: int = 12) -> list[str]:
    """Draw a curve in lines of `width` characters; each mark is a column of bars with its number below, and a line
    that says what it was."""
    scale = scale_of([curve])
    rows = [[" "] * width for _ in range(height)]

    def _column(iteration: int) -> int:
        return round(iteration / scale.last * (width - 1))

    feet = [" "] * width
    for number, (iteration, _) in enumerate(curve.marks, start=1):
        feet[_column(iteration)] = str(number % 10)
        for row in rows:
            row[_column(iteration)] = "|"
    for iteration, loss in curve.points:
        share = (loss - scale.low) / (scale.high - scale.low)
        rows[round((1 - share) * (height - 1))][_column(iteration)] = "*"
    labels = [f"{scale.high:.2f}", *[""] * (height - 2), f"{scale.low:.2f}"]
    lines = [f"{label:>6} {''.join(row)}".rstrip() for label, row in zip(labels, rows, strict=True)]
    axis = f"{'iteration':<{width - len(str(scale.last))}}{scale.last}"
    marks = [f"       {number} at iteration {at}: {text}" for number, (at, text) in enumerate(curve.marks, start=1)]
    return [f"loss of {curve.title}", *lines, f"{'':7}{''.join(feet)}".rstrip(), f"{'':7}{axis}", *marks]


def svg(curves: Sequence[LossCurve]) -> str:
    """Draw the curves side by side, on the same axes, as the text of an SVG file."""
    scale = scale_of(curves)
    width = _WIDTH * len(curves)
    panels = "\n".join(_panel(curve, scale, number * _WIDTH) for number, curve in enumerate(curves))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" width="{width}" height="{_HEIGHT}" '
        f'font-family="sans-serif" font-size="11" fill="{_TEXT}">\n'
        f'<rect width="{width}" height="{_HEIGHT}" fill="#ffffff"/>\n{panels}\n</svg>\n'
    )


def _panel(curve: LossCurve, scale: CurveAxes, left: int) -> str:
    """Draw one curve, `left` pixels from the picture's edge."""
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def _x(iteration: int) -> str:
        return f"{_LEFT + iteration / scale.last * (right - _LEFT):.1f}"

    def _y(loss: float) -> str:
        return f"{_TOP + (scale.high - loss) / (scale.high - scale.low) * (bottom - _TOP):.1f}"

    parts = [f'<text x="{_LEFT}" y="18" font-size="13" font-weight="bold">{escape(curve.title)}</text>']
    for quarter in range(5):
        loss, iteration = scale.low + (scale.high - scale.low) * quarter / 4, scale.last * quarter // 4
        parts += [
            f'<path d="M{_LEFT} {_y(loss)}H{right}" stroke="{_GRID}"/>',
            f'<text x="{_LEFT - 6}" y="{_y(loss)}" dy="4" text-anchor="end">{loss:.1f}</text>',
            f'<text x="{_x(iteration)}" y="{bottom + 16}" text-anchor="middle">{iteration}</text>',
        ]
    parts.append(f'<text x="{right}" y="{bottom + 32}" text-anchor="end">loss by iteration</text>')
    for number, (iteration, text) in enumerate(curve.marks):
        end = float(_x(iteration)) > (_LEFT + right) / 2
        parts += [
            f'<path d="M{_x(iteration)} {_TOP}V{bottom}" stroke="{_MARK}" stroke-dasharray="4 3"/>',
            f'<text x="{_x(iteration)}" y="{_TOP + 12 + 14 * number}" dx="{-5 if end else 5}" fill="{_MARK}" '
            f'text-anchor="{"end" if end else "start"}">{escape(text)}</text>',
        ]
    path = "".join(f"{'L' if number else 'M'}{_x(at)} {_y(loss)}" for number, (at, loss) in enumerate(curve.points))
    parts.append(f'<path d="{path}" fill="none" stroke="{_CURVE}" stroke-width="1.8" stroke-linejoin="round"/>')
    return f'<g transform="translate({left} 0)">\n' + "\n".join(parts) + "\n</g>"
