"""The parts of recurrent layers by the Triton kernels of the package fla-core, for 16-bit tensors on GPUs."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from .delta_ranks import SharedRule
from .pack import Pack


def convolved(x: Tensor, halo: Tensor | None, weight: Tensor, bias: Tensor | None, pack: Pack) -> Tensor:
    """Return SiLU of causal convolutions of every channel of `x` `[b, s, c]`.

    Args:
        halo: the taps - 1 tokens before the first, `[taps - 1, b, c]`; any values where there are none. None if no
            document goes on from rank to rank.
        weight: `[c, taps]`; the last tap is the token itself.
        bias: `[c]`, or None.
    """
    from fla.modules.causal_conv1d import causal_conv1d

    stops, on_host = pack.stops(len(x), x.device)
    state = None
    if halo is not None:
        taps, rows = weight.shape[1], len(pack.place.lengths)
        seen = min(taps - 1, pack.place.before)  # of its first document; an empty slice keeps the graph on all ranks
        state = functional.pad(halo[taps - 1 - seen :].permute(1, 2, 0), (taps - seen, 0))
        state = functional.pad(state.unsqueeze(1), (0, 0, 0, 0, 0, rows - 1)).flatten(0, 1)
    out, _ = causal_conv1d(
        x.flatten(0, 1).unsqueeze(0),
        weight,
        bias,
        initial_state=state,
        activation="silu",
        cu_seqlens=stops,
        cu_seqlens_cpu=on_host,
    )
    return out.view(x.shape)  # type: ignore[no-any-return]


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pack: Pack, group: dist.ProcessGroup | None
) -> Tensor:
    """Return the rule's outputs `[b, s, h, v]`, with queries and keys normalized here.

    Args:
        q, k: `[b, s, key heads, k]`; a key head serves several value heads in a row.
        v, g, beta: `[b, s, h, v]` and `[b, s, h]`.
        group: the context-parallel ranks, none of them without tokens; unused if no document goes on between them.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    place = pack.place
    if not place.exchanges:
        stops, on_host = pack.stops(len(q), q.device)
        flat = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, g, beta))
        out, _ = chunk_gated_delta_rule(*flat, use_qk_l2norm_in_kernel=True, cu_seqlens=stops, cu_seqlens_cpu=on_host)
        return out.view(v.shape)  # type: ignore[no-any-return]
    split = ((x[row : row + 1] for x in (q, k, v, g, beta)) for row in range(len(q)))
    rows: list[Tensor] = [SharedRule.apply(*row, place, pack.stops(1, q.device), group) for row in split]  # type: ignore[no-untyped-call]
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def chunked(
    lengths: Sequence[int], state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute a delta rule for one document with a batch of 1, a `delta_rule.Kernel` without gradients."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    assert len(lengths) == len(q) == 1
    inputs = (x.contiguous() for x in (q, k, v, g, beta))
    rule = chunk_kda if g.ndim == k.ndim else chunk_gated_delta_rule
    out, last = rule(*inputs, initial_state=state.contiguous(), output_final_state=True, scale=1.0)
    return out, last


def kimi_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, rates: Tensor, beta: Tensor, log: Tensor, bias: Tensor, pack: Pack, group: Any
) -> Tensor:
    """Return the rule's outputs `[b, s, h, v]`, with queries and keys normalized and decays computed here.

    fla-core's own context parallelism computes the states between ranks.

    Args:
        q, k, v, beta, pack, group: as for `gated_delta_rule`.
        rates: `[b, s, h, k]`; the logarithm of a decay is -exp(log) softplus(rate + bias).
        log, bias: `[h]` and `[h k]`.
    """
    from fla.ops.cp import FLACPContext
    from fla.ops.kda import chunk_kda

    place = pack.place
    stops, on_host = pack.stops(1 if place.exchanges else len(q), q.device)
    where: dict[str, Any] = {"cu_seqlens": stops, "cu_seqlens_cpu": on_host}
    if place.exchanges:
        ranks = {"pre_num_ranks": place.rank - place.first_rank, "post_num_ranks": place.last_rank - place.rank}
        ends = {"is_first_rank": not place.continues, "is_last_rank": not place.leaves}
        where = {"cp_context": FLACPContext(group, **where, **ranks, **ends)}
    gates = {"A_log": log, "dt_bias": bias, "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}
    inputs = (x if place.exchanges else x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, rates, beta))
    rows = zip(*(torch.split(x, 1) for x in inputs), strict=True)
    found = [chunk_kda(*(x.contiguous() for x in row), **gates, **where)[0] for row in rows]
    return (torch.cat(found) if len(found) > 1 else found[0]).view(v.shape)


def state_space(
    lengths: Sequence[int], state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute Mamba-2's recurrence, a `delta_rule.Kernel`."""
    from fla.ops.simple_gla import chunk_simple_gla

    batch, documents = len(q), len(lengths)
    on_host = torch.tensor([0, *accumulate([*lengths] * batch)])
    out, last = chunk_simple_gla(
        *(x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, g)),
        scale=1.0,
        initial_state=functional.pad(state.unsqueeze(1), (*(0, 0) * 3, 0, documents - 1)).flatten(0, 1),
        output_final_state=True,
        cu_seqlens=on_host.to(q.device),
        cu_seqlens_cpu=on_host,
    )
    return out.view(v.shape), last.unflatten(0, (batch, documents))[:, -1]


def gated_norm(x: Tensor, gates: Tensor, weight: Tensor, epsilon: float, activation: str) -> Tensor:
    """Return the RMS norm of the last dimension, times `activation` of gates of the same shape, rounded once."""
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    return rms_norm_gated(x, gates, weight, None, activation, eps=epsilon)  # type: ignore[no-any-return]
