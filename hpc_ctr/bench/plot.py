"""A line plot as SVG, without a plotting library."""

import math
from pathlib import Path
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEFT, _BELOW, _ABOVE = 720, 420, 80, 50, 40
_COLOURS = ("#1f5fa8", "#c05a1c", "#3a7d34")


def write_svg(path: Path, title: str, x_label: str, y_label: str, xs: list[float],
              lines: dict[str, list[float]]) -> None:
    """Lines over ``xs`` (logarithmic axis; ys from 0), each with its name. xs: positive, ascending."""
    top = max(max(ys) for ys in lines.values()) * 1.1 or 1.0
    low, high = math.log(xs[0]), math.log(xs[-1])

    def x_at(x: float) -> float:
        share = (math.log(x) - low) / (high - low) if high > low else 0.5
        return _LEFT + 20 + share * (_WIDTH - _LEFT - 60)

    def y_at(y: float) -> float:
        return _HEIGHT - _BELOW - y / top * (_HEIGHT - _BELOW - _ABOVE)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
             'font-size="13">', f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
             _text(_WIDTH / 2, 22, title), _text(_WIDTH / 2, _HEIGHT - 10, x_label), _text(_LEFT, _ABOVE - 4, y_label)]
    for i in range(6):
        y = top * i / 5
        parts.append(f'<path d="M{_LEFT} {y_at(y):.1f}H{_WIDTH - 20}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, y_at(y) + 4, f"{y:,.4g}", "end"))
    parts += [_text(x_at(x), _HEIGHT - _BELOW + 18, f"{x:,.0f}") for x in xs]
    for number, (name, ys) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in zip(xs, ys, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="3" fill="{colour}"/>' for x, y in zip(xs, ys)]
        parts.append(_text(_WIDTH - 24, _ABOVE + 14 + 18 * number, name, "end", colour))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def _text(x: float, y: float, text: str, anchor: str = "middle", colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
