"""Where the seconds go from `megatron-longctx train` to the end of the first step."""
