"""Every field of Megatron's configuration is applied or refused."""

import dataclasses
import re
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding, RotaryEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.mcore.core_attention import REFUSED, ContextParallelCoreAttention
from megatron_longctx.mcore.rope import ShardedRotaryEmbedding
from megatron_longctx.mcore.sequence import ShardedSequence
from megatron_longctx.mcore.version import RELEASE
from tests.shared.sequences import sequence_of

OTHER: dict[str, Any] = {
    "experimental_attention_variant": "dsa",
    "mtp_num_layers": 1,
    "mrope_section": [2, 1, 1],
    "moe_expert_capacity_factor": 1.25,
    "moe_expert_rank_capacity_factor": 1.25,
}
"""Refused values other than True."""

APPLIED = """
attention_dropout calculate_per_token_loss context_parallel_size deterministic_mode expert_model_parallel_size
kv_channels moe_aux_loss_coeff moe_router_load_balancing_type moe_token_dispatcher_type moe_z_loss_coeff
multi_latent_attention no_rope_freq num_attention_heads num_moe_experts num_query_groups rotary_interleaved
softmax_scale softmax_type tensor_model_parallel_size window_attn_skip_freq window_size
"""
"""Fields that core attention, RoPE or `SummedLossRouter` applies; unsupported values are refused."""
HARMLESS = {
    "sizes, and Megatron's own layers around core attention": """
        num_layers hidden_size ffn_hidden_size hidden_dropout fp32_residual_connection
        apply_residual_connection_post_layernorm layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear
        add_qkv_bias gated_linear_unit activation_func activation_func_fp8_input_store glu_linear_offset
        activation_func_clamp_value normalization qk_layernorm qk_l2_norm attention_output_gate test_mode
        heterogeneous_block_specs hetereogenous_dist_checkpoint clone_scatter_output_in_embedding
        init_method output_layer_init_method init_method_std embedding_init_method embedding_init_method_std
        init_model_with_meta_device perform_initialization use_cpu_initialization transformer_impl""",
    "how the same results are computed (scores divided by a layer's number are multiplied by it again)": """
        fp16 bf16 params_dtype enable_autocast autocast_dtype attention_backend attention_softmax_in_fp32
        apply_query_key_layer_scaling masked_softmax_fusion disable_bf16_reduced_precision_matmul
        bias_activation_fusion persist_layer_norm memory_efficient_layer_norm bias_dropout_fusion apply_rope_fusion
        use_te_activation_func use_fused_weighted_squared_relu gradient_accumulation_fusion
        cross_entropy_loss_fusion cross_entropy_fusion_impl""",
    "details of refused fields": """
        qk_clip_alpha qk_clip_threshold mtp_loss_scaling_factor mtp_standalone
        dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
        linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
        linear_num_value_heads mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
        use_mamba_mem_eff_path max_seqlen_per_dp_cp_rank kitchen_attention_backend
        moe_pad_expert_input_to_capacity moe_token_drop_policy""",
    "how TransformerEngine would shard the sequence: here the schedule decides": """
        cp_comm_type hierarchical_context_parallel_sizes""",
    "other parallelism and its communication, and losses over it": """
        sequence_parallel pipeline_model_parallel_comm_backend pipeline_model_parallel_size pipeline_dtype
        virtual_pipeline_model_parallel_size expert_tensor_parallel_size
        timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func
        num_microbatches_with_partial_activation_checkpoints
        use_te_rng_tracker tp_comm_overlap tp_comm_bulk_wgrad
        tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag
        tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1
        tp_comm_bootstrap_backend overlap_moe_expert_parallel_comm delay_wgrad_compute
        ep_overlap_early_attn_memory_release variable_seq_lengths overlap_p2p_comm batch_p2p_comm batch_p2p_sync
        use_ring_exchange_p2p deallocate_pipeline_outputs defer_embedding_wgrad_compute wgrad_deferral_limit
        overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage num_layers_in_first_pipeline_stage
        num_layers_in_last_pipeline_stage pipeline_model_parallel_layout account_for_embedding_in_pipeline_split
        account_for_loss_in_pipeline_split barrier_with_L1_time symmetric_ar_type""",
    "what is stored, recomputed, captured or moved to the host, and logs": """
        recompute_granularity recompute_method recompute_num_layers recompute_modules distribute_saved_activations
        cpu_offloading cpu_offloading_num_layers _cpu_offloading_context cpu_offloading_activations
        cpu_offloading_weights cpu_offloading_double_buffering fine_grained_activation_offloading offload_modules
        min_offloaded_tensor_size enable_cuda_graph cuda_graph_use_single_mempool cuda_graph_retain_backward_graph
        cuda_graph_warmup_steps external_cuda_graph cuda_graph_impl cuda_graph_scope config_logger_dir""",
    "linear layers in 8 or 4 bits, and Megatron's own inference": """
        fp8 fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len
        fp8_amax_compute_algo fp8_wgrad tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16
        num_layers_at_end_in_bf16 use_kitchen fp4 fp4_recipe fp4_param fp4_quantizer_factory quant_recipe
        disable_parameter_transpose_cache inference_rng_tracker inference_sampling_seed
        use_inference_optimized_layers inference_fuse_tp_communication mlp_chunks_for_prefill""",
    "experts": """
        moe_shared_expert_intermediate_size moe_shared_expert_gate moe_shared_expert_overlap
        moe_layer_freq moe_ffn_hidden_size moe_router_topk moe_enable_routing_replay
        moe_router_topk_limited_devices moe_router_padding_for_quantization moe_router_padding_for_fp8
        moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor
        moe_router_score_function moe_router_dtype moe_router_enable_expert_bias moe_router_bias_update_rate
        moe_router_force_load_balancing moe_grouped_gemm moe_input_jitter_eps moe_token_dropping moe_enable_deepep
        moe_flex_dispatcher_backend moe_per_layer_logging moe_layer_recompute moe_permute_fusion
        moe_router_fusion moe_apply_probs_on_input moe_latent_size moe_deepep_num_sms moe_hybridep_num_sms""",
}
"""Fields without effect on core attention, keyed by the reason."""
ONLY_IN_016 = "async_tensor_model_parallel_allreduce moe_extended_tp moe_use_legacy_grouped_gemm"
ONLY_IN_019 = {
    "layers around core attention, and the scale that they pass to it": """
        use_mup mup_attn_scale_power mup_base_head_dim mup_base_hidden_size mup_embedding_mult mup_output_mult
        mup_width_mult fused_residual_rmsnorm use_transformer_engine_op_fuser use_grouped_gemm_for_dense_mlp
        flash_attention_version mlp_chunks_for_training fp8_output_proj""",
    "details of refused fields": """
        dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 dsa_indexer_rope_interleaved dsa_indexer_rotate_activation
        dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset dsa_indexer_topk_freq dsa_kernel_backend
        experimental_attention_variant_loss_scale_func mamba_training_ssm_states_dtype mtp_detach_heads
        mtp_grad_scale_func mtp_hybrid_override_pattern mtp_use_repeated_layer""",
    "other parallelism and its communication": """
        expert_gtp_weight_remat_size expert_tensor_parallel_num_weight_shards gtp_weight_remat_size
        tensor_parallel_num_weight_shards high_priority_a2a_comm_stream nccl_all_reduce_for_prefill
        overlap_dispatch_backward_with_experts_wgrad""",
    "what is captured or moved to the host, and Megatron's own inference": """
        activation_offload_fraction cpu_offloading_retain_pinned_cpu_buffers cuda_graph_modules
        delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks
        fine_grained_offloading_max_inflight_offloads inference_cuda_graph_scope
        inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
        inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type""",
    "experts": """
        moe_flex_dispatcher_num_sms moe_grad_scale_func
        moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing
        moe_hybridep_pad_uneven_dispatch_inputs moe_mlp_glu_interleave_size moe_ncclep_static_shape
        moe_ncclep_zero_copy moe_pad_experts_for_cuda_graph_inference moe_paged_stash
        moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size
        moe_permute_fusion_into_hybridep moe_router_force_biased moe_router_quantile_balancing_ema
        moe_shared_expert_glu_interleave_size moe_single_grouped_bias moe_single_grouped_weight
        use_grouped_gemm_for_shared_expert""",
}


FIELDS = {field.name for field in dataclasses.fields(TransformerConfig)}
REFUSED_HERE = [name for name in REFUSED if name in FIELDS or name != "moe_expert_rank_capacity_factor"]  # new in 0.19


def test_every_field_is_in_exactly_one_list() -> None:
    of_release = " ".join(ONLY_IN_019.values()) if RELEASE >= (0, 19) else ONLY_IN_016
    lists = [*APPLIED.split(), *REFUSED_HERE, *" ".join(HARMLESS.values()).split(), *of_release.split()]
    assert sorted(lists) == sorted(FIELDS), f"new {FIELDS - {*lists}}, gone {({*lists}) - FIELDS}"


def _core(settings: dict[str, Any], deterministic: bool = False) -> ContextParallelCoreAttention:
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    for name, value in settings.items():  # some values need other settings to be constructed
        setattr(config, name, value)
    sequence = ShardedSequence(ContextParallelAttention(deterministic=deterministic), 8)
    return ContextParallelCoreAttention(
        sequence=sequence, config=config, layer_number=1, attn_mask_type=AttnMaskType.causal
    )


@pytest.mark.parametrize("name", REFUSED_HERE)
def test_unsupported_values_are_refused_when_the_layer_is_built(name: str) -> None:
    assert next(f for f in dataclasses.fields(TransformerConfig) if f.name == name).default == REFUSED[name][0]
    with pytest.raises(ValueError, match=re.escape(f"{name}={OTHER.get(name, True)}: expected ")):
        _core({name: OTHER.get(name, True)})


@pytest.mark.parametrize("balancing", ["sinkhorn", "global_aux_loss", ["aux_loss", "global_aux_loss"]])
def test_balancing_over_the_tokens_of_one_rank_is_refused(balancing: str | list[str]) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"moe_router_load_balancing_type={balancing}: expected one of none")
    ):
        _core({"num_moe_experts": 4, "moe_router_load_balancing_type": balancing})
    _core({"num_moe_experts": 4, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]})


def test_a_dispatcher_that_needs_equal_shares_is_refused() -> None:
    settings = {"num_moe_experts": 4, "expert_model_parallel_size": 2, "context_parallel_size": 2}
    with pytest.raises(ValueError, match="moe_token_dispatcher_type=allgather: expected alltoall with context and"):
        _core(settings)
    _core({**settings, "moe_token_dispatcher_type": "alltoall"})


def test_deterministic_mode_needs_deterministic_attention() -> None:
    with pytest.raises(ValueError, match=r"deterministic_mode=True: .* Set deterministic=T"):
        _core({"deterministic_mode": True})
    _core({"deterministic_mode": True}, deterministic=True)


def test_other_kinds_of_rope_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    yarn = YarnRotaryEmbedding(kv_channels=16, use_cpu_initialization=True)
    for other in (yarn, MultimodalRotaryEmbedding(16, 1.0)):
        with pytest.raises(ValueError, match=f"rotary_pos_emb={type(other).__name__}: expected Megatron's RotaryEmb"):
            ShardedRotaryEmbedding(other, sequence_of())
    unchanged = type("Other", (RotaryEmbedding,), {"__doc__": "A subclass that overrides nothing."})
    ShardedRotaryEmbedding(unchanged(16, 1.0, use_cpu_initialization=True), sequence_of())
