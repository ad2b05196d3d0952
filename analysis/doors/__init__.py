"""The doors of `megatron_longctx.integrations` on two GPUs, with the layers of TransformerEngine."""
