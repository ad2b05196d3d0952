"""Recurrent layers as Megatron's self-attention, over sequences whose ranks hold contiguous tokens.

The parts of every kind: one projection to queries, keys, values, gates of the output and what the recurrence reads
besides; a short convolution with SiLU; the recurrence; a norm with gates; the output projection. Rows of the projection
are grouped by key head, as rows of attention are by KV head, so tensor-parallel ranks hold whole heads, and checkpoints
and initial weights do not depend on their number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import MegatronModule, ModuleSpec, TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import functional

from ..core.errors import refuse
from ..core.kernels.no_grad import first_order
from ..inference.states import RecurrentStates
from ..models import delta_rule
from . import delta_kernels
from .pack import Pack
from .sequence import ShardedSequence
from .version import copy_spec

_LONGEST, _SHORTEST, _LEAST = 0.1, 0.001, 1e-4  # initial time steps


def inverse_steps(count: int) -> Tensor:
    """Draw values whose softplus is a time step, as in Mamba-2."""
    steps = torch.empty(count).uniform_(math.log(_SHORTEST), math.log(_LONGEST)).exp().clamp(min=_LEAST)
    return steps + torch.log(-torch.expm1(-steps))


def with_mixer(layer: ModuleSpec, mixer: type[RecurrentMixer], sequence: ShardedSequence) -> ModuleSpec:
    """Return a copy of a layer's spec, which has Megatron's self-attention, with a recurrent layer in its place."""
    layer, attention = copy_spec(layer), layer.submodules.self_attention
    layer.submodules.self_attention = ModuleSpec(mixer, {"sequence": sequence}, attention.submodules)
    return layer


class RecurrentMixer(MegatronModule):  # type: ignore[misc]
    """What all kinds of recurrent layers share, with the interface of Megatron's self-attention.

    Sizes are the configuration's `linear_*` fields. A kind defines `_initial_values`, `_mix` and `_normed`.

    Attributes:
        numbers: columns of the projection for what a value head's recurrence reads besides queries, keys and values.
        states: of inference, set once the layer is built; then a call gets new tokens, for which `states` has begun.
        number: of the layer in `states`.

    Args:
        submodules: of attention; `linear_qkv` and `linear_proj` are used.
        sequence: shared by all layers of the model.
        The others are Megatron's own.
    """

    numbers: ClassVar[int]

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int,
        *,
        sequence: ShardedSequence,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self._sequence = layer_number, sequence
        self.states: RecurrentStates | None = None
        self.number = 0
        self.tp_group, self._cp = pg_collection.tp, pg_collection.cp
        self._key, self._value = config.linear_key_head_dim, config.linear_value_head_dim
        self._heads = config.linear_num_key_heads
        self._shared = config.linear_num_value_heads // self._heads  # value heads of a key head
        self._mixed = 2 * self._key + self._shared * self._value  # columns of the convolution, for a key head
        self._gates = self._columns_of_gates()
        columns = self._mixed + self._gates + self._shared * self.numbers
        common = {"config": config, "bias": config.add_bias_linear, "is_expert": False, "tp_group": self.tp_group}
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            self._heads * columns,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **common,
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            self._heads * self._shared * self._value,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **common,
        )
        self._add_parameters(config)

    def _add_parameters(self, config: TransformerConfig) -> None:
        """Add the parameters outside of the projections. All ranks draw those of all heads, and keep their own."""
        taps, heads = config.linear_conv_kernel_dim, self._heads * self._shared
        bound = taps**-0.5
        whole = {
            "conv_weight": torch.empty(self._heads * self._mixed, taps).uniform_(-bound, bound),
            "decay_log": torch.empty(heads).uniform_(1, 16).log(),
            **self._initial_values(heads, bound),
        }
        self.register_parameter("conv_bias", None)
        self._sharded = tuple(whole)
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        for name, values in whole.items():
            own = values.chunk(self.tp_group.size())[self.tp_group.rank()].to(device, config.params_dtype, copy=True)
            parameter = torch.nn.Parameter(own)
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
            self.register_parameter(name, parameter)

    def _columns_of_gates(self) -> int:
        """Return how many columns of the projection, for a key head, `_gates_of` gets."""
        return int(self._shared * self._value)

    def _gates_of(self, columns: Tensor) -> tuple[Tensor, ...]:
        """Return the gates of outputs, and further numbers of the recurrence, `[s, b, h ...]` each.

        Args:
            columns: `[s, b, key heads, columns]`.
        """
        return (columns,)

    def _initial_values(self, heads: int, bound: float) -> Mapping[str, Tensor]:
        """Draw the kind's own parameters of all `heads`. bound: of the convolution's initial values."""
        raise NotImplementedError

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, *numbers: Tensor, pack: Any, fast: bool) -> Tensor:
        """Return the recurrence's outputs `[b, s, h, v]`.

        Args:
            q, k: `[b, s, key heads, k]`, after the convolution.
            v, numbers: `[b, s, h, v]` and `[b, s, h]` each, those of `_gates_of` last.
            pack: None if there are `states`.
            fast: whether kernels of fla-core may compute it on all ranks.
        """
        raise NotImplementedError

    def _normed(self, out: Tensor, gates: Tensor, fast: bool) -> Tensor:
        """Return outputs after the norm with gates, all `[b, s, h, v]`."""
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Any]:
        """Run the layer: `[s, b, h]` to the same, and the output projection's bias.

        Args:
            packed_seq_params: see `ShardedSequence.pack_of`; not read if there are `states`.

        Raises:
            ValueError: a call of Megatron's inference, or a sequence that ranks do not hold in order.
        """
        if kwargs.get("inference_context") is not None or kwargs.get("inference_params") is not None:
            remedy = "Its caches have no states over ranks; use `mcore.inference.build_engine`."
            raise refuse("inference_context", "given", "None with recurrent layers", remedy)
        mixed, _ = self.linear_qkv(hidden_states)
        tokens, batch = mixed.shape[:2]
        pack, packed = None, kwargs.get("packed_seq_params")
        if self.states is None:
            pack = self._sequence.pack_of(packed, tokens)
            self._sequence.check_slices(pack, packed)
        sizes = [self._mixed, self._gates, *[self._shared] * self.numbers]
        mixed, gates, *numbers = torch.split(mixed.view(tokens, batch, -1, sum(sizes)), sizes, dim=-1)
        gates, *more = self._gates_of(gates)
        fast = self._uses_kernels(mixed) and pack is not None and pack.place.whole
        q, k, v = self._heads_of(self._convolved(mixed.flatten(2), pack, fast))
        # A copy: a view would keep the whole projection until backward.
        gates = gates.transpose(0, 1).reshape(v.shape).contiguous()
        out = self._mix(q, k, v, *(x.flatten(2).transpose(0, 1) for x in (*numbers, *more)), pack=pack, fast=fast)
        out = self._normed(out, gates, fast).transpose(0, 1)
        return self.linear_proj(out.reshape(tokens, batch, -1))  # type: ignore[no-any-return]

    def _uses_kernels(self, x: Tensor) -> bool:
        """Whether fla-core computes: it promises no equal bits from run to run, and fp32 is for comparisons."""
        return x.is_cuda and x.dtype.itemsize == 2 and not self._sequence.attention.deterministic

    def _convolved(self, mixed: Tensor, pack: Any, fast: bool) -> Tensor:
        """Return SiLU of the convolutions of `mixed` `[s, b, c]`, as `[b, s, c]`."""
        if fast:
            mixed, halo = self._with_halo(mixed, pack)
            return delta_kernels.convolved(mixed.transpose(0, 1), halo, self.conv_weight, self.conv_bias, pack)
        if self.states is not None:
            mixed = self.states.convolved(self.number, mixed, self.conv_weight)
        else:
            mixed, halo = self._with_halo(mixed, pack)
            before = mixed.new_zeros(self.conv_weight.shape[1] - 1, *mixed.shape[1:]) if halo is None else halo
            mixed = delta_rule.convolved(mixed, before, self.conv_weight, pack.positions(mixed.device))
        if self.conv_bias is not None:
            mixed = mixed + self.conv_bias
        return functional.silu(mixed).transpose(0, 1)

    def _recur(self, pack: Any, kernel: delta_rule.Kernel, *inputs: Tensor) -> Tensor:
        """Compute a recurrence over all ranks, or over `states` if there are any. inputs: as for a `Kernel`."""
        inputs = tuple(x.contiguous() for x in inputs)
        if self.states is not None:
            return self.states.rule(self.number, kernel, *inputs)
        place = pack.place
        own = delta_rule.section(place.lengths, place.continues, kernel, *inputs)
        if not place.exchanges:
            return own.out
        lasts = self._gathered(own.last.unsqueeze(0))
        out = delta_rule.finish(own, lasts, place.first_rank, place.rank)
        return _Joint.apply(out, lasts)  # type: ignore[no-any-return, no-untyped-call]

    def without_tokens(self) -> None:
        """Take part in the exchanges of inference on a rank that has no tokens."""
        empty = self.conv_weight.new_empty(0, 1, len(self.conv_weight))
        q, k, v = self._heads_of(self._convolved(empty, None, False))
        self._mix(q, k, v, *[v[..., 0]] * 2, pack=None, fast=False)  # as many numbers as any kind reads, without tokens

    def _heads_of(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Divide the last dimension into queries and keys of the key heads, and values of the value heads."""
        sizes = [self._key, self._key, self._shared * self._value]
        heads = mixed.shape[2] // self._mixed
        q, k, v = torch.split(mixed.view(*mixed.shape[:2], heads, self._mixed), sizes, dim=-1)
        # A copy of one key head, too: a view would keep the whole convolution until backward.
        return q, k, v.reshape(*mixed.shape[:2], heads * self._shared, self._value).contiguous()

    def _with_halo(self, x: Tensor, pack: Pack) -> tuple[Tensor, Tensor | None]:
        """Return `x` `[s, b, c]`, and the tokens of other ranks before it that convolutions read; None if none are."""
        if not pack.place.exchanges:
            return x, None
        before = self.conv_weight.shape[1] - 1
        x, tail = _Tail.apply(x, before)  # type: ignore[no-untyped-call]
        return x, self._gathered(tail).index_select(0, pack.tail_rows(before, x.device))

    def _gathered(self, x: Tensor) -> Tensor:
        """Gather along the first dimension over context-parallel ranks; backward sums the gradients of all ranks."""
        gathered: Tensor = tensor_parallel.gather_from_sequence_parallel_region(x.contiguous(), group=self._cp)
        return gathered

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the parameters; those outside of the projections are sharded by heads, as `_initial_values` are."""
        whole: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own, axes = {name: getattr(self, name) for name in self._sharded}, dict.fromkeys(self._sharded, 0)
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        whole |= make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets, **groups)
        return whole


class _Tail(torch.autograd.Function):
    """Returns `x`, and its last rows behind zeros. The gradient of a slice would be as large as x, and one more sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        tail = x[max(0, len(x) - rows) :]
        return x.view_as(x), functional.pad(tail, (0, 0, 0, 0, rows - len(tail), 0))

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole, tail = grads
        own = min(len(whole), len(tail))
        whole[len(whole) - own :] += tail[len(tail) - own :]  # the convolution made it, and nothing else reads it
        return whole, None


class _Joint(torch.autograd.Function):
    """Returns `out`, and lets backward reach what ranks gathered on every rank: its gradient is a collective, too."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, gathered: Tensor) -> Tensor:
        ctx.like = gathered.shape, gathered.dtype
        return out.view_as(out)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype = ctx.like
        return grads[0], grads[0].new_zeros(shape, dtype=dtype)
