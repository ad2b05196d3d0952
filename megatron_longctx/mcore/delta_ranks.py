"""The gated delta rule over ranks by fla-core's kernels, with the states between ranks computed here.

fla-core has context parallelism of its own: every rank but the last computes the matrix T, by which an entering state
is multiplied, in emulated fp32. For 32K tokens of 32 heads on an H100 that takes 7.0 ms forward and 4.8 ms backward,
where the kernel that computes all states takes 0.9 and 1.7 ms. So here

- the first rank of a document sends the state that the kernel returns with its outputs, and computes no T;
- a rank in the middle of a document lets the same kernel run once more from zeros, for its last state, and once from
  the identity with values of zero, for T: it is as exact as the states themselves, whose products have 16 bits, too;
- backward multiplies by the transpose of the same T, and sends the gradient of the entering state.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.kernels.no_grad import first_order
from ..models.delta_rule import CHUNK, Place, joined


class SharedRule(torch.autograd.Function):
    """Computes the rule for one row of a batch; `delta_kernels.gated_delta_rule` has the arguments.

    Args:
        stops: of the parts of documents on this rank, int64 on the device, and the same on the host.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, place: Place, stops: Any, group: Any
    ) -> Tensor:
        from fla.modules.norm.l2norm import l2norm_fwd
        from fla.ops.common.chunk_o import chunk_fwd_o
        from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
        from fla.ops.utils import chunk_local_cumsum
        from fla.ops.utils.constant import RCP_LN2
        from fla.ops.utils.index import prepare_chunk_indices

        ctx.place, ctx.group = place, group
        indices = prepare_chunk_indices(stops[0], CHUNK, cu_seqlens_cpu=stops[1])
        ctx.where = {"cu_seqlens": stops[0], "chunk_indices": indices}
        (q, q_rstd), (k, k_rstd) = l2norm_fwd(q), l2norm_fwd(k)
        g = chunk_local_cumsum(g, chunk_size=CHUNK, scale=RCP_LN2, **ctx.where)
        w, u, system = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=g, beta=beta, chunk_size=CHUNK, **ctx.where)
        scan = _scan(ctx.where, k, w, g)
        state = q.new_zeros(len(place.lengths), v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)
        transfer = None
        if place.middle:
            identity = torch.eye(q.shape[3], device=q.device).expand(1, v.shape[2], -1, -1).contiguous()
            transfer = scan(u.new_zeros(*u.shape[:3], q.shape[3]), identity)[2]
        made = scan(u, state) if place.leaves or not place.continues else None
        last = made[2][-1:] if made is not None else torch.zeros_like(state[:1])
        lasts = _gathered(last, transfer, place, group)
        if place.continues:
            made = None  # a rank's states are large, and are computed again
            state[0] = joined(lasts[place.first_rank : place.rank], v.shape[3])
            made = scan(u, state)
        assert made is not None
        out: Tensor = chunk_fwd_o(
            q=q, k=k, v=made[1], h=made[0], g=g, scale=q.shape[3] ** -0.5, chunk_size=CHUNK, **ctx.where
        )
        ctx.save_for_backward(q, q_rstd, k, k_rstd, v, g, beta, system, state[:1].clone(), transfer)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from fla.modules.norm.l2norm import l2norm_bwd
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu
        from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv_local
        from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd
        from fla.ops.utils import chunk_local_cumsum

        q, q_rstd, k, k_rstd, v, g, beta, system, entered, transfer = ctx.saved_tensors
        place, where, grad = ctx.place, ctx.where, grads[0].contiguous()
        w, u = recompute_w_u_fwd(k=k, v=v, beta=beta, A=system, g=g, **where)
        state = q.new_zeros(len(place.lengths), *entered.shape[1:], dtype=torch.float32)
        state[:1] = entered
        common = {"q": q, "k": k, "g": g, "do": grad, "scale": q.shape[3] ** -0.5, "chunk_size": CHUNK, **where}
        local = chunk_bwd_dv_local(**common)
        grad_last = torch.zeros_like(state)

        def scan(values: Tensor) -> Any:
            return chunk_gated_delta_rule_bwd_dhu(w=w, dv=values, h0=state, dht=grad_last, **common)

        # What a rank sends comes first, and a rank that waits computes its states again meanwhile.
        waits = place.leaves and not place.continues
        if waits:
            h, new, _ = _scan(where, k, w, g)(u, state)
            entering = torch.zeros_like(entered)
        else:
            dh, grad_state, du = scan(local)
            entering = grad_state[:1]
        turned = None if transfer is None else transfer.mT
        every = _gathered(entering, turned, place, ctx.group)
        if not waits:
            h, new, _ = _scan(where, k, w, g)(u, state)
        if place.leaves:
            dh = du = None  # as large as a rank's states and values, and computed again
            grad_last[-1] = joined(every[place.rank + 1 : place.last_rank + 1].flip(0), v.shape[3])
            dh, _, du = scan(local)
        del local, u  # as large as the values each
        dq, dk, dw, dg = chunk_bwd_dqkwg(v=new, w=w, h=h, dv=du, dh=dh, **common)
        dk_more, dv, dbeta, dg_more = prepare_wy_repr_bwd(k=k, v=v, beta=beta, g=g, A=system, dw=dw, du=du, **where)
        dg = chunk_local_cumsum(dg.add_(dg_more), chunk_size=CHUNK, reverse=True, **where)
        dq, dk = l2norm_bwd(q, q_rstd, dq), l2norm_bwd(k, k_rstd, dk.add_(dk_more))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dg.to(g.dtype), dbeta.to(beta.dtype), None, None, None


def _scan(where: dict[str, Tensor], k: Tensor, w: Tensor, g: Tensor) -> Callable[[Tensor, Tensor], Any]:
    """Return what computes the state before every chunk, corrected values, and last states `[documents, h, k, v]`."""
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h

    def scan(values: Tensor, state: Tensor) -> Any:
        return chunk_gated_delta_rule_fwd_h(
            k=k, w=w, u=values, g=g, initial_state=state, output_final_state=True, chunk_size=CHUNK, **where
        )

    return scan


def _gathered(last: Tensor, transfer: Tensor | None, place: Place, group: dist.ProcessGroup) -> Tensor:
    """Return `delta_rule.Section.last` of all ranks, `[n, 1, h, k, v + k]`; without T if no rank multiplies by one."""
    if place.chained:
        square = last.new_zeros(*last.shape[:3], last.shape[2]) if transfer is None else transfer
        last = torch.cat((last, square), dim=-1)
    lasts = last.new_empty(dist.get_world_size(group), *last.shape)
    dist.all_gather_into_tensor(lasts, last.contiguous().unsqueeze(0), group=group)
    return lasts
