"""Where a step's numbers go: TensorBoard's events."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .. import names
from ..metrics.sinks import Value


class TensorBoardSink:
    """Events in `<folder>/tensorboard`, under the keys of `names`. Steps that a resumed run trains again are hidden."""

    def __init__(self, folder: Path, resumed_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here: it is optional, and takes seconds to import

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_step + 1)

    def write(self, record: Mapping[str, Value]) -> None:
        """Add one record at its `train/step`; None values are left out."""
        for key, value in record.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, record[names.STEP])

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()
