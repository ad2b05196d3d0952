"""When a result is accurate enough.

The rule: its error against an fp64 reference is at most twice the error of the single-device kernel of the same
precision against the same reference. Errors are Frobenius norms of the difference.

For dq it holds but for what the lse of blocks, in fp32, are rounded by (`lse_rounding`). A kernel that sees all keys
has one sum of exponentials, forward and backward: whatever its error, the gradients of a row's scores add up to 0, and
what all keys have in common drops out of dq. Blocks weigh each other by lse that are off by up to half an eps of
themselves (6e-5 where all logits are near 1,000), so that it drops out as far as that. out, dk and dv keep the rule.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_SLACK = 2.0
_VANISHING = 1e-9  # a reference below this size is zero but for rounding: nothing to be relative to
_VANISHING_RESULT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


def error(found: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference, in fp64."""
    return float((found.to(truth.device, torch.float64) - truth.double()).norm())


def relative_error(found: Tensor, truth: Tensor) -> float:
    """`error` as a share of the truth's norm; for a truth that vanishes, the error itself."""
    size = float(truth.double().norm())
    return error(found, truth) / (size if size > _VANISHING else 1.0)


def lse_rounding(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, causal: bool) -> dict[str, float]:
    """By name, how much more than twice the single-device kernel's own error results may be off: half an eps (fp32) of
    each query's lse, of the terms of its gradient without their signs. All `[S, b, h, d]`, with a scale of
    `d ** -0.5`."""
    q, k, v, grad_out = (x.double().permute(1, 2, 0, 3) for x in (q, k, v, grad_out))
    scale = q.shape[-1] ** -0.5
    scores = q @ k.mT * scale
    if causal:
        scores.masked_fill_(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    probs, grad_probs = (scores - lse).exp(), grad_out @ v.mT
    off = torch.finfo(torch.float32).eps / 2 * lse.abs() * probs
    mean, size = ((probs * x).sum(-1, keepdim=True) for x in (grad_probs, grad_probs.abs()))
    return {"dq": float((off * ((grad_probs - mean).abs() + size) @ k.abs() * scale).norm())}


def assert_as_good_as(
    found: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    case: object = "",
    besides: Mapping[str, float] | None = None,
) -> None:
    """Check every tensor of `found` by the rule.

    Rounding the truth to the result's dtype is an error that any kernel may make, so no less is ever asked for.

    Args:
        own: what the single-device kernel found, in the same precision.
        truth: the reference, in fp64 (or a precision far above the result's).
        case: what to name in the message.
        besides: by name, what is allowed beyond the rule.

    Raises:
        AssertionError: a shape or dtype that differs, a value that is not finite, or an error above the rule's.
    """
    for name, expected in truth.items():
        result = found[name]
        assert result.shape == expected.shape, f"{case}: {name} {tuple(result.shape)}, not {tuple(expected.shape)}"
        assert result.dtype == own[name].dtype, f"{case}: {name} is {result.dtype}, not {own[name].dtype}"
        if not result.numel():
            continue
        assert torch.isfinite(result).all(), f"{case}: {name} is not finite"
        if float(expected.double().norm()) <= _VANISHING:
            assert float(result.double().abs().max()) <= _VANISHING_RESULT[result.dtype], f"{case}: {name} is not zero"
            continue
        rounding = error(expected.to(result.dtype), expected)
        allowed = _SLACK * max(error(own[name], expected), rounding) + (besides or {}).get(name, 0.0)
        assert error(result, expected) <= allowed, (
            f"{case}: {name} is {error(result, expected):.3g} off, at most {allowed:.3g} is allowed "
            f"(norm {float(expected.double().norm()):.3g})"
        )
