"""Milliseconds of fla-core's kernels that compute states: `python -m analysis.delta_rule_parts --out FILE.json`.

`scan` computes the state before every chunk, forward and backward, with the sequence divided into `parts`. `summary` is
fla-core's own for context parallelism: the last state, and the matrix by which an entering state is multiplied.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from analysis.benchmarks.compile_ahead import compile_little

KEY_HEADS, HEADS, SIZE, CHUNK, ROUNDS = 16, 32, 128, 64, 6


def milliseconds(run: Callable[[], object]) -> float:
    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(ROUNDS):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / ROUNDS


def measure(tokens: int) -> dict[str, float]:
    """Return the milliseconds of every kernel, by its name."""
    from fla.modules.norm.l2norm import l2norm_fwd
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu, chunk_gated_delta_rule_fwd_h
    from fla.ops.common.chunk_o import chunk_bwd_dv_local
    from fla.ops.cp.chunk_bwd import chunk_cp_bwd_dh
    from fla.ops.cp.chunk_fwd import chunk_cp_fwd_h
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2
    from fla.ops.utils.index import prepare_chunk_indices

    torch.manual_seed(0)

    def normal(heads: int) -> torch.Tensor:
        return torch.randn(1, tokens, heads, SIZE, device="cuda", dtype=torch.bfloat16)

    (q, _), (k, _) = (l2norm_fwd(normal(KEY_HEADS)) for _ in range(2))
    v, grad = normal(HEADS), normal(HEADS)
    g, beta = -torch.rand(1, tokens, HEADS, device="cuda") / 20, torch.rand(1, tokens, HEADS, device="cuda")

    def divided(parts: int) -> dict[str, torch.Tensor]:
        stops = torch.arange(0, tokens + 1, tokens // parts, device="cuda")
        return {"cu_seqlens": stops, "chunk_indices": prepare_chunk_indices(stops, CHUNK)}

    whole = divided(1)
    g = chunk_local_cumsum(g, chunk_size=CHUNK, scale=RCP_LN2, **whole)
    w, u, _ = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=g, beta=beta, chunk_size=CHUNK, **whole)
    common = {"q": q, "k": k, "g": g, "do": grad, "scale": SIZE**-0.5, "chunk_size": CHUNK}
    local = chunk_bwd_dv_local(**common, **whole)
    last = torch.zeros(HEADS, SIZE, 2 * SIZE, device="cuda")
    found = {}
    for parts in (1, 2, 4, 8):
        where, state = divided(parts), torch.zeros(parts, HEADS, SIZE, SIZE, device="cuda")
        forward = partial(chunk_gated_delta_rule_fwd_h, k=k, w=w, u=u, g=g, output_final_state=True, **where)
        backward = partial(chunk_gated_delta_rule_bwd_dhu, w=w, dv=local, **common, **where)
        found[f"scan forward, {parts} parts"] = milliseconds(partial(forward, initial_state=state))
        found[f"scan backward, {parts} parts"] = milliseconds(partial(backward, h0=state, dht=state))
    stops = {"cu_seqlens": whole["cu_seqlens"], "chunk_size": CHUNK}
    found["summary forward"] = milliseconds(partial(chunk_cp_fwd_h, k=k, w=w, u=u, hm=last, g=g, **stops))
    found["summary backward"] = milliseconds(partial(chunk_cp_bwd_dh, w=w, dv=local, dhm=last, **(common | stops)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    compile_little()
    found = measure(arguments.tokens)
    record = {"what": "milliseconds of fla-core's kernels that compute states", "tokens": arguments.tokens, "ms": found}
    arguments.out.write_text(json.dumps(record | {"device": torch.cuda.get_device_name()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
