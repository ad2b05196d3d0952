"""The Megatron-Core room: the only part of the project that imports ``megatron.core``."""
