"""Which keys of a checkpoint's other files nothing here reads: each is named once, at load. config.json's own are in
models/keys.py."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sojourn.engine.token.checkpoint import read_json, said_by
from sojourn.engine.token.generation_config import TAKEN
from sojourn.engine.token.gguf.config import KEYS, REFUSED, SAMPLING
from sojourn.engine.token.gguf.file import gguf_path, opened
from sojourn.engine.token.models.settings import shown

# Of tokenizer_config.json: read here or by the chat template, or without effect on ids beside a tokenizer.json.
TOKENIZER = frozenset((
    "tokenizer_class", "model_max_length", "padding_side", "truncation_side", "clean_up_tokenization_spaces",
    "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens",
    "add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "split_special_tokens", "sp_model_kwargs",
    "spaces_between_special_tokens", "use_default_system_prompt", "errors", "name_or_path", "special_tokens_map_file",
    "tokenizer_file", "vocab_file", "merges_file", "auto_map", "processor_class", "model_input_names", "trim_offsets",
    "from_slow", "use_fast", "backend", "is_local", "local_files_only", "max_length", "max_len", "stride",
    "truncation_strategy", "pad_to_multiple_of", "pad_token_type_id", "chat_template", "init_inputs", "unk_id",
    "transformers_version", "verbose", "trust_remote_code", "device_map", "fix_mistral_regex", "padding", "truncation",
    "return_token_type_ids", "separate_vocabs", "response_schema", "response_template", "clean_text",
))  # fmt: skip
# Of generation_config.json: what changes no output, or only that of beams, of encoders and of drafts, and `do_sample`.
GENERATION = frozenset((
    *TAKEN, "do_sample", "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache",
    "transformers_version", "_from_model_config", "_name_or_path", "trust_remote_code", "cache_implementation",
    "cache_config", "return_dict_in_generate", "return_legacy_cache", "output_attentions", "output_hidden_states",
    "output_scores", "output_logits", "max_length", "length_penalty", "early_stopping", "user_token_id",
    "assistant_token_id", "chat_format", "max_window_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind",
    "is_assistant", "prompt_lookup_num_tokens", "max_matching_ngram_size", "low_memory", "compile_config",
    "disable_compile", "prefill_chunk_size", "generation_kwargs", "encoder_repetition_penalty", "use_mtp",
    "encoder_no_repeat_ngram_size", "continuous_batching_config",
))  # fmt: skip
# Values by which a key of generation_config.json changes nothing, beside null, false and what is empty.
NEUTRAL = {
    "num_beams": 1, "num_beam_groups": 1, "typical_p": 1, "num_return_sequences": 1, "guidance_scale": 1,
    "top_h": 1, "min_length": 0, "min_new_tokens": 0,
}  # fmt: skip
# Of a GGUF file, behind `tokenizer.ggml.`.
GGML = frozenset((
    "model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token", "add_space_prefix",
    *(f"{role}_token_id" for role in (
        "bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "separator", "cls", "mask", "prefix", "suffix",
        "middle", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep",
    )),
    "add_sep_token", "remove_extra_whitespaces", "token_type_count", "added_tokens",
))  # fmt: skip
# Of a GGUF file, behind the architecture's name.
_ROPE = ("type", "factor", "attn_factor", "original_context_length", "finetuned", "yarn_ext_factor",
         "yarn_attn_factor", "yarn_log_multiplier", "yarn_beta_fast", "yarn_beta_slow")  # fmt: skip
ARCHITECTURE = frozenset((
    *KEYS, *REFUSED, "attention.causal", "attention.value_length", "rope.dimension_count", "rope.freq_base",
    "rope.scale_linear", *(f"rope.scaling.{key}" for key in _ROPE), "vocab_size", "tensor_data_layout",
    "expert_used_count", "attention.layer_norm_epsilon",
))  # fmt: skip
# Of a GGUF file, of the sampling: what stands beside samplers that are off, and the length of llama.cpp's penalty.
GGUF_SAMPLING = frozenset((*SAMPLING, *(f"general.sampling.{key}" for key in (
    "xtc_threshold", "mirostat_tau", "mirostat_eta", "penalty_last_n",
))))  # fmt: skip
PREFIXES = ("GGUF.", "split.", "quantize.", "imatrix.", "training.", "tokenizer.chat_template")


def unread_keys(folder: Path) -> list[str]:
    """A sentence for each file that has keys which nothing reads. Raises ModelError for a file that is damaged."""
    said = {
        "tokenizer_config.json": _of_tokenizer(folder),
        "generation_config.json": _of_generation(folder),
    }
    if (gguf := gguf_path(folder)) is not None:
        said[gguf.name] = _of_gguf(opened(gguf).metadata)
    sentences = [
        f"{name} has {', '.join(f'{key}={shown(value)}' for key, value in sorted(found.items()))}, which nothing here "
        "reads: if it changes what a model computes, outputs are wrong"
        for name, found in said.items()
        if found
    ]
    if missing := sorted(_not_in_tokenizer(folder)):
        sentences.append(
            f"tokenizer_config.json adds tokens that tokenizer.json does not have: {shown(missing)}; they are not used"
        )
    return sentences


def _of_tokenizer(folder: Path) -> dict[str, Any]:
    said = _said(folder, "tokenizer_config.json")
    return {key: value for key, value in said.items() if key not in TOKENIZER and not key.endswith("_token") and value}


def _of_generation(folder: Path) -> dict[str, Any]:
    said = _said(folder, "generation_config.json")
    return {key: value for key, value in said.items()
            if key not in GENERATION and value and NEUTRAL.get(key) != value}  # fmt: skip


def _said(folder: Path, name: str) -> dict[str, Any]:
    """What stands in the JSON file itself."""
    return {} if said_by(folder, name).suffix == ".gguf" else read_json(folder, name)


def _of_gguf(metadata: dict[str, Any]) -> dict[str, Any]:
    architecture = f"{metadata.get('general.architecture')}."

    def is_known(key: str) -> bool:
        if key.startswith("general."):
            return key in GGUF_SAMPLING or not key.startswith("general.sampling.")
        if key.startswith(architecture):
            return key.removeprefix(architecture) in ARCHITECTURE
        known = key.removeprefix("tokenizer.ggml.") in GGML or key == "tokenizer.huggingface.json"
        return known or key.startswith(PREFIXES)

    return {key: value for key, value in metadata.items() if not is_known(key) and value not in (0, "", [])}


def _not_in_tokenizer(folder: Path) -> Iterator[str]:
    """Texts of `added_tokens_decoder` that are no tokens of their own."""
    added = _said(folder, "tokenizer_config.json").get("added_tokens_decoder")
    path = said_by(folder, "tokenizer.json")
    if not isinstance(added, dict) or path.suffix == ".gguf" or not path.is_file():
        return
    source = path.read_text(encoding="utf-8", errors="replace")
    for token in added.values():
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and not any(json.dumps(text, ensure_ascii=each) in source for each in (False, True)):
            yield text
