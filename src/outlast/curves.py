"""Curves for a terminal, in plain text."""

import math
from collections.abc import Iterable, Sequence

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot of a braille character: 4 rows, 2 columns."""


def loss_curve(
    steps: Sequence[int], losses: Sequence[float], width: int, height: int, marks: Iterable[int] = ()
) -> str:
    """Draw a loss curve with braille dots.

    Args:
        steps: ascending.
        losses: one a step; those that aren't finite are left out.
        width: columns of the whole, labels included; at least 20.
        height: lines of the whole, axis and marks included; at least 5.
        marks: steps to point at from below the axis.

    Returns:
        `height` lines of at most `width` columns: the curve, the x-axis, the marks, the steps.

    Raises:
        ValueError: too small, or not one loss a step.
    """
    if width < 20 or height < 5:
        raise ValueError(f"a curve of {width} x {height} characters; expected at least 20 x 5")
    points = [(s, y) for s, y in zip(steps, losses, strict=True) if math.isfinite(y)]
    if not points:
        return "no losses yet"
    low, high = min(y for _, y in points), max(y for _, y in points)
    begin, end = steps[0], steps[-1]
    rows = height - 3
    span = high / 2 - low / 2  # halves: the difference of two large numbers may not be finite
    labels = {0: f"{high:.3g}", rows - 1: f"{low:.3g}"}
    if rows > 4:
        down = (rows // 2) / (rows - 1)
        labels[rows // 2] = f"{high * (1 - down) + low * down:.3g}"
    margin = max(map(len, labels.values()))
    columns = width - margin - 2

    def dot(step: int, loss: float) -> tuple[int, int]:
        across = (step - begin) / (end - begin) if end > begin else 0.0
        down = (high / 2 - loss / 2) / span if span > 0 else 0.5
        return round(across * (2 * columns - 1)), round(down * (4 * rows - 1))

    cells = [[0x2800] * columns for _ in range(rows)]
    last = dot(*points[0])
    for point in points:
        here = dot(*point)
        for x, y in _line(*last, *here):
            cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
        last = here

    lines = [f"{labels.get(i, ''):>{margin}} ┤{''.join(map(chr, row))}" for i, row in enumerate(cells)]
    lines.append(f"{'':>{margin}} └{'─' * columns}")
    under = [" "] * columns
    for step in marks:
        if begin <= step <= end:
            under[dot(step, high)[0] // 2] = "▲"
    lines.append(f"{'':>{margin}}  {''.join(under)}".rstrip())
    first_label, last_label = str(begin), f"step {end}"
    lines.append(f"{'':>{margin}}  {first_label}{last_label:>{columns - len(first_label)}}")
    return "\n".join(lines)


def _line(x0: int, y0: int, x1: int, y1: int) -> Iterable[tuple[int, int]]:
    """The dots from one to the other, both included."""
    n = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [(x0 + round((x1 - x0) * i / n), y0 + round((y1 - y0) * i / n)) for i in range(n + 1)]
