"""Optimizer states that wait in host memory: the device holds those of a few parameters, while they are stepped.

ZeRO-Offload (arXiv:2101.06840) has states on the host, and Adam too. Here Adam stays on the device, with its numbers
unchanged to the bit: pieces of the states come, are stepped and leave, on streams beside it. Megatron's own
``optimizer_cpu_offload`` steps on the CPU, with states that checkpoints of other runs do not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, MegatronOptimizer
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..memory import STATES_PIECE

BLOCK = 2**28
"""Bytes of host memory allocated at once, or more for a larger state: torch rounds each up to a power of two."""
_ALIGNED = 512


def keep_on_host(optimizer: MegatronOptimizer) -> None:
    """From now on states of the optimizer are on the host but in its steps. To be called before any step or load.

    Args:
        optimizer: a distributed one, or several of them.
    """
    for part in parts_of(optimizer):
        assert isinstance(part, DistributedOptimizer), part
        if not part.is_stub_optimizer:
            part.states_on_host = HostStates(part)


def parts_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Those that are chained; one that is not is its only part."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def host_states(optimizer: MegatronOptimizer) -> HostStates | None:
    """Those of one optimizer that `keep_on_host` was called with; None: they stay on the device."""
    return getattr(optimizer, "states_on_host", None)


@dataclass
class _Piece:
    """Parameters by number of their group, and when copies of their states have ended."""

    groups: dict[int, list[Tensor]] = field(default_factory=dict)
    copied: torch.cuda.Event | None = None

    @property
    def parameters(self) -> Iterator[Tensor]:
        for parameters in self.groups.values():
            yield from parameters


class HostStates:
    """Of one distributed optimizer: main parameters of bf16 weights, and moments. A tensor whose values are on the host
    has an empty storage on the device, as FSDP's parameters have.

    Args:
        optimizer: Megatron's; its inner optimizer is torch's, TransformerEngine's or Apex's Adam.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._inner: torch.optim.Optimizer = optimizer.optimizer
        self._weights = {
            main: weight
            for weights, mains in zip(
                optimizer.shard_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True
            )
            for weight, main in zip(weights, mains, strict=True)
        }
        self._host: Any = WeakTensorKeyDictionary()
        self._memory = _HostMemory()
        self._streams: tuple[torch.cuda.Stream, ...] = ()
        if any(parameter.is_cuda for group in self._inner.param_groups for parameter in group["params"]):
            self._streams = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._step, self._inner.step = self._inner.step, self._step_in_pieces
        self._read_weights = optimizer._copy_model_params_to_main_params
        optimizer._copy_model_params_to_main_params = self._read_all_weights
        optimizer._copy_main_params_to_model_params = lambda: None  # each piece does it
        self.leave()

    def values(self, state: Tensor) -> Tensor:
        """`state` itself, or where its values are on the host. They may be read and written until the next step."""
        found: Tensor = self._host.get(state, state)
        return found

    def replace(self, old: Tensor, new: Tensor) -> None:
        """`new` takes the place and the values of `old`, which has left the device."""
        self._host[new] = self._host.pop(old)
        new.untyped_storage().resize_(0)

    def leave(self) -> None:
        """What has come to the device otherwise, as by loading, goes to the host."""
        for piece in self._pieces():
            self._send(piece)
            self._free(piece)

    def settle(self) -> None:
        """Wait until the host has what is on its way."""
        for stream in self._streams:
            stream.synchronize()

    def _step_in_pieces(self) -> None:
        groups, pieces = self._inner.param_groups, self._pieces()
        stepped: dict[int, dict[str, Any]] = {}
        self._fetch(pieces[0])
        for index, piece in enumerate(pieces):
            if index > 0:
                self._free(pieces[index - 1])
            if index + 1 < len(pieces):
                self._fetch(pieces[index + 1])
            self._wait(piece)
            # An Adam that counts steps in its groups counts from the same number in every piece of a group.
            found = {number: groups[number] | {"params": params} for number, params in piece.groups.items()}
            self._inner.param_groups = list(found.values())
            try:
                self._step()
            finally:
                self._inner.param_groups = groups
            stepped |= found
            for parameter in piece.parameters:
                if parameter in self._weights:
                    self._weights[parameter].copy_(parameter.detach())
            self._send(piece)
        self._free(pieces[-1])
        for number, group in stepped.items():
            groups[number].update({key: value for key, value in group.items() if key != "params"})

    def _read_all_weights(self, **options: Any) -> None:
        for piece in self._pieces():
            self._fetch(piece)
            self._wait(piece)
        self._read_weights(**options)
        self.leave()

    def _pieces(self) -> list[_Piece]:
        pieces, size = [_Piece()], 0
        for number, group in enumerate(self._inner.param_groups):
            if not group["params"]:  # of which other ranks have some: Adams count its steps, too
                pieces[-1].groups[number] = []
            for parameter in group["params"]:
                if size >= STATES_PIECE:
                    pieces.append(_Piece())
                    size = 0
                pieces[-1].groups.setdefault(number, []).append(parameter)
                size += parameter.numel()
        return pieces

    def _states(self, piece: _Piece) -> Iterator[Tensor]:
        """What waits on the host of them: not weights themselves, nor counts of steps."""
        for parameter in piece.parameters:
            if parameter in self._weights:
                yield parameter
            for key, state in self._inner.state.get(parameter, {}).items():
                if key != "step":
                    yield state

    def _fetch(self, piece: _Piece) -> None:
        away = [state for state in self._states(piece) if state in self._host]
        for state in away:
            state.untyped_storage().resize_(state.numel() * state.element_size())
        self._copy(piece, [(self._host[state], state) for state in away], self._streams[:1])

    def _send(self, piece: _Piece) -> None:
        here = [state for state in self._states(piece) if state.untyped_storage().size()]
        for state in here:
            if state not in self._host:
                self._host[state] = self._memory.take(state)
        self._copy(piece, [(state, self._host[state]) for state in here], self._streams[1:])

    def _free(self, piece: _Piece) -> None:
        self._wait(piece)
        for state in self._states(piece):
            state.untyped_storage().resize_(0)

    @torch.no_grad()
    def _copy(self, piece: _Piece, copies: list[tuple[Tensor, Tensor]], streams: tuple[torch.cuda.Stream, ...]) -> None:
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[0]) if streams else nullcontext():
            for source, target in copies:
                target.copy_(source, non_blocking=True)
        for stream in streams:
            piece.copied = stream.record_event()

    @staticmethod
    def _wait(piece: _Piece) -> None:
        if piece.copied is not None:
            torch.cuda.current_stream().wait_event(piece.copied)
            piece.copied = None


class _HostMemory:
    """Pinned where there is a GPU, and never given back: as long as a run, states are of the same sizes."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, like: Tensor) -> Tensor:
        size = like.numel() * like.element_size()
        if size > len(self._left):
            self._left = torch.empty(max(size, BLOCK), dtype=torch.uint8, pin_memory=like.is_cuda)
        taken, self._left = self._left[:size], self._left[-(-size // _ALIGNED) * _ALIGNED :]
        return taken.view(like.dtype).view(like.shape)
