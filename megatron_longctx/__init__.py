"""Context-parallel attention for Megatron-Core, for training and serving LLMs on 64K to millions of tokens.

A parallelism mode is a plan, and a plan is data: see `docs/architecture.md` for the rooms and their laws.
"""

__version__ = "0.1.0"
