"""The choice of a provider for a request, and the reasons that providers give for refusing one.

A reason is one sentence with the value and the accepted values. Its function returns None if there is no objection, so
that `or` chains reasons and the first one counts. No reason synchronizes with the device or allocates memory on it.
"""

import logging

import torch

from .interface import PROVIDERS, AttentionKernel, KernelRequest

logger = logging.getLogger(__name__)

_logged: set[KernelRequest] = set()


def auto_order(device_type: str) -> list[str]:
    """Return the providers that `auto` tries on a type of device, fastest first."""
    speeds = {name: provider.speed.get(device_type, 0) for name, provider in PROVIDERS.items()}
    return sorted((name for name, speed in speeds.items() if speed), key=lambda name: -speeds[name])


def available(request: KernelRequest) -> list[tuple[str, str | None]]:
    """Return every provider's name, with None if it supports `request`, else with the reason why it does not."""
    return [(name, each(deterministic=request.deterministic).why_not(request)) for name, each in PROVIDERS.items()]


def choose_kernel(name: str, request: KernelRequest) -> AttentionKernel:
    """Return the kernel called `name`; for "auto", the first of `auto_order` that supports `request`.

    "auto" logs its choice, and which providers it skipped and why, once per request and process.

    Raises:
        ValueError: `name` is unknown, or does not support `request`; the message lists what does.
    """
    auto = name == "auto"
    if not auto and name not in PROVIDERS:
        raise ValueError(f"kernel={name!r} is unknown; expected 'auto' or one of {', '.join(PROVIDERS)}.")
    names = auto_order(request.device_type) if auto else [name]
    if not names:
        expected = " or ".join(map(repr, sorted({device for each in PROVIDERS.values() for device in each.speed})))
        raise ValueError(
            f"kernel='auto' knows no kernels for device_type={request.device_type!r}; expected {expected}."
        )
    skipped: list[str] = []
    for each in names:
        kernel = PROVIDERS[each](deterministic=request.deterministic)
        reason = kernel.why_not(request)
        if reason is None:
            if auto and request not in _logged:
                _logged.add(request)
                logger.info("attention kernel: %s%s", each, "".join(f"; not {line}" for line in skipped))
            return kernel
        skipped.append(f"{each} ({reason})")
    problem = f"found none for {request}: {'; '.join(skipped)}" if auto else f"cannot be used here: {reason}"
    usable = [each for each, reason in available(request) if reason is None]
    remedy = f"Usable for this request: {', '.join(usable)}; or 'auto' to take the fastest."
    if not usable:
        remedy = "No kernel supports this request: change its device, dtype or head dim."
    raise ValueError(f"kernel={name!r} {problem}. {remedy}")


def wrong_device(request: KernelRequest, *accepted: str) -> str | None:
    """Refuse a device type that is not one of `accepted`, or has no device on this machine."""
    if request.device_type not in accepted:
        return f"device_type={request.device_type!r} is not supported, only {' or '.join(map(repr, accepted))}"
    if request.device_type == "cuda" and not torch.cuda.is_available():
        return "device_type='cuda' was requested, but torch sees no CUDA device"
    return None


def wrong_dtype(request: KernelRequest, *accepted: torch.dtype) -> str | None:
    """Refuse a dtype that is not one of `accepted`."""
    if request.dtype in accepted:
        return None
    return f"dtype={request.dtype} is not supported, only {', '.join(map(str, accepted))}"


def wrong_gpu(request: KernelRequest, *, least: tuple[int, int]) -> str | None:
    """Refuse all but CUDA GPUs of compute capability `least` or later, in bf16 or fp16."""
    reason = wrong_device(request, "cuda")
    if reason is None and torch.version.hip is not None:  # its ops of the same names have other limits and layouts
        reason = f"torch is a ROCm build ({torch.version.hip}), only CUDA is supported"
    if reason is None and (actual := torch.cuda.get_device_capability()) < least:
        reason = f"compute capability {actual[0]}.{actual[1]} is not supported, only {least[0]}.{least[1]} and later"
    return reason or wrong_dtype(request, torch.bfloat16, torch.float16)


def wrong_head_dim(request: KernelRequest, *, multiple: int, most: int) -> str | None:
    """Refuse a head dim that is not a multiple of `multiple`, or larger than `most`."""
    if request.head_dim % multiple == 0 and request.head_dim <= most:
        return None
    return f"head_dim={request.head_dim} is not supported, only multiples of {multiple} up to {most}"


def wrong_value_dim(request: KernelRequest) -> str | None:
    """Refuse values whose head dim is not that of queries and keys."""
    if request.value_dim == request.head_dim:
        return None
    return f"v_head_dim={request.value_dim} is not supported, only that of queries and keys ({request.head_dim})"
