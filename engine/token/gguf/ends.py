"""Which tokens of a GGUF file end an output, and which have a role: by the file's keys, or as llama.cpp knows them."""

from typing import Any

# Ids of a SentencePiece vocabulary whose file does not name them.
USUAL_IDS = {"bos": 1, "eos": 2, "unknown": 0}
# llama.cpp ends an output at tokens of these names, whatever their type is.
END_NAMES = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
))  # fmt: skip
# It ends an output also at tokens that part files, by their keys or else by the first of these names.
PART_NAMES = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Names that end nothing where the others stand in the vocabulary beside them.
NO_ENDS = (("<|end|>", {"<|return|>", "<|call|>"}), ("<|end|>", {"<|calls|>", "<|flush|>"}),
           ("<|end|>", {"<|call|>", "<|flush|>"}), ("</s>", {"<|tool_response>"}))  # fmt: skip


def end_tokens(metadata: dict[str, Any]) -> list[int]:
    """The ends of an output: those that the file names, and those that llama.cpp knows by name."""
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    places = {token: place for place, token in enumerate(tokens)}
    names = END_NAMES & places.keys()
    names -= {name for name, others in NO_ENDS if others <= names}
    ends: set[int | None] = {places[name] for name in names}
    for role, by_name in PART_NAMES.items():
        first = next((places[name] for name in by_name if name in places), None)
        ends.add(metadata.get(f"tokenizer.ggml.{role}_token_id", first))
    ends |= {role_id(metadata, role) for role in ("eos", "eot", "eom")}
    return sorted(end for end in ends if end is not None)


def role_id(metadata: dict[str, Any], role: str) -> int | None:
    """The id of a token that has a role, such as `bos`; None where there is none."""
    usual = USUAL_IDS.get(role) if metadata.get("tokenizer.ggml.model") == "llama" else None
    return metadata.get(f"tokenizer.ggml.{role}_token_id", usual)
