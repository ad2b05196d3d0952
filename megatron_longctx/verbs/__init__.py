"""The command `megatron-longctx`: a module for each verb, and `cli`, which reads its words."""
