"""A stand-in for the FP8 tensors of TransformerEngine, which need a GPU, with one scale and a transpose for backward.

`install` gives it to Megatron-Core, in the place of the four things that it uses of TransformerEngine for weights in
FP8: the class, the exchange of its bytes, the quantization of main parameters, and the transposes after a gather.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import fp8_utils
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.optimizer import distrib_optimizer
from torch import Tensor
from torch.utils._pytree import tree_map

LIMIT = 448.0


def rounded(values: Tensor) -> Tensor:
    """Return values as their FP8 weight has them, by definition: bf16, then e4m3 with the scale of the largest."""
    scale = LIMIT / values.bfloat16().float().abs().max()
    return ((values.bfloat16().float() * scale).to(torch.float8_e4m3fn).float() / scale).bfloat16()


class Fp8Tensor(torch.Tensor):
    """A bf16 tensor for torch, which is stored as bytes, their scale, and a transpose of the bytes."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16, device=data.device)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.bytes, self.scale, self.transpose_of = data, scale, data.t().clone()

    @classmethod
    def of(cls, values: Tensor) -> Any:
        """Return a parameter with these values, which it keeps for the optimizer, as TransformerEngine's layers do."""
        made = cls(torch.empty(values.shape, dtype=torch.uint8), torch.ones(()))
        made.quantize(values.detach())
        parameter: Any = torch.nn.Parameter(made)
        initial = {"values": values.detach().clone()}
        parameter.get_high_precision_init_val = lambda: initial.get("values")
        parameter.clear_high_precision_init_val = initial.clear
        return parameter

    def quantize(self, values: Tensor) -> None:
        self.cast(values.bfloat16().float(), values.bfloat16().float().abs().max(), slice(None))
        self.transpose_of = self.bytes.t().clone()

    def cast(self, values: Tensor, amax: Tensor, part: slice) -> None:
        self.scale = LIMIT / amax
        self.bytes.view(-1)[part] = (values * self.scale).to(torch.float8_e4m3fn).view(torch.uint8).flatten()

    def dequantize(self) -> Tensor:
        return (self.bytes.view(torch.float8_e4m3fn).float() / self.scale).bfloat16()

    def bfloat16(self, *_: Any) -> Tensor:
        return self.dequantize()

    def float(self, *_: Any) -> Tensor:
        return self.dequantize().float()

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if not isinstance(values, Fp8Tensor):
            self.quantize(values)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function is torch.ops.aten.detach.default:
            (own,) = args
            made = cls(own.bytes, own.scale)
            made.__dict__ = own.__dict__  # one storage
            return made
        if function is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            args[0].quantize(args[1].dequantize() if isinstance(args[1], cls) else args[1])
            return args[0]
        plain = tree_map(lambda x: x.dequantize() if isinstance(x, cls) else x, (args, kwargs or {}))
        return function(*plain[0], **plain[1])


def _replace_bytes(weight: Fp8Tensor, storage: Tensor) -> None:
    storage.copy_(weight.bytes)
    weight.bytes = storage


def _quantize_parts(weights: list[Any], parts: list[Any], starts: list[Any], group: Any) -> None:
    for weight, part, start in zip(weights, parts, starts, strict=True):
        amax = torch.zeros(()) if part is None else part.bfloat16().float().abs().max()
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        weight.scale = LIMIT / amax
        if part is not None:
            weight.cast(part.bfloat16().float(), amax, slice(start, start + part.numel()))


def _transpose(weights: list[Any]) -> None:
    for weight in weights:
        weight.transpose_of = weight.bytes.t().clone()


def _gather(whole: Tensor, own: Tensor, group: Any, async_op: bool) -> None:
    dist.all_gather(list(whole.chunk(group.size())), own.clone(), group=group)


def install(patch: pytest.MonkeyPatch) -> None:
    """Let Megatron-Core take the stand-in for TransformerEngine's class, in this process."""
    for name, value in {
        "HAVE_TE_FP8_TENSOR_CLASS": True,
        "FP8_TENSOR_CLASS": Fp8Tensor,
        "_modify_underlying_storage_impl": _replace_bytes,
        "_quantize_param_shard_impl": lambda *args: _quantize_parts(*args[:4]),
        "te_post_all_gather_processing": _transpose,
        "dequantize_fp8_tensor": Fp8Tensor.dequantize,
    }.items():
        patch.setattr(fp8_utils, name, value)
    # gloo cannot gather buffers of bytes and of bf16 in one call, as NCCL does.
    patch.setattr(param_and_grad_buffer, "dist_all_gather_func", _gather)
    patch.setattr(distrib_optimizer, "dequantize_fp8_tensor", Fp8Tensor.dequantize)
