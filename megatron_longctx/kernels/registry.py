"""The one table of providers, and the choice among them."""

import logging

from megatron_longctx.kernels.cpu import CpuKernel
from megatron_longctx.kernels.cudnn import CudnnKernel
from megatron_longctx.kernels.flash import FlashKernel
from megatron_longctx.kernels.flash_attn import FlashAttnKernel
from megatron_longctx.kernels.interface import AttentionKernel, KernelRequest
from megatron_longctx.kernels.reference import ReferenceKernel

logger = logging.getLogger(__name__)

PROVIDERS: dict[str, type[AttentionKernel]] = {
    provider.name: provider for provider in (CudnnKernel, FlashAttnKernel, FlashKernel, CpuKernel, ReferenceKernel)
}

# What `auto` tries, fastest first.
AUTO_ORDER: dict[str, tuple[str, ...]] = {
    "cuda": ("cudnn", "flash_attn", "flash", "reference"),
    "cpu": ("cpu", "reference"),
}

_reported: set[KernelRequest] = set()


def available(request: KernelRequest) -> list[tuple[str, str | None]]:
    """Every provider's name, with None where it supports `request` and else the reason why not."""
    return [(name, _make(name, request).why_not(request)) for name in PROVIDERS]


def choose(name: str, request: KernelRequest) -> AttentionKernel:
    """The kernel called `name`, or for "auto" the first usable one of `AUTO_ORDER`.

    "auto" logs what it took and what it passed over, and why, once per request and process.

    Raises:
        ValueError: `name` is unknown, or cannot serve `request`; the message lists what can.
    """
    if name == "auto":
        return _choose_automatically(request)
    if name not in PROVIDERS:
        raise ValueError(f"kernel={name!r} is unknown; expected 'auto' or one of {', '.join(PROVIDERS)}.")
    kernel = _make(name, request)
    reason = kernel.why_not(request)
    if reason is not None:
        raise ValueError(f"kernel={name!r} cannot be used here: {reason}. {_usable(request)}")
    return kernel


def _choose_automatically(request: KernelRequest) -> AttentionKernel:
    passed_over: list[str] = []
    for name in AUTO_ORDER.get(request.device_type, ()):
        kernel = _make(name, request)
        reason = kernel.why_not(request)
        if reason is None:
            if request not in _reported:
                _reported.add(request)
                logger.info("attention kernel: %s%s", name, "".join(f"; not {line}" for line in passed_over))
            return kernel
        passed_over.append(f"{name} ({reason})")
    if not passed_over:
        expected = " or ".join(map(repr, AUTO_ORDER))
        raise ValueError(
            f"kernel='auto' knows no kernels for device_type={request.device_type!r}; expected {expected}."
        )
    raise ValueError(f"kernel='auto' found none for {request}: {'; '.join(passed_over)}. {_usable(request)}")


def _make(name: str, request: KernelRequest) -> AttentionKernel:
    return PROVIDERS[name](deterministic=request.deterministic, varying=request.varying)


def _usable(request: KernelRequest) -> str:
    usable = [name for name, reason in available(request) if reason is None]
    if not usable:
        return "No kernel supports this request: change its device, dtype or head dim."
    return f"Usable for this request: {', '.join(usable)}; or 'auto' to take the fastest."
