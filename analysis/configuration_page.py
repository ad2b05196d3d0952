"""`docs/configuration.md`, from the typed configuration: `python -m analysis.configuration_page` writes it again.

What a key means is the comment beside or above its field in the sources of `megatron_longctx/config`.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from megatron_longctx.config import Config, keys_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
_HEAD = """# Configuration

This page lists every key. Set one as `key=value` after a verb. `megatron-longctx train --cfg job` prints the whole
configuration. [Training](training.md) explains the keys that most runs set.

`python -m analysis.configuration_page` generates this page from
[`megatron_longctx/config`](../megatron_longctx/config/tree.py), and a test compares them.
"""
# Meanings of keys whose fields have no comment.
_PLAIN = {
    "model.name": "name shown in tables and W&B",
    "model.num_layers": "transformer layers",
    "model.hidden_size": "width of the residual stream",
    "model.num_attention_heads": "query heads",
    "model.num_kv_heads": "key/value heads; fewer than query heads: grouped-query attention",
    "model.ffn_hidden_size": "width inside the MLP",
    "model.vocab_size": "entries of the embedding; null: those of the tokenizer, rounded up to vocab_multiple",
    "model.vocab_multiple": "a tokenizer's vocabulary is rounded up to a multiple of this",
    "model.normalization": "type of all norms",
    "model.position_embedding": "rotary, or a learned table of data.seq_length entries",
    "model.rope_base": "RoPE's base (theta)",
    "model.rope_scaling.kind": "how RoPE is extended beyond original_length",
    "model.rope_scaling.factor": "factor of the extension",
    "model.rope_scaling.high_freq_factor": "llama3: pairs that rotate more often than this are not scaled",
    "model.rope_scaling.beta_slow": "yarn: pairs that rotate fewer times than this are scaled fully",
    "model.window_pattern": "every k-th layer sees all tokens; null: none does",
    "model.tie_embeddings": "the LM head shares the embedding's weights",
    "model.init_std": "standard deviation of initial weights",
    "parallelism.context_parallel_size": "ranks that shard a sequence",
    "parallelism.tensor_parallel_size": "ranks that shard heads and matrices",
    "parallelism.pipeline_parallel_size": "ranks that divide the layers",
    "parallelism.data_parallel_size": "replicas; null: the remaining factor of the world size",
    "attention.deterministic": "bit-identical results from run to run; slower",
    "recompute.mode": "what a layer keeps for backward: see above",
    "data.prefix": "the dataset, or a blend of several with weights",
    "data.seq_length": "tokens per sequence",
    "data.tokenizer": "library of the tokenizer",
    "data.mask_eod_loss": "exclude labels that end a document from the loss",
    "optim.lr": "highest learning rate",
    "optim.min_lr": "final learning rate of the decay",
    "optim.warmup_steps": "steps in which the learning rate rises from 0",
    "optim.decay_style": "how it falls after the warm-up",
    "optim.weight_decay": "weight decay of AdamW",
    "optim.beta1": "beta1 of Adam",
    "optim.beta2": "beta2 of Adam",
    "train.steps": "optimizer steps of the run",
    "train.precision": "precision of parameters and activations; gradients and optimizer are fp32",
    "train.device": "auto: CUDA if there is a device",
    "train.seed": "seed of the weights and of the order of samples",
    "inference.max_new_tokens": "maximum number of generated tokens",
    "inference.top_k": "number of most likely tokens to draw from; null: all",
    "inference.seed": "seed of the draws",
    "inference.page_tokens": "tokens per page of the KV cache",
    "serve.max_connections": "maximum number of open connections; more are refused",
    "serve.max_body_bytes": "maximum size of a request; longer ones get 413",
    "logging.wandb": "where W&B writes: to a folder (offline), to its server (online) or nowhere (disabled)",
    "logging.wandb_project": "project in W&B",
    "run.name": "the run's folder inside run.root",
    "run.root": "folder of all runs",
    "model.num_moe_experts": "experts per layer; null: a dense model",
    "model.moe_ffn_hidden_size": "width inside an expert; null: ffn_hidden_size",
    "model.moe_router_topk": "experts per token",
    "model.moe_layer_freq": "every k-th layer has experts; or a list with 1 for such layers",
    "model.moe_first_dense_layers": "number of first layers without experts",
    "model.moe_shared_expert_intermediate_size": "width of the expert that all tokens use; null: no such expert",
    "model.moe_router_pre_softmax": "apply softmax over all experts before selecting the best, not only over these",
    "model.moe_router_topk_scaling_factor": "factor for the weights of experts; null: none",
    "model.moe_router_load_balancing_type": "method that spreads tokens evenly over experts",
    "model.moe_aux_loss_coeff": "weight of the load-balancing loss",
    "model.moe_z_loss_coeff": "weight of the loss that keeps the router's logits small; null: no such loss",
    "model.moe_router_dtype": "precision of the router; null: train.precision",
}
_FIELD = re.compile(r"    (\w+): [^=]+ = ")


def comments(cls: Any) -> dict[str, str]:
    """What the source of a dataclass says beside or above each of its fields."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(cls).splitlines():
        if line.startswith("    # "):
            above.append(line.strip("# "))
            continue
        if (field := _FIELD.match(line)) is not None:
            beside = line.partition("  # ")[2]
            found[field[1]] = " ".join([*above, *([beside] if beside else [])]).removeprefix("... ")
        above = []
    return found


def meanings(cls: Any, prefix: str = "") -> dict[str, str]:
    """By the full names of all keys."""
    found = {}
    types = get_type_hints(cls)
    said = {name: text for base in reversed(cls.__mro__[:-1]) for name, text in comments(base).items() if text}
    for each in fields(cls):
        if is_dataclass(types[each.name]):
            found |= meanings(types[each.name], f"{prefix}{each.name}.")
        else:
            found[prefix + each.name] = said.get(each.name) or _PLAIN.get(prefix + each.name, "")
    return found


def page() -> str:
    """The whole of it, in Markdown."""
    said, sections = meanings(Config), get_type_hints(Config)
    lines = [_HEAD]
    for section in sections:
        lines.append(f"## {section}\n")
        about = inspect.getdoc(sections[section]) or ""
        if about and not about.startswith(sections[section].__name__):  # else dataclass has made it up
            lines.append(" ".join(about.split()) + "\n")
        lines += ["| key | default | may be | meaning |", "|---|---|---|---|"]
        for key in keys_of(Config).values():
            if not key.name.startswith(f"{section}."):
                continue
            default = "null" if key.default is None else str(key.default).lower() if key.kind is bool else key.default
            may_be = (key.bounds.expected if key.bounds else "true or false") + (", or null" if key.nullable else "")
            cells = (f"`{key.name}`", f"`{default}`", may_be, said[key.name])
            lines.append("| " + " | ".join(str(cell).replace("|", "\\|").replace("*", "\\*") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
