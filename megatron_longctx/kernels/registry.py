"""The choice among the providers."""

import logging

from megatron_longctx.kernels import providers  # noqa: F401 (they register themselves)
from megatron_longctx.kernels.interface import PROVIDERS, AttentionKernel, KernelRequest

logger = logging.getLogger(__name__)


def auto_order(device_type: str) -> list[str]:
    """What `auto` tries on a device, the fastest first."""
    speeds = {name: provider.speed.get(device_type, 0) for name, provider in PROVIDERS.items()}
    return sorted((name for name, speed in speeds.items() if speed), key=lambda name: -speeds[name])


_reported: set[KernelRequest] = set()


def available(request: KernelRequest) -> list[tuple[str, str | None]]:
    """Every provider's name, with None where it supports `request` and else the reason why not."""
    return [(name, _make(name, request).why_not(request)) for name in PROVIDERS]


def choose(name: str, request: KernelRequest) -> AttentionKernel:
    """The kernel called `name`, or for "auto" the first usable one of `auto_order`.

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
    for name in auto_order(request.device_type):
        kernel = _make(name, request)
        reason = kernel.why_not(request)
        if reason is None:
            if request not in _reported:
                _reported.add(request)
                logger.info("attention kernel: %s%s", name, "".join(f"; not {line}" for line in passed_over))
            return kernel
        passed_over.append(f"{name} ({reason})")
    if not passed_over:
        expected = " or ".join(map(repr, sorted({device for each in PROVIDERS.values() for device in each.speed})))
        raise ValueError(
            f"kernel='auto' knows no kernels for device_type={request.device_type!r}; expected {expected}."
        )
    raise ValueError(f"kernel='auto' found none for {request}: {'; '.join(passed_over)}. {_usable(request)}")


def _make(name: str, request: KernelRequest) -> AttentionKernel:
    return PROVIDERS[name](deterministic=request.deterministic)


def _usable(request: KernelRequest) -> str:
    usable = [name for name, reason in available(request) if reason is None]
    if not usable:
        return "No kernel supports this request: change its device, dtype or head dim."
    return f"Usable for this request: {', '.join(usable)}; or 'auto' to take the fastest."
