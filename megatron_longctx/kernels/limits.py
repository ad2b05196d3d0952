"""Reasons shared by the providers' `why_not`: each returns None, or one sentence with the value and what is accepted.
`or` makes a chain of them, of which the first one counts, and nothing behind it is looked at.

None of these synchronises with the device or allocates on it.
"""

import torch

from megatron_longctx.kernels.interface import KernelRequest


def wrong_device(request: KernelRequest, *accepted: str) -> str | None:
    """The device type is not one of `accepted`, or there is no such device here."""
    if request.device_type not in accepted:
        return f"device_type={request.device_type!r} is not supported, only {' or '.join(map(repr, accepted))}"
    if request.device_type == "cuda" and not torch.cuda.is_available():
        return "device_type='cuda' was asked for, but torch sees no CUDA device"
    return None


def wrong_dtype(request: KernelRequest, *accepted: torch.dtype) -> str | None:
    """The dtype is not one of `accepted`."""
    if request.dtype in accepted:
        return None
    return f"dtype={request.dtype} is not supported, only {', '.join(map(str, accepted))}"


def wrong_head_dim(request: KernelRequest, *, multiple: int, most: int) -> str | None:
    """The head dim is no multiple of `multiple`, or above `most`."""
    if request.head_dim % multiple == 0 and request.head_dim <= most:
        return None
    return f"head_dim={request.head_dim} is not supported, only multiples of {multiple} up to {most}"


def wrong_value_dim(request: KernelRequest) -> str | None:
    """Values have another head dim than queries and keys."""
    if request.value_dim == request.head_dim:
        return None
    return f"v_head_dim={request.value_dim} is not supported, only that of queries and keys ({request.head_dim})"


def no_windows(request: KernelRequest) -> str | None:
    """Windows are asked for of a kernel that has none."""
    return "windows are not supported, only full and causal attention" if request.windows else None


def too_old_gpu(*, least: tuple[int, int]) -> str | None:
    """The current CUDA device's compute capability is below `least`. Ask behind `wrong_device`."""
    found = torch.cuda.get_device_capability()
    if found >= least:
        return None
    return f"compute capability {found[0]}.{found[1]} is not supported, only {least[0]}.{least[1]} and later"


def on_rocm() -> str | None:
    """torch is a ROCm build, whose ops of the same names have other limits and layouts."""
    return None if torch.version.hip is None else f"torch is a ROCm build ({torch.version.hip}), only CUDA is supported"


def flash_backward_gap(request: KernelRequest) -> str | None:
    """FlashAttention-2's backward does not fit the shared memory of some GPUs for head dims in (192, 224]. Ask behind
    `wrong_device`."""
    if not 192 < request.head_dim <= 224:
        return None
    found = torch.cuda.get_device_capability()
    if not ((8, 6) <= found <= (8, 9) or found >= (12, 0)):
        return None
    return f"head_dim={request.head_dim} has no backward on compute capability {found[0]}.{found[1]}, only up to 192"
