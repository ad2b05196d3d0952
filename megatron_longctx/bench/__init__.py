"""Measurements: what links and kernels take (`calibrate`), and how fast the modes are beside each other (`attention`),
and the times to first token and between tokens over a sharded cache (`inference`).

Run as `megatron-longctx bench VERB`. Results carry their configuration, hardware, date and commit.
"""
