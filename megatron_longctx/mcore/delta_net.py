"""Gated delta nets as Megatron's self-attention, over sequences whose ranks hold contiguous tokens.

The parts are those of Qwen3-Next and of Megatron's own `GatedDeltaNet`: one projection to queries, keys, values, output
gates and the two gates of the rule; a short convolution with SiLU; normalized queries and keys; the gated delta rule; a
norm that is multiplied by SiLU of the output gates; the output projection. Rows of the projection are grouped by key
head, as those of attention are by KV head, so tensor-parallel ranks hold whole heads, and checkpoints and initial
weights do not depend on their number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

_SHARDED = ("conv_weight", "decay_log", "decay_bias")


def with_delta_net(layer: ModuleSpec, sequence: ShardedSequence) -> ModuleSpec:
    """Return a copy of a layer's spec, which has Megatron's self-attention, with a gated delta net in its place."""
    layer, attention = copy_spec(layer), layer.submodules.self_attention
    layer.submodules.self_attention = ModuleSpec(GatedDeltaNet, {"sequence": sequence}, attention.submodules)
    return layer


class GatedDeltaNet(MegatronModule):  # type: ignore[misc]
    """A gated delta net with the interface of Megatron's self-attention.

    Sizes are the configuration's `linear_*` fields.

    Attributes:
        states: of inference, set once the layer is built; then a call gets new tokens, for which `states` has begun.
        number: of the layer in `states`.

    Args:
        submodules: of attention; `linear_qkv` and `linear_proj` are used.
        sequence: shared by all layers of the model.
        The others are Megatron's own.
    """

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
        columns = self._mixed + self._shared * (self._value + 2)
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
        whole = {
            "conv_weight": torch.empty(self._heads * self._mixed, taps).uniform_(-(taps**-0.5), taps**-0.5),
            "decay_log": torch.empty(heads).uniform_(1, 16).log(),
            "decay_bias": torch.ones(heads),
        }
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        for name, values in whole.items():
            own = values.chunk(self.tp_group.size())[self.tp_group.rank()].to(device, config.params_dtype, copy=True)
            parameter = torch.nn.Parameter(own)
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
            self.register_parameter(name, parameter)
        self.norm_weight = torch.nn.Parameter(torch.ones(self._value, device=device, dtype=config.params_dtype))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Any]:
        """Run the layer: `[s, b, h]` to the same, and the output projection's bias.

        Args:
            packed_seq_params: see `ShardedSequence.pack_of`; not read if there are `states`.

        Raises:
            ValueError: a call of Megatron's inference, or a sequence that ranks do not hold in order.
        """
        if kwargs.get("inference_context") is not None or kwargs.get("inference_params") is not None:
            remedy = "Its caches have no states over ranks; use `mcore.inference.build_engine`."
            raise refuse("inference_context", "given", "None with gated delta nets", remedy)
        mixed, _ = self.linear_qkv(hidden_states)
        tokens, batch = mixed.shape[:2]
        pack, packed = None, kwargs.get("packed_seq_params")
        if self.states is None:
            pack = self._sequence.pack_of(packed, tokens)
            self._sequence.check_slices(pack, packed)
        sizes = [self._mixed, self._shared * self._value, self._shared, self._shared]
        mixed, gates, beta, decay = torch.split(mixed.view(tokens, batch, -1, sum(sizes)), sizes, dim=-1)
        fast = self._uses_kernels(mixed) and pack is not None and pack.place.whole
        compute: Callable[..., Tensor] = self._by_kernels if fast else self._by_torch
        out = compute(mixed.flatten(2), gates, beta.flatten(2), decay.flatten(2), pack)
        return self.linear_proj(out.reshape(tokens, batch, -1))  # type: ignore[no-any-return]

    def _uses_kernels(self, x: Tensor) -> bool:
        """Whether fla-core computes: it promises no equal bits from run to run, and fp32 is for comparisons."""
        return x.is_cuda and x.dtype.itemsize == 2 and not self._sequence.attention.deterministic

    def _by_kernels(self, mixed: Tensor, gates: Tensor, beta: Tensor, decay: Tensor, pack: Pack) -> Tensor:
        """Compute all between the projections by the kernels of fla-core; `[s, b, ...]` each."""
        mixed, halo = self._with_halo(mixed, pack)
        mixed = delta_kernels.convolved(mixed.transpose(0, 1), halo, self.conv_weight, pack)
        q, k, v = (x.contiguous() for x in self._heads_of(mixed))
        g, beta = (x.transpose(0, 1).contiguous() for x in self._gates(beta, decay))
        out = delta_kernels.gated_delta_rule(q, k, v, g, beta, pack, self._cp)
        gates = gates.transpose(0, 1).reshape(out.shape)
        return delta_kernels.gated_norm(out, gates, self._norm_weight(), self.config.layernorm_epsilon).transpose(0, 1)

    def _by_torch(self, mixed: Tensor, gates: Tensor, beta: Tensor, decay: Tensor, pack: Any) -> Tensor:
        """Compute all between the projections in torch, over `states` if there are any; `[s, b, ...]` each."""
        if self.states is not None:
            mixed = self.states.convolved(self.number, mixed, self.conv_weight)
        else:
            mixed, halo = self._with_halo(mixed, pack)
            before = mixed.new_zeros(self.conv_weight.shape[1] - 1, *mixed.shape[1:]) if halo is None else halo
            mixed = delta_rule.convolved(mixed, before, self.conv_weight, pack.positions(mixed.device))
        q, k, v = self._heads_of(functional.silu(mixed))
        q, k = (_normalized(x).repeat_interleave(self._shared, dim=2) for x in (q, k))
        # A copy: a view would keep the whole projection until backward.
        gates = gates.reshape(v.shape).contiguous()
        rule = [x.transpose(0, 1).contiguous() for x in (q, k, v, *self._gates(beta, decay))]
        if self.states is not None:
            kernel = delta_kernels.chunked if self._uses_kernels(mixed) else delta_rule.chunked
            out = self.states.rule(self.number, kernel, *rule)
        else:
            place = pack.place
            own = delta_rule.section(place.lengths, place.continues, delta_rule.chunked, *rule)
            out = own.out
            if place.exchanges:
                lasts = self._gathered(own.last.unsqueeze(0))
                out = _Joint.apply(delta_rule.finish(own, lasts, place.first_rank, place.rank), lasts)  # type: ignore[no-untyped-call]
        wide, epsilon = torch.promote_types(out.dtype, torch.float32), self.config.layernorm_epsilon
        out, weight = out.transpose(0, 1).to(wide), self._norm_weight().to(wide)
        normed = functional.rms_norm(out, out.shape[-1:], weight, epsilon)
        return (normed * functional.silu(gates.to(wide))).to(gates.dtype)

    def _heads_of(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Divide the last dimension into queries and keys of the key heads, and values of the value heads."""
        sizes = [self._key, self._key, self._shared * self._value]
        q, k, v = torch.split(mixed.view(*mixed.shape[:2], -1, self._mixed), sizes, dim=-1)
        return q, k, v.reshape(*mixed.shape[:2], -1, self._value)

    def _gates(self, beta: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithm of every head's decay, and how strongly it corrects its state, both in fp32."""
        rate = functional.softplus(decay.float() + self.decay_bias.float())
        return -self.decay_log.float().exp() * rate, beta.float().sigmoid()

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

    def _norm_weight(self) -> Tensor:
        """Return the norm's weight; tensor-parallel ranks share it, and their heads' gradients are summed here."""
        weight: Tensor = tensor_parallel.copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        return weight

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the parameters, sharded by heads but for the norm's."""
        whole: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own, axes = {name: getattr(self, name) for name in _SHARDED}, dict.fromkeys(_SHARDED, 0)
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        whole |= make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets, **groups)
        return whole


def _normalized(x: Tensor) -> Tensor:
    """Return vectors of length 1, as Qwen3-Next does: computed in fp32 or wider, with 1e-6 under the root."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


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
