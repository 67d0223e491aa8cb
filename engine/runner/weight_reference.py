"""What the unquantised model predicts, where EngineConfig.weights_reference asks for the error of the weights."""

from pathlib import Path

import torch

from sojourn.engine.config import EngineConfig, model_folder
from sojourn.engine.runner.memory_plan import free_bytes
from sojourn.engine.token.models.registry import load_model, outlined_model
from sojourn.engine.token.quantise.error import NUM_TOKENS, ReferencePredictions, text_ids
from sojourn.metrics.errors import ModelError
from sojourn.metrics.memory.plan import shown_bytes

FLOAT_BYTES = 4  # of a kept log-probability


def reference_predictions(
    config: EngineConfig, folder: Path, dtype: torch.dtype, device: torch.device
) -> ReferencePredictions | None:
    """None where nothing asks for it. The reference goes before the served model is loaded; what it predicted stays in
    the host's memory. Raises ModelError for a reference that does not fit, or has another vocabulary."""
    name = config.weights_reference
    if name is None:
        return None
    of = folder if name == "self" else model_folder(name)
    served, reference = (outlined_model(each, dtype, device, config.max_model_len) for each in (folder, of))
    vocab_size = reference.model.config.vocab_size
    if vocab_size != served.model.config.vocab_size:
        raise ModelError(
            f"weights_reference {of} has a vocabulary of {vocab_size:,} and the model one of "
            f"{served.model.config.vocab_size:,}; give the model that was quantised"
        )
    ids = text_ids(folder, num_tokens=min(NUM_TOKENS, served.max_model_len), from_end=True)
    if max(ids) >= vocab_size:
        raise ModelError(f"the tokenizer of {folder} knows more tokens than its model; no error can be measured")
    needed = {device: reference.weight_bytes, torch.device("cpu"): len(ids) * vocab_size * FLOAT_BYTES}
    for place, size in needed.items():
        if size > (free := free_bytes(place)):
            raise ModelError(
                f"weights_reference needs {shown_bytes(size)}, and {shown_bytes(free)} are free on {place.type}; "
                "leave it out, or measure where there is more memory"
            )
    model = load_model(of, dtype, device, config.max_model_len)
    return ReferencePredictions(name, model, ids)
