"""The rules for keys beside other keys, as a table that `checks` reads."""

from __future__ import annotations

from collections.abc import Callable

from .bounds import keys_of
from .model import LATENT_KEYS, RECURRENT_KEYS
from .tree import Config


def _is(*values: object) -> Callable[[object], bool]:
    return lambda value: value in values


def _is_not(*values: object) -> Callable[[object], bool]:
    return lambda value: value not in values


def _recurrent(pattern: object) -> bool:
    return not {*"GKM"}.isdisjoint(str(pattern))


Rule = tuple[str, Callable[[object], bool], tuple[str, ...], tuple[object, ...] | str | None, str]
_BOTH_ON = "It needs both overlap_grad_reduce and optim.distributed."
# Rules for keys beside another key: that key, the values of it to which the rule applies, the restricted keys, their
# allowed values (None: their defaults; text: anything but null, in words), and the remedy.
RULES: tuple[Rule, ...] = (
    ("parallelism.schedule", _is_not("auto"), ("parallelism.max_attention_gib",), None,
     "Only auto chooses by memory; leave it null."),
    ("parallelism.schedule", _is_not("double_ring", "node_gather", "usp"), ("parallelism.inner_size",), None,
     "Only double_ring, node_gather and usp divide the ranks; leave it null or choose one of them."),
    ("parallelism.schedule", _is_not("node_gather"), ("parallelism.rounds",), None,
     "Only node_gather has rounds; leave it null or set parallelism.schedule=node_gather."),
    ("parallelism.schedule", _is_not("usp"), ("parallelism.outer_schedule",), None,
     "Only usp has a mode between groups; leave it or set parallelism.schedule=usp."),
    ("parallelism.schedule", _is_not("all_gather"), ("parallelism.max_buffer_tokens",), None,
     "Only all_gather groups its sources under a bound; leave it null or set parallelism.schedule=all_gather."),
    ("parallelism.overlap_grad_reduce", _is(False), ("parallelism.overlap_param_gather",), ("auto", "false"), _BOTH_ON),
    ("optim.distributed", _is(False), ("parallelism.overlap_param_gather",), ("auto", "false"), _BOTH_ON),
    ("optim.distributed", _is(False), ("optim.states_on_host",), None,
     "Set optim.distributed=true: its states go to the host."),

    ("model.bias", _is(True), ("model.qkv_bias",), None, "Leave it false: model.bias includes it."),
    ("model.window", _is(None), ("model.window_pattern", "model.window_rope_base"), None,
     "Set model.window, or leave it null: without windows all layers see everything."),
    ("model.position_embedding", _is_not("rope"),
     ("model.rope_scaling.kind", "model.window_rope_base", "model.rotary_percent"), None,
     "Only RoPE rotates tokens."),
    ("model.rope_scaling.kind", _is("none"), ("model.rope_scaling.factor",), None,
     "Only linear, ntk, llama3 and yarn read it."),
    ("model.rope_scaling.kind", _is_not("llama3", "yarn"), ("model.rope_scaling.original_length",), None,
     "Only llama3 and yarn read it."),
    ("model.rope_scaling.kind", _is("llama3", "yarn"), ("model.rope_scaling.original_length",), "a number",
     "Set it to the tokens that the model was trained on before it was stretched."),
    ("model.rope_scaling.kind", _is_not("llama3"),
     ("model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor"), None, "Only llama3 reads it."),
    ("model.rope_scaling.kind", _is_not("yarn"),
     ("model.rope_scaling.beta_fast", "model.rope_scaling.beta_slow", "model.rope_scaling.attention_factor",
      "model.rope_scaling.truncate"), None, "Only yarn reads it."),

    ("model.kv_lora_rank", _is(None), tuple(f"model.{key}" for key in LATENT_KEYS[1:]), None,
     "Set model.kv_lora_rank: without latents nothing reads it."),
    ("model.kv_lora_rank", _is_not(None), ("model.qk_head_dim", "model.qk_pos_emb_head_dim", "model.v_head_dim"),
     "a number", "DeepSeek has 128, 64 and 128."),
    ("model.kv_lora_rank", _is_not(None), ("model.head_dim",), None,
     "qk_head_dim, qk_pos_emb_head_dim and v_head_dim are the sizes of heads."),
    ("model.kv_lora_rank", _is_not(None),
     ("model.position_embedding", "model.window_rope_base", "model.rotary_percent", "model.attention_output_gate",
      "model.bias", "model.qkv_bias"), None,
     "Megatron's MLA rotates what qk_pos_emb_head_dim says, equally in all layers, and has neither gates nor biases."),
    ("model.pattern", lambda pattern: not _recurrent(pattern),
     tuple(f"model.{key}" for key in RECURRENT_KEYS), None, "Only the layers G, K and M of model.pattern read it."),
    ("model.pattern", _recurrent,
     tuple(f"model.{key}" for key in RECURRENT_KEYS[:4]), "a number", "Qwen3-Next has 16, 32, 128 and 128."),
    ("model.pattern", _recurrent, ("model.kv_lora_rank",), None,
     "Recurrent layers take the kinds of their projections from plain attention."),
    ("model.pattern", _recurrent, ("data.format",), ("documents",),
     "A recurrent state has one continuation: the branches of a tree cannot share it."),
    ("model.num_moe_experts", _is(None), tuple(key for key in keys_of(Config) if key.startswith("model.moe_")), None,
     "Set model.num_moe_experts: without experts nothing reads it."),
    ("model.num_moe_experts", _is(None),
     ("parallelism.expert_model_parallel_size", "parallelism.expert_tensor_parallel_size"), None,
     "Set model.num_moe_experts, or leave it."),
    ("model.num_moe_experts", _is_not(None), ("recompute.mlp_tile_tokens", "reduction.down_projection"), None,
     "Only dense MLPs support it."),
    ("model.moe_shared_expert_intermediate_size", _is(None), ("model.moe_shared_expert_gate",), None,
     "Only a shared expert has this gate."),
    ("model.moe_router_topk", _is(1), ("model.moe_router_pre_softmax",), (True,),
     "The softmax over one expert is always 1."),

    ("train.fp8", _is_not("none"), ("train.precision",), ("bf16",), "FP8 products have bf16 around them."),
    ("train.fp8", _is_not("none"), ("train.device",), ("auto", "cuda"), "CPUs have no products in FP8."),
    ("train.fp8", _is_not("none"), ("model.implementation",), ("auto", "transformer_engine"),
     "Only TransformerEngine's layers compute in FP8."),
    ("train.fp8", _is_not("none"), ("reduction.output_projection", "reduction.down_projection"), None,
     "Projections with other sums are torch's, which do not compute in FP8."),
    ("train.fp8", _is_not("none"), ("model.builder", "model.pattern"), None,
     "Layers of HybridModel and recurrent layers have not been trained in FP8."),
    ("train.fp8", _is("delayed"), ("recompute.mlp_tile_tokens",), None,
     "A delayed scale is of whole tensors: set train.fp8=tensorwise or blockwise, or no tiles."),
    ("train.fp8", _is("delayed"), ("model.num_moe_experts",), None,
     "Experts without tokens have no amax: set train.fp8=tensorwise or blockwise."),
    ("train.fp8", _is("none", "delayed"), ("train.bf16_layers_at_start", "train.bf16_layers_at_end"), None,
     "Set train.fp8=tensorwise, blockwise or mxfp8: Megatron updates delayed scales of all layers together."),
    ("train.fp8", _is("none", "mxfp8"), ("train.fp8_param",), None,
     "Set train.fp8=delayed, tensorwise or blockwise: Megatron gathers weights of mxfp8 in buffers of gradients."),
    ("train.fp8_param", _is(True), ("optim.distributed",), None, "Only the distributed optimizer quantizes weights."),
    ("train.fp8_param", _is(True), ("optim.states_on_host",), None,
     "All main parameters are quantized together, and only a few are on the device then."),
    ("train.fp8_param", _is(True), ("recompute.mlp_tile_tokens",), None,
     "Tiles hand whole weights to autograd, which has not been tried with weights in FP8."),
    ("train.fp8_param", _is(True), ("model.num_moe_experts",), None,
     "Experts get their first weights after TransformerEngine has kept those to begin the main parameters with."),
    ("recompute.mode", _is("attention_output", "attention_output+offload"), ("attention.keep_received",),
     ("auto", "false"),
     "Its forward runs without a graph, so nothing is kept; set it to auto, or recompute=none or layer."),
    ("recompute.mode", _is("none", "layer"), ("recompute.kept_results",), (1.0,),
     "Only attention_output and attention_output+offload keep results alone."),
    ("data.packing", _is_not("none"), ("train.micro_batch_size",), None,
     "A pack is one sequence of many documents; raise data.seq_length instead."),
    ("data.packing", _is_not("best_fit"), ("data.max_wait_steps",), (0, None),
     "Only the packs of best_fit have unequal work that is known; leave it."),
    ("train.objective", _is("sft"), ("train.clip_low", "train.clip_high", "train.kl_coeff"), None,
     "Only policy_gradient reads it."),
    ("train.objective", _is("policy_gradient"), ("data.format",), ("rollouts",), "Only rollouts have advantages."),
    ("data.format", _is("rollouts"), ("data.packing",), ("best_fit",), "Trees are packed whole."),
    ("data.format", _is("rollouts"), ("parallelism.layout",), ("auto", "contiguous", "zigzag", "striped", "balanced"),
     "Short nodes would leave ranks without tokens."),
    ("train.save", _is(False), ("train.save_minutes", "train.keep_best"), None, "No checkpoint is written."),
    ("data.tokenizer", _is_not("byte-level"), ("data.tokenizer_path",), "a path", "Set data.tokenizer_path."),
    ("train.precision", _is("fp32"), ("inference.weights",), None, "FP8 is for a model in bf16: set that as well."),
    ("model.kv_lora_rank", _is_not(None), ("inference.weights",), None, "FP8 supports plain attention only."),
    ("model.pattern", _recurrent, ("inference.weights",), None, "FP8 supports plain attention only."),
    ("model.pattern", _recurrent, ("inference.speculate", "inference.exact_reuse", "serve.host_cache_gib"), None,
     "A recurrent state cannot be cut back to fewer tokens, as the cache of attention can."),
    ("model.pattern", _recurrent, ("inference.shard_weights",), None, "Only attention shares weights."),
    ("inference.exact_reuse", _is(True), ("inference.prefill_chunk",), "a number", "Set it to 2048."),
    ("inference.exact_reuse", _is(True), ("inference.speculate",), None, "Drafts are computed in batches of any size."),
    ("inference.decode", _is("plan"), ("inference.speculate",), None, "Only replicated steps compute drafts."),
    ("inference.mode", _is_not("auto"), ("inference.speculate",), None, "Only replicated steps compute drafts."),
)  # fmt: skip
