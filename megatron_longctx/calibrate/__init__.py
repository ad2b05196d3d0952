"""Measures links, messages, kernels, the host's speed and whole steps of modes on this machine.

`megatron-longctx calibrate` starts the ranks (`command`). Links and messages are measured through the channel of a
program that does nothing else, kernels in the shapes that modes need, and modes in whole training steps. Results go to
the file that `schedules.calibration` reads; `auto` and the inference engine choose by it.
"""
