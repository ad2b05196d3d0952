"""Measures links, messages, kernels, the host's speed and whole steps of modes on this machine.

`megatron-longctx calibrate` starts the ranks (`machine`). `costs` measures links and messages through the channel of a
pass that does nothing else, and kernels in the shapes that modes need. `passes` measures modes in whole training
steps. Results go to the file that `planner.calibration` reads; `auto` and the inference engine choose by it.
"""
