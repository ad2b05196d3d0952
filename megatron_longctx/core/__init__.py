"""Exact attention over a sharded sequence, forward and backward. It needs torch and numpy alone.

- `layout`: which rank holds which token. `plans`: masks, modes and backward plans as data, and the proof of each.
- `kernels`: attention of one process's tensors. `comm`: messages between ranks.
- `attention`: `ContextParallelAttention`, which runs any plan on any kernel and transport.
- `errors`: what users are told. `cache`: the folder of files that speed up a later start.
"""
