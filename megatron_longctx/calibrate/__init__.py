"""`megatron-longctx calibrate`: measures links, messages, kernels, the host's pace and whole steps of modes.

What it finds is kept in the file that `schedules.calibration` reads.
"""
