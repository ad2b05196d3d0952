"""Flash Communication: sums over ranks in low-bit integers, and policies that decide which sums are quantized.

`reduction.Reducer` decides by policy, size and, for `auto`, measured times. `quantized` sums in two steps of
collectives, or in one kernel over peer memory, with the same bits. `quantize` packs and unpacks, with fused kernels in
`quantize_triton`. `peer_memory` is memory that kernels of other ranks write, and `peer_flags` is how they wait for each
other.
"""
