"""What happens to numbers before they are drawn: smoothing, thinning, averages over groups of steps."""

import math
import statistics
from collections.abc import Sequence

SMOOTH_FROM = 20  # points; fewer show more by themselves
MOST_POINTS = 2000  # of a line; a screen has no more pixels
MOST_BARS = 200


def smoothed(values: Sequence[float], span: float | None = None) -> list[float]:
    """The mean of two exponential moving averages, one from the left and one from the right: a single one lags behind.

    ``span`` in points; None: a twelfth of them, at least 3.
    """
    span = max(3.0, len(values) / 12) if span is None else span
    from_left, from_right = moving_average(values, span), moving_average(values[::-1], span)[::-1]
    return [(left + right) / 2 for left, right in zip(from_left, from_right, strict=True)]


def moving_average(values: Sequence[float], span: float) -> list[float]:
    """Exponential moving average with the bias of its beginning removed (Kingma and Ba 2015, Adam, section 3):
    m_t = w m_(t-1) + (1 - w) x_t, divided by 1 - w^t, where w = 1 - 2 / (span + 1)."""
    weight = 1 - 2 / (span + 1)
    averages, average = [], 0.0
    for t, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        averages.append(average / (1 - weight**t))
    return averages


def thinned(points: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """Indices of at most ``most`` points at equal distances, the first and the last among them."""
    count = len(points)
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def grouped(count: int, most: int = MOST_BARS) -> list[range]:
    """``count`` neighbours in at most ``most`` groups of equal size, the last of which may be smaller."""
    size = max(1, math.ceil(count / most))
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def means(values: Sequence[float], groups: Sequence[range]) -> list[float]:
    """The mean of each group."""
    return [statistics.fmean(values[i] for i in group) for group in groups]
