"""Which keys of a config.json count: those that a family reads, those known to change no output, and the rest, which is
named at load."""

from collections.abc import Iterator
from typing import Any

# What transformers writes into every config.json, what training, tasks and other runtimes read, and what is read
# elsewhere here (weights, tokenizer, quantisation).
INERT = frozenset((
    "architectures", "model_type", "transformers_version", "_name_or_path", "name_or_path", "auto_map", "torch_dtype",
    "dtype", "use_cache", "cache_implementation", "return_dict", "output_hidden_states", "output_attentions",
    "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "use_flash_attention_2",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
    "tokenizer_class", "initializer_range", "init_std", "init_device", "init_config", "attention_dropout",
    "attn_pdrop", "resid_pdrop", "embd_pdrop", "emb_pdrop", "hidden_dropout", "hidden_dropout_prob",
    "classifier_dropout", "embedding_dropout", "resid_dropout", "pretraining_tp", "gradient_checkpointing",
    "use_reentrant", "problem_type", "num_labels", "id2label", "label2id", "finetuning_task", "task_specific_params",
    "prefix", "pruned_heads", "is_decoder", "cross_attention_hidden_size", "add_cross_attention",
    "chunk_size_feed_forward", "tf_legacy_loss", "use_bfloat16", "torchscript", "router_aux_loss_coef",
    "aux_loss_alpha", "seq_aux", "output_router_logits", "router_jitter_noise", "router_z_loss_coef", "ep_size",
    "num_nextn_predict_layers", "initial_context_length", "quantization_config", "compression_config",
    "sliding_window_pattern", "_sliding_window_pattern", "max_window_layers", "vocab_size", "tie_word_embeddings",
    "rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "original_max_position_embeddings",
    "max_position_embeddings", "rope_interleave", "unsloth_version", "unsloth_fixed", "language", "license",
    "text_config", "vision_config", "image_token_index", "image_token_id", "boi_token_index", "eoi_token_index",
    "mm_tokens_per_image", "logit_scale", "final_logit_softcapping", "attn_logit_softcapping",
    "partial_rotary_factor", "is_encoder_decoder", "verbose", "no_bias_init", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "max_new_tokens", "do_sample",
))  # fmt: skip

# What transformers itself derives from other keys, or does not read, in these families.
_LATENT = frozenset(("head_dim", "qk_head_dim", "num_key_value_heads"))
_MPT = frozenset(("embedding_fraction", "learned_pos_emb"))
INERT_IN = {
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "MptForCausalLM": _MPT,
    "MPTForCausalLM": _MPT,
}


# Keys of sections: read, or without effect on what is computed.
_ROPE = frozenset((
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "mscale",
    "mscale_all_dim", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "truncate",
    "partial_rotary_factor", "finetuned", "max_position_embeddings",
))  # fmt: skip
_QUANTISATION = frozenset((
    "quant_method", "quant_algo", "bits", "w_bit", "group_size", "q_group_size", "version", "format",
    "checkpoint_format", "sym", "desc_act", "lm_head", "dynamic", "zero_point", "modules_to_not_convert",
    "ignored_layers", "ignore", "exclude_modules", "fmt", "weight_block_size", "activation_scheme", "sparsity_config",
    "transform_config", "targets", "num_bits", "type", "symmetric", "strategy", "block_structure", "actorder",
    "observer", "observer_kwargs", "scale_dtype", "zp_dtype", "quantization_status", "global_compression_ratio",
    "producer", "provider", "quantizer", "meta", "damp_percent", "damp_auto_increment", "static_groups",
    "true_sequential", "model_name_or_path", "model_file_base_name", "model_seqlen", "batch_size", "dataset",
    "tokenizer", "backend", "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "max_input_length",
    "cache_block_outputs", "module_name_preceding_first_block", "block_name_to_quantize", "pad_token_id", "do_fuse",
    "fuse_max_seq_len", "pack_dtype", "dequantize", "mse",
))  # fmt: skip
SECTIONS = {
    "rope_scaling": _ROPE, "rope_parameters": _ROPE, "quantization_config": _QUANTISATION,
    "compression_config": _QUANTISATION,
}  # fmt: skip
WHOLE = frozenset(("dynamic", "sparsity_config", "transform_config", "meta", "producer", "quantizer", "observer_kwargs",
                   "exllama_config"))  # fmt: skip


class NotedKeys(dict[str, Any]):
    """A config.json that notes which of its keys were asked for, also through copies with changes."""

    def __init__(self, content: dict[str, Any], read: set[str] | None = None):
        super().__init__(content)
        self.read = set() if read is None else read

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def __or__(self, other: dict[str, Any]) -> "NotedKeys":  # type: ignore[override]
        return NotedKeys({**self, **other}, self.read)

    def __ror__(self, other: dict[str, Any]) -> "NotedKeys":  # type: ignore[override]
        return NotedKeys({**other, **self}, self.read)

    def copy(self) -> "NotedKeys":
        return NotedKeys(self, self.read)

    def unknown(self, architecture: str) -> dict[str, Any]:
        """Keys with a value that nobody asked for, and that are not known to be inert, also those in sections."""
        known = self.read | INERT | INERT_IN.get(architecture, frozenset())
        own = {
            key: value
            for key, value in self.items()
            if value is not None and key not in known and not _same(key, value)
        }
        for name, keys in SECTIONS.items():
            if isinstance(section := super().get(name), dict):
                own |= {path: value for path, value in _leaves(name, section) if path.rsplit(".", 1)[1] not in keys}
        return dict(sorted(own.items()))


def _leaves(name: str, section: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values that ask for something, with the path to each. A section whose own keys are names, as of layers, is
    entered."""
    for key, value in section.items():
        if isinstance(value, dict) and value and key not in WHOLE:
            yield from _leaves(f"{name}.{key}", value)
        elif value is not None and value is not False and value != {} and value != []:
            yield f"{name}.{key}", value


def _same(key: str, value: Any) -> bool:
    """Layers that all attend to everything, as a family does that does not ask for their kinds."""
    return key == "layer_types" and isinstance(value, list) and set(value) <= {"full_attention"}
