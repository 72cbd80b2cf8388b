"""A list of all options of SGLang 0.5.23 (the fields of `ServerArgs`) by whether they decide the KV cache's bytes."""

from kvtier.connectors.judged_options import ClassifiedOptions


def _options(text: str) -> list[str]:
    return text.split()


JUDGED = ClassifiedOptions(
    decides={
        "load_format": "which files weights are read from, if any",
        "model_loader_extra_config": "where weights are read from",
        "custom_weight_loader": "the user's code that loads the weights",
        "startup_weight_load_mode": "where weights come from",
        "remote_instance_weight_loader_seed_instance_ip": "from which other server weights are loaded",
        "remote_instance_weight_loader_seed_instance_service_port": "from which other server weights are loaded",
        "checkpoint_engine_wait_weights_before_ready": "whether weights are loaded after the start",
        "modelexpress_config": "where weights come from",
        "decrypted_config_file": "which configuration of the model is used",
        "revision": "which weights and configuration are loaded",
        "trust_remote_code": "whether the model's own code computes keys and values",
        "model_impl": "which implementation of the model is used",
        "model_config_parser": "how the model's configuration is read",
        "json_model_override_args": "changes of the model's configuration, such as its rotary embedding",
        "is_embedding": "whether the model is an embedding model, which may attend to later tokens",
        "dtype": "the type in which keys and values are computed",
        "quantization": "how weights and activations are rounded",
        "kv_cache_dtype": "the type in which keys and values are stored",
        "prefill_kv_cache_dequant_dtype": "the type in which a quantized cache is read",
        "modelopt_quant": "how weights are rounded",
        "modelopt_checkpoint_restore_path": "which quantized weights are loaded",
        "quantize_and_serve": "whether weights are rounded at the start",
        "rl_quant_profile": "how weights are rounded",
        "rl_on_policy_target": "the types in which the model is computed",
        "enable_tf32_matmul": "whether matrix products are computed in TF32, with 10 bits of mantissa",
        "page_size": "how many tokens a page has",
        "c128_page_size": "how many tokens a compressed page has",
        "enable_page_major_kv_layout": "how a page is laid out in memory",
        "enable_unified_memory": "how a page is laid out in memory",
        "enable_dsa_cache_layer_split": "which layers a rank stores",
        "enable_kv_cache_sharding": "what a rank stores of each page",
        "enable_cp_decode_attn_tp": "what a rank stores of each page",
        "enable_prefill_cp": "which tokens a rank stores",
        "cp_strategy": "which tokens a rank stores",
        "attn_dp_size": "which attention heads a rank stores",
        "enable_dp_attention": "which attention heads a rank stores",
        "attention_backend": "how a page is laid out in memory, and which values are rounded",
        "prefill_attention_backend": "how a page is laid out in memory, and which values are rounded",
        "decode_attention_backend": "how a page is laid out in memory, and which values are rounded",
        "dsa_prefill_backend": "which keys are attended to, and in which type attention is computed",
        "dsa_decode_backend": "which keys are attended to, and in which type attention is computed",
        "dsa_paged_mqa_logits_backend": "how sparse attention selects keys",
        "dsa_topk_backend": "how sparse attention selects keys",
        "dsa_triton_union": "how sparse attention selects keys",
        "dsv4_prefill_backend": "which keys are attended to, and in which type attention is computed",
        "dsv4_attn_backend": "which keys are attended to, and in which type attention is computed",
        "enable_deepseek_v4_fp4_indexer": "how sparse attention selects keys",
        "qsa_indexer_dtype": "how sparse attention selects keys",
        "enable_hisparse": "which keys are attended to",
        "hisparse_config": "which keys are attended to",
        "enable_encoder_swa_bounded_replay": "which tokens the last layers compute",
        "enable_decoder_swa_bounded_replay": "which tokens the last layers compute",
        "fp8_gemm_runner_backend": "whether kernels round activations",
        "fp4_gemm_runner_backend": "whether kernels round activations",
        "bf16_gemm_backend": "whether kernels round activations",
        "moe_runner_backend": "whether kernels round activations",
        "moe_a2a_backend": "whether activations may be sent in fp8",
        "flashinfer_a2a_dispatch_type": "the type in which activations are sent",
        "deepep_mode": "whether activations may be sent in fp8",
        "deepep_v2_mode": "whether activations may be sent in fp8",
        "deepep_dispatcher_output_dtype": "the type in which activations are sent",
        "fuseep_mode": "the type in which activations are sent",
        "enable_quant_communications": "whether activations are rounded before they are sent",
        "flashinfer_mxfp4_moe_precision": "the type in which experts are computed",
        "enable_w4a4_mxfp4_megamoe": "the type in which experts are computed",
        "disable_flashinfer_cutlass_moe_fp4_allgather": "whether activations are rounded before they are sent",
        "enable_megamoe_for_layernorm_sp": "the type in which experts are computed",
        "kt_weight_path": "which weights the experts on the CPU have",
        "kt_method": "how the weights of the experts on the CPU are rounded",
        "kt_num_gpu_experts": "how many experts are not rounded by `kt_method`",
        "kt_max_deferred_experts_per_token": "which experts' results are added one layer later",
        "enable_nvidia_megakernel": "the type in which layers are computed",
        "enable_amd_monokernel": "the type in which layers are computed",
        "linear_attn_backend": "the type in which recurrent states are computed",
        "linear_attn_prefill_backend": "the type in which recurrent states are computed",
        "linear_attn_decode_backend": "the type in which recurrent states are computed",
        "mamba_ssm_dtype": "the type in which recurrent states are stored",
        "enable_mamba_cache_stochastic_rounding": "how recurrent states are rounded",
        "mamba_cache_philox_rounds": "how recurrent states are rounded",
        "enable_int8_mamba_checkpoint": "the type in which recurrent states are stored",
        "enable_linear_replayssm": "which part of a recurrent state is stored",
        "linear_replayssm_cache_len": "which part of a recurrent state is stored",
        "dllm_algorithm": "how many tokens are computed at once and attend to each other",
        "dllm_algorithm_config": "how many tokens are computed at once and attend to each other",
        "mm_process_config": "how the multimodal processor prepares an image",
        "image_processor_backend": "how the multimodal processor prepares an image",
        "disable_fast_image_processor": "how the multimodal processor prepares an image",
        "enable_precise_embedding_interpolation": "the positions of an image's patches",
        "trust_mm_content_hashes": "which hashes of images the names of pages contain",
        "lora_target_modules": "which modules a LoRA adapter changes",
        "experts_shared_outer_loras": "how a LoRA adapter's tensors are read",
        "lora_strict_loading": "which of a LoRA adapter's tensors are loaded",
        "ple_offload_backend": "how per-layer embeddings are read",
        "forward_hooks": "the user's code that changes the output of layers",
        "device": "which kernels lay out pages in memory",
        "boundary_reduction": "the type in which partial results are added",
    },
    shown={
        "the digest of the weights, and the model's name": _options("model_path"),
        "the digest of the file": _options("quantization_param_path"),
        "the digests of the adapters": _options("lora_paths"),
        "the digest of the draft model's weights, if it is not a part of the model": _options(
            "speculative_draft_model_path speculative_draft_model_revision"
        ),
        "the ranks, sizes and pool that SGLang passes to the backend": _options(
            "tp_size pp_size attn_cp_size dcp_size hicache_mem_layout"
        ),
    },
    harmless={
        "the prompt's tokens, which are part of its pages' names": _options(
            """tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num
            skip_tokenizer_init enable_multimodal chat_template trust_request_chat_template hf_chat_template_name
            completion_template default_chat_template_kwargs allow_auto_truncate enable_dynamic_batch_tokenizer
            dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode
            disable_tokenizer_batch_decode enable_broadcast_mm_inputs_process enable_prefix_mm_cache
            mm_processor_worker_num mm_io_worker_num allowed_media_domains media_url_max_file_size_mb
            mm_preprocess_cache_size_mb limit_mm_data_per_request enable_mm_global_cache mm_global_cache_backend
            mm_feature_transport asr_max_buffer_seconds asr_max_concurrent_sessions enable_mis"""
        ),
        "sampling and output after the last layer": _options(
            """enable_fp32_lm_head random_seed mlx_enable_sampling sampling_backend grammar_backend sampling_defaults
            preferred_sampling_params reasoning_parser strip_thinking_cache enable_strict_thinking tool_call_parser
            tool_server constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
            constrained_json_max_whitespace_cnt enable_custom_logit_processor enable_return_hidden_states
            return_hidden_states_mode enable_return_routed_experts enable_return_indexer_topk
            sampling_mask_max_tokens enable_return_aux_hidden_states aux_hidden_state_capture
            return_aux_hidden_state_layer_ids disable_outlines_disk_cache enable_dp_lm_head
            enable_tp_lm_head_all_to_all enable_watermark watermark_config watermark_key watermark_key_b
            watermark_context_window watermark_mixing_probability watermark_max_probability
            watermark_default_enabled watermark_enforce_all"""
        ),
        "the HTTP and gRPC interface, and access to it": _options(
            """host port fastapi_root_path smg_grpc_mode grpc_mode grpc_port grpc_worker_threads
            grpc_response_timeout_secs sidecar sidecar_args skip_server_warmup warmups enable_http2
            http2_max_concurrent_streams http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs
            ssl_keyfile_password enable_ssl_refresh api_key admin_api_key served_model_name weight_version
            file_storage_path enable_cache_report return_input_ids return_output_ids stream_interval
            batch_notify_size stream_response_default_include_usage incremental_streaming_output
            enable_streaming_session enable_session_radix_cache enable_http_worker_reuseport
            enable_response_store"""
        ),
        "observability, events and shutdown": _options(
            """log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target
            uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics
            smg_http_sidecar_port enable_mfu_metrics enable_metrics_for_all_schedulers
            load_snapshot_publish_interval tokenizer_metrics_custom_labels_header
            tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token
            bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets
            gc_warning_threshold_secs gc_threshold decode_log_interval enable_request_time_stats_logging
            kv_events_config load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id
            forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint otlp_service_name
            export_metrics_to_file export_metrics_to_file_dir stat_loggers enable_layerwise_nvtx_marker
            debug_tensor_dump_output_folder debug_tensor_dump_layers debug_tensor_dump_input_file
            msprobe_dump_config expert_distribution_recorder_mode expert_distribution_recorder_buffer_size
            expert_balancedness_report_mode watchdog_timeout soft_watchdog_timeout sleep_on_idle
            custom_sigquit_handler kv_canary kv_canary_real_data kv_canary_sweep_interval"""
        ),
        "the tokens that each step computes": _options(
            """context_length max_running_requests max_queued_requests chunked_prefill_size prefill_decode_interval
            prefill_decode_interval_min_bs enable_dynamic_chunking max_prefill_tokens prefill_max_requests
            schedule_policy enable_priority_scheduling disable_priority_preemption default_priority_value
            abort_on_priority_when_disabled schedule_low_priority_values_first
            priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness
            disable_overlap_schedule num_continuous_decode_steps scheduler_recv_interval enable_mixed_chunk
            pp_max_micro_batch_size pp_async_batch_depth enable_two_batch_overlap enable_single_batch_overlap
            tbo_token_distribution_threshold enable_pdmux pdmux_config_path sm_group_num enable_prefill_delayer
            prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark
            prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets
            prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms min_free_slots_delay
            load_balance_method lora_drain_wait_threshold dllm_fdfo"""
        ),
        "the place and the size of memory": _options(
            """mem_fraction_static max_total_tokens swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set
            disable_hybrid_swa_memory max_mamba_cache_size mamba_max_states_per_path mamba_full_memory_ratio
            int8_mamba_ckpt_size cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step
            offload_mode ple_offload_embedding ple_offload_dir enable_memory_saver enable_weights_cpu_backup
            enable_draft_weights_cpu_backup max_loaded_loras max_loras_per_batch max_lora_rank
            lora_eviction_policy enable_lora_overlap_loading enable_paged_experts paged_experts_num_resident"""
        ),
        "which pages are kept and found": _options(
            """radix_eviction_policy radix_eviction_policy_config _radix_eviction_policy_explicitly_set
            prefill_only_disable_kv_cache disable_radix_cache disable_chunked_prefix_cache radix_cache_backend
            swa_prefix_tails mamba_radix_cache_strategy uses_mamba_radix_cache mamba_track_interval
            enable_hierarchical_cache hicache_host_memory_mode hicache_host_memory_fraction hicache_ratio
            hicache_size hicache_write_policy hicache_io_backend hicache_storage_backend
            hicache_storage_prefetch_policy hicache_storage_backend_extra_config
            hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts
            enable_unified_cache_external_linker unified_cache_external_linker_backend
            unified_cache_external_linker_config enable_linker_mla_dedup enable_lmcache lmcache_config_file
            enable_flexkv flexkv_config_file"""
        ),
        "the distribution of the same computation over processes": _options(
            """dp_size nnodes node_rank
            nccl_port dist_timeout dist_init_addr gated_launch_port moe_dp_size dwdp_size dcp_comm_backend
            dcp_replicate_q_proj enable_dp_attention_local_control_broadcast enable_attn_tp_input_scattered
            enable_shared_experts_attn_tp shared_experts_tp_size enable_dense_mlp_attn_tp enable_layernorm_sp
            disable_attn_tp_gather enable_p2p_check base_gpu_id gpu_id_step use_ray numa_node ep_size
            ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm
            eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
            eplb_min_rebalancing_utilization_threshold deepep_config moe_dense_tp_size elastic_ep_backend
            enable_elastic_expert_backup mooncake_ib_device enable_waterfill ep_join_mode ep_join_rank_offset
            elastic_ep_initial_size max_ep_size elastic_ep_scale_timeout enable_cp_tp_group_sharing
            mm_enable_dp_encoder kt_cpuinfer kt_threadpool_count"""
        ),
        "how the same computation is run": _options(
            """enable_lean_attention mm_attention_backend disable_flashinfer_autotune flashinfer_autotune_skip_ops
            mamba_backend linear_attn_verify_backend cuda_graph_config cuda_graph_backend_decode
            cuda_graph_backend_prefill cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_bs_decode
            cuda_graph_bs_prefill cuda_graph_prefill_max_context cuda_graph_max_seq_len_prefill
            disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph disable_cuda_graph_padding
            enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph enable_nccl_nvls enable_symm_mem
            triton_attention_reduce_in_fp32 triton_attention_num_kv_splits triton_attention_split_tile_size
            flashinfer_mla_disable_ragged enable_fused_qk_norm_rope enable_fused_moe_sum_all_reduce
            enable_dsa_fused_indexer disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem
            enable_scattered_sconv pre_warm_nccl enable_flashinfer_allreduce_fusion
            enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend
            enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill
            disable_aiter_allreduce_fusion_in_decode enable_torch_compile enable_torch_compile_debug_mode
            torch_compile_max_bs disable_shared_experts_fusion enforce_shared_experts_fusion
            enable_deterministic_inference enable_lora lora_backend max_lora_chunk_size lora_use_virtual_experts"""
        ),
        "how the same files are read": _options(
            """weight_loader_disable_mmap weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
            weight_loader_drop_cache_after_load remote_instance_weight_loader_send_weights_group_ports
            remote_instance_weight_loader_backend remote_instance_weight_loader_start_seed_via_transfer_engine
            engine_info_bootstrap_port download_dir model_checksum delete_ckpt_after_loading
            modelopt_checkpoint_save_path modelopt_export_path weight_cache_mode weight_cache_socket
            weight_cache_timeout"""
        ),
        "draft models, which decide only how many drafts are accepted": _options(
            """speculative_algorithm uno_lora_path speculative_draft_load_format speculative_num_steps
            speculative_eagle_topk
            speculative_num_draft_tokens speculative_dflash_block_size speculative_dspark_block_size
            speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
            speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single
            speculative_accept_threshold_acc speculative_use_rejection_sampling speculative_use_block_verification
            speculative_token_map speculative_attention_mode speculative_draft_attention_backend
            speculative_dsa_topk_backend speculative_draft_kv_cache_dtype speculative_draft_window_size
            speculative_draft_sink_size speculative_moe_runner_backend speculative_moe_a2a_backend
            speculative_enable_w4a4_mxfp4_megamoe speculative_draft_model_quantization
            _speculative_draft_quantization_explicitly_set speculative_boundary_reduction
            enable_multi_layer_eagle speculative_adaptive speculative_adaptive_config
            speculative_domino_candidate_pool_size decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints
            decoupled_spec_rank decoupled_spec_role spec_trace_dir speculative_ngram_min_bfs_breadth
            speculative_ngram_max_bfs_breadth speculative_ngram_match_type speculative_ngram_max_trie_depth
            speculative_ngram_capacity speculative_ngram_external_corpus_path
            speculative_ngram_external_sam_budget speculative_ngram_external_corpus_max_tokens
            enable_linear_replayssm_spec decrypted_draft_config_file"""
        ),
        "the split of prefill and decode between servers": _options(
            """disaggregation_mode disaggregation_transfer_backend disaggregation_bootstrap_port
            disaggregation_ib_device disaggregation_decode_enable_radix_cache
            disaggregation_decode_enable_offload_kvcache disaggregation_decode_retraction_backup
            disaggregation_decode_allocation_policy disaggregation_decode_host_receive_threshold
            disaggregation_enable_kv_checksum num_reserved_decode_tokens disaggregation_decode_extra_slots
            disaggregation_decode_polling_interval optimistic_prefill_attempts enable_pd_role_switch encoder_only
            language_only language_model_only encoder_transfer_backend encoder_urls encoder_bootstrap_port
            encoder_register_urls enable_adaptive_dispatch_to_encoder"""
        ),
    },
)
