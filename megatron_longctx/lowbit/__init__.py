"""Flash Communication: sums over ranks in low-bit integers, and the policies that say which sums.

`reduction.Reducer` decides by policy, size and, for `auto`, the measured `crossover`; `quantized` sums in two steps of
collectives, `peer_reduce` does the same, to the bit, in one kernel over peer memory; `quantize` packs and unpacks, with
fused kernels in `quantize_triton`.
"""
