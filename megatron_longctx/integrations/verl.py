"""verl: `actor_rollout_ref.model.external_lib=megatron_longctx.integrations.verl`.

verl imports this module before it builds a model. Every Megatron-Bridge model that the process builds from then on has
context-parallel attention; verl's batches, RoPE and losses stay.
"""

from __future__ import annotations

import functools
from typing import Any

from verl.utils import megatron_utils

from ..core.errors import refuse
from .megatron_bridge import switch_providers

_build = megatron_utils.make_megatron_module


@functools.wraps(_build)
def _with_bridge_alone(*args: Any, provider: Any = None, **kwargs: Any) -> Any:
    if provider is None:
        remedy = "Set actor_rollout_ref.actor.megatron.use_mbridge=True and vanilla_mbridge=False."
        raise refuse("vanilla_mbridge", True, "False: this attention is switched on in Megatron-Bridge", remedy)
    return _build(*args, provider=provider, **kwargs)


megatron_utils.make_megatron_module = _with_bridge_alone
switch_providers()
