"""Tokens to text as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_MOST_PENDING = 64
"""Tokens that are held back because they may end in half a character, or decode to nothing; then they are taken for
what they decode to."""


class TextStream:
    """Tokens to text as they come: whole characters only, and nothing from a stop text on.

    A token's text may depend on the one before (spaces), so those before what is new are decoded with it; how long the
    whole text is does not matter.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = stops
        self._hold = max((len(stop) - 1 for stop in stops), default=0)
        self._ids: list[int] = []  # some that are text already, then those that are not
        self._num_known = 0  # of them that are text already
        self._text = ""  # not shown yet
        self.stopped = False

    def feed(self, token: int) -> str:
        """What can be shown now."""
        self._ids.append(token)
        new = self._new()
        whole = not new.endswith("\ufffd")  # a character may take several tokens
        if (new and whole) or len(self._ids) - self._num_known >= _MOST_PENDING:
            self._ids = self._ids[self._num_known :]
            self._num_known = len(self._ids)
            self._text += new
        return self._show(self._hold)

    def finish(self) -> str:
        """What was held back, at the end."""
        if self.stopped:
            return ""
        self._text += self._new()
        return self._show(0)

    def _new(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._num_known])) :]

    def _show(self, hold: int) -> str:
        found = [at for stop in self._stops if (at := self._text.find(stop)) >= 0]
        self.stopped = bool(found)
        cut = min(found) if found else max(0, len(self._text) - hold)
        shown, self._text = self._text[:cut], self._text[cut:]
        return shown
