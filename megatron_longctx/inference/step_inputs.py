"""What a step of replicated decode reads, at fixed addresses, and the tokens that it returns. See `decode`."""

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from ..core.kernels.packed import to_device


def _tensor(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return numbers as int64, in a fraction of the time that `torch.tensor` takes for lists."""
    return torch.from_numpy(numpy.array(rows, dtype=numpy.int64))


class StepIds:
    """The likeliest tokens of a step, once it has run."""

    def __init__(self, ids: Tensor) -> None:
        self._host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=ids.is_cuda).copy_(ids, non_blocking=True)
        self._event = torch.cuda.current_stream(ids.device).record_event() if ids.is_cuda else None
        self._found: list[int] | None = None

    def __call__(self) -> list[int]:
        if self._found is None:
            if self._event is not None:
                self._event.synchronize()
            self._found = self._host.tolist()
        return self._found


class StepInputs:
    """The inputs of a step, at fixed addresses: `num_fields` numbers per row, and for each of `tiles` tiles of rows, in
    every group of layers, up to `pages` page numbers.

    Args:
        single, rows: the most rows of steps for single tokens, and of any.
    """

    def __init__(
        self, device: torch.device, tiles: int, pages: Sequence[int], num_fields: int, single: int, rows: int
    ) -> None:
        self._num_fields = num_fields
        with torch.inference_mode(False):  # they outlive the call
            self.pages = [torch.zeros(tiles, count, dtype=torch.int32, device=device) for count in pages]
            self._fields = torch.zeros(num_fields * rows, dtype=torch.int64, device=device)
            pinned = device.type == "cuda"
            self._staging = [torch.zeros(num_fields * rows, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
            self.latest = torch.zeros(single, dtype=torch.int64, device=device)  # tokens of the launch before
        self._held: list[list[list[int]]] = [[[] for _ in range(tiles)] for _ in pages]
        self._changes: list[tuple[list[int], list[int]]] = [([], []) for _ in pages]  # places in a table, and numbers

    def fields(self, size: int) -> Tensor:
        """Return the fields on the device, int64 `[num_fields, size]`.

        The first field has per chunk the row whose logits are computed. The others are of rows: see `Decoder._rows`.
        """
        return self._fields[: self._num_fields * size].view(self._num_fields, size)

    def send(self, columns: Sequence[Sequence[int]]) -> None:
        """Send fields, `[num_fields][size]`, and the pages that have changed. The host does not wait."""
        fields = _tensor(columns)
        self._staging.reverse()  # the step before may not have read the other ones yet
        staged = self._staging[0][: fields.numel()].view_as(fields)
        self.fields(fields.shape[1]).copy_(staged.copy_(fields), non_blocking=True)
        for table, (places, numbers) in zip(self.pages, self._changes, strict=True):
            if places:  # of all tiles in one copy
                both = to_device(_tensor([places, numbers]), table.device)
                table.view(-1)[both[0]] = both[1].int()
                places.clear()
                numbers.clear()

    def set_pages(self, index: int, pages: Sequence[Sequence[int]]) -> None:
        """Set the pages of a tile in every group of layers, which `send` writes; only numbers that differ."""
        for table, of_group, (places, numbers), new in zip(self.pages, self._held, self._changes, pages, strict=True):
            held = of_group[index]
            if held == new:
                continue
            same, first = len(held) if held == new[: len(held)] else 0, index * table.shape[1]
            places += range(first + same, first + len(new))
            numbers += new[same:]
            of_group[index] = list(new)
