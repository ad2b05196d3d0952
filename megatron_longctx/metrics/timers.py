"""Time left, from the steps seen so far."""

from __future__ import annotations

from collections import deque
from statistics import median


class Eta:
    """Seconds left, from the moving median of step times: a slow first step or checkpoint does not distort it."""

    def __init__(self, window: int = 20) -> None:
        self._recent: deque[float] = deque(maxlen=window)

    def add(self, step_s: float) -> None:
        """Note one step's seconds."""
        self._recent.append(step_s)

    def seconds(self, steps_left: int) -> float | None:
        """Seconds that `steps_left` steps will take; None before the first step."""
        return median(self._recent) * steps_left if self._recent else None


def clock_text(seconds: float | None) -> str:
    """`h:mm:ss`, or `d days h:mm:ss` from a day on; a dash for None."""
    if seconds is None:
        return "—"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    prefix = f"{days} day{'s' * (days > 1)} " if days else ""
    return f"{prefix}{hour}:{minute:02}:{second:02}"
