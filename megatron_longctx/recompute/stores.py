"""Where results of attention wait between forward and backward."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import Tensor

from ..attention import AttentionResult


class Kept:
    """A result that waits where it is."""

    def __init__(self, result: AttentionResult) -> None:
        self._here: AttentionResult | None = result

    def take(self) -> AttentionResult:
        """The result, ready for the current stream. Once only."""
        result, self._here = self._here, None
        assert result is not None, "a result is taken once"
        return result


class Store(Protocol):
    """Shared by the layers of a model, which give it their results in the order of forward."""

    def keep(self, result: AttentionResult) -> Kept:
        """Take care of a result until backward asks for it."""


class DeviceStore:
    """Leaves results where they are."""

    def keep(self, result: AttentionResult) -> Kept:
        return Kept(result)


class HostStore:
    """Keeps results in host memory, pinned where there is a GPU.

    Copies run on a stream of their own, beside the computation. Backward asks in the opposite order: taking one result
    starts the way back of the one before it. The latest result stays on the device until the next one comes, since
    backward may begin with it; so a device holds two or three results at a time, however many layers there are. With
    several micro-batches in flight (pipelines) the last layer of each but the first waits for its own way back.
    """

    def __init__(self) -> None:
        self._latest: weakref.ref[_OnHost] | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def keep(self, result: AttentionResult) -> Kept:
        before = self._latest() if self._latest else None
        if before is not None:
            before.leave_device()
        kept = _OnHost(result, self._stream(result.out.device), self._latest)
        self._latest = weakref.ref(kept)
        return kept

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


class _OnHost(Kept):
    """A result on its way to the host, there, or on its way back."""

    def __init__(
        self, result: AttentionResult, stream: torch.cuda.Stream | None, before: weakref.ref[_OnHost] | None
    ) -> None:
        super().__init__(result)
        self._device = result.out.device
        self._stream = stream
        self._before = before
        self._arrived: torch.cuda.Event | None = None
        self._host = AttentionResult(*self._copied(result, to_host=True))

    def leave_device(self) -> None:
        self._here = None

    def take(self) -> AttentionResult:
        self._fetch()
        before = self._before() if self._before else None
        if before is not None:
            before._fetch()
        if self._arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived)
        return super().take()

    def _fetch(self) -> None:
        if self._here is None:
            self._here = AttentionResult(*self._copied(self._host, to_host=False))
            self._arrived = None if self._stream is None else self._stream.record_event()

    def _copied(self, tensors: tuple[Tensor, ...], *, to_host: bool) -> list[Tensor]:
        """Copies with the same strides, which kernels care for."""
        if self._stream is None:
            return [x.clone(memory_format=torch.preserve_format) for x in tensors]
        copies = [
            torch.empty_like(x, device="cpu", pin_memory=True) if to_host else torch.empty_like(x, device=self._device)
            for x in tensors
        ]
        # Also for the way back: the copies' memory may still be read by what the current stream was given before.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for x, copy in zip(tensors, copies, strict=True):
                copy.copy_(x, non_blocking=True)
                (x if to_host else copy).record_stream(self._stream)
        return copies
