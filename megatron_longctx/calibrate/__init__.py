"""Measures links, messages, kernels, the host's pace and whole steps of modes, on what is here.

`megatron-longctx calibrate` starts the ranks (`command`). Links and messages go through the channel of a program that
does nothing else, kernels are called in the shapes that modes make, modes train whole steps. What is found is kept in
the file that `schedules.calibration` reads, and by which `auto` and the inference engine choose.
"""
