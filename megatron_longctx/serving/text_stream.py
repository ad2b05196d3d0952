"""Decoding of tokens into text as they arrive."""

from collections.abc import Callable, Sequence

_MAX_PENDING = 64
"""The most tokens held back because they may end inside a character or decode to nothing; more are decoded as they
are."""


class TextStream:
    """Decodes tokens as they arrive: only whole characters, and nothing from a stop text on.

    A token's text may depend on the token before (spaces), so the previous tokens are decoded with the new ones. The
    length of the whole text does not matter.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = stops
        self._hold = max((len(stop) - 1 for stop in stops), default=0)
        self._ids: list[int] = []  # some that are decoded already, then those that are not
        self._num_known = 0  # the number of decoded ones
        self._text = ""  # decoded and not returned yet
        self.stopped = False

    def feed(self, token: int) -> str:
        """Add a token and return the text that is complete now."""
        self._ids.append(token)
        new = self._new()
        whole = not new.endswith("\ufffd")  # a character may take several tokens
        if (new and whole) or len(self._ids) - self._num_known >= _MAX_PENDING:
            self._ids = self._ids[self._num_known :]
            self._num_known = len(self._ids)
            self._text += new
        return self._release(self._hold)

    def finish(self) -> str:
        """Return the text that was held back, at the end."""
        if self.stopped:
            return ""
        self._text += self._new()
        return self._release(0)

    def _new(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._num_known])) :]

    def _release(self, hold: int) -> str:
        stops = [at for stop in self._stops if (at := self._text.find(stop)) >= 0]
        self.stopped = bool(stops)
        cut = min(stops) if stops else max(0, len(self._text) - hold)
        released, self._text = self._text[:cut], self._text[cut:]
        return released
