"""Optimizer states in host memory: the device holds only a few parameters' states, while it steps them.

ZeRO-Offload (arXiv:2101.06840) keeps states and Adam on the host. Here Adam stays on the device and its results are
bit-identical: the states are copied to the device, stepped and copied back piece by piece, on streams beside it.
Megatron's own ``optimizer_cpu_offload`` steps on the CPU, and its states do not fit other runs' checkpoints.
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

from ..planner.memory import STATES_PIECE

_BLOCK_BYTES = 2**28  # allocated together, or more for a larger state: torch rounds each allocation to a power of two
_ALIGNMENT = 512


def keep_on_host(optimizer: MegatronOptimizer) -> None:
    """Keep the states of distributed optimizers on the host except during their steps. Call this before any step or
    load."""
    for part in parts_of(optimizer):
        assert isinstance(part, DistributedOptimizer), part
        part.states_on_host = HostStates(part)


def parts_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers of a chain, or the optimizer itself as the only one."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def host_states(optimizer: MegatronOptimizer) -> HostStates | None:
    """Return the states of an optimizer that `keep_on_host` was called with; None if they stay on the device."""
    return getattr(optimizer, "states_on_host", None)


@dataclass
class _Piece:
    """Parameters that are stepped together, keyed by the number of their group, and the event after their last copy."""

    groups: dict[int, list[Tensor]] = field(default_factory=dict)
    copied: torch.cuda.Event | None = None

    @property
    def parameters(self) -> Iterator[Tensor]:
        for parameters in self.groups.values():
            yield from parameters


class HostStates:
    """The main parameters of bf16 weights, and the moments, of one distributed optimizer.

    A tensor whose values are on the host has an empty storage on the device, like FSDP's parameters.

    Args:
        optimizer: Megatron's; its inner optimizer is the Adam of torch, TransformerEngine or Apex.
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
        self._block = torch.empty(0, dtype=torch.uint8)
        self._streams: tuple[torch.cuda.Stream, ...] = ()
        if any(parameter.is_cuda for group in self._inner.param_groups for parameter in group["params"]):
            self._streams = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._step, self._inner.step = self._inner.step, self._step_in_pieces
        optimizer._copy_model_params_to_main_params = self._read_weights
        optimizer._copy_main_params_to_model_params = lambda: None  # each piece does it
        self.offload()

    def values(self, state: Tensor) -> Tensor:
        """Return the tensor with a state's values, on either device. It may be read and written until the next step."""
        values: Tensor = self._host.get(state, state)
        return values

    def replace(self, old: Tensor, new: Tensor) -> None:
        """Let `new` take over the values of `old`, which are on the host."""
        self._host[new] = self._host.pop(old)
        new.untyped_storage().resize_(0)

    def offload(self) -> None:
        """Copy states that something else, such as a load, has put on the device to the host, and free them."""
        for piece in self._pieces():
            self._send(piece)
            self._free(piece)

    def synchronize(self) -> None:
        """Wait until all copies to the host have ended."""
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
            # An Adam that counts steps per group starts from the same count in every piece of a group.
            own_groups = {number: groups[number] | {"params": params} for number, params in piece.groups.items()}
            self._inner.param_groups = list(own_groups.values())
            try:
                self._step()
            finally:
                self._inner.param_groups = groups
            stepped |= own_groups
            for parameter in piece.parameters:
                if parameter in self._weights:
                    self._weights[parameter].copy_(parameter.detach())
            self._send(piece)
        self._free(pieces[-1])
        for number, group in stepped.items():
            groups[number].update({key: value for key, value in group.items() if key != "params"})

    @torch.no_grad()
    def _read_weights(self, state_dict: None = None) -> None:
        """Copy weights to their main parameters, of which one piece at a time is on the device."""
        assert state_dict is None, "weights are read from the model alone"
        for piece in self._pieces():
            for main in piece.parameters:
                if main in self._weights:
                    main.untyped_storage().resize_(main.numel() * main.element_size())
                    main.copy_(self._weights[main])
            self._send(piece)
            self._free(piece)

    def _pieces(self) -> list[_Piece]:
        pieces, size = [_Piece()], 0
        for number, group in enumerate(self._inner.param_groups):
            if not group["params"]:  # its parameters are on other ranks; Adam counts its steps here too
                pieces[-1].groups[number] = []
            for parameter in group["params"]:
                if size >= STATES_PIECE:
                    pieces.append(_Piece())
                    size = 0
                pieces[-1].groups.setdefault(number, []).append(parameter)
                size += parameter.numel()
        return pieces

    def _states(self, piece: _Piece) -> Iterator[Tensor]:
        """Yield a piece's tensors that are kept on the host: neither the weights nor step counts are."""
        for parameter in piece.parameters:
            if parameter in self._weights:
                yield parameter
            for key, state in self._inner.state.get(parameter, {}).items():
                if key != "step":
                    yield state

    def _fetch(self, piece: _Piece) -> None:
        on_host = [state for state in self._states(piece) if state in self._host]
        for state in on_host:
            state.untyped_storage().resize_(state.numel() * state.element_size())
        self._copy(piece, [(self._host[state], state) for state in on_host], self._streams[:1])

    def _send(self, piece: _Piece) -> None:
        on_device = [state for state in self._states(piece) if state.untyped_storage().size()]
        for state in on_device:
            if state not in self._host:
                self._host[state] = self._allocate(state)
        self._copy(piece, [(state, self._host[state]) for state in on_device], self._streams[1:])

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

    def _allocate(self, like: Tensor) -> Tensor:
        """Return host memory, pinned if there is a GPU. It is never freed: a run's states keep their sizes."""
        size = like.numel() * like.element_size()
        if size > len(self._block):
            self._block = torch.empty(max(size, _BLOCK_BYTES), dtype=torch.uint8, pin_memory=like.is_cuda)
        taken, self._block = self._block[:size], self._block[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        return taken.view(like.dtype).view(like.shape)
