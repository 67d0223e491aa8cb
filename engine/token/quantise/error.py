"""What rounded weights change: the distance between two models' predictions on a text."""

from pathlib import Path

import torch

from sojourn.engine.config import model_folder
from sojourn.engine.token.models.decoder import Decoder
from sojourn.engine.token.models.registry import load_model
from sojourn.engine.token.quantise.passes import hidden_states
from sojourn.engine.token.text.tokenizer import Tokenizer
from sojourn.metrics.compute.weight_error import WeightError
from sojourn.metrics.errors import ModelError

CPU = torch.device("cpu")
NUM_TOKENS = 1024
ROWS = 64  # of logits at one time
TEXT = "prompts.txt"  # of the bundled model: text that it was not trained on


def text_ids(
    folder: Path, text: Path | None = None, num_tokens: int = NUM_TOKENS, *, from_end: bool = False
) -> list[int]:
    """Ids of a text by a model's own tokenizer: the first ones, or the last. The bundled text by default."""
    path = text or model_folder("tiny-model") / TEXT
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"the text {path} cannot be read: {error}") from None
    characters = 16 * num_tokens  # more than any tokenizer's tokens have on average
    ids = Tokenizer(folder).encode(content[-characters:] if from_end else content[:characters])
    if len(ids) < 2:
        raise ModelError(f"the text {path} has {len(ids)} tokens; a measurement needs two at least")
    return ids[-num_tokens:] if from_end else ids[:num_tokens]


class ReferencePredictions:
    """What the unquantised model predicts behind each token of a text. The model may go afterwards."""

    def __init__(self, name: str, model: Decoder, ids: list[int]):
        self.name, self.ids = name, ids
        with torch.inference_mode():
            hidden = hidden_states(model, ids)[:-1]
            self._logprobs = [model.logits(rows).log_softmax(-1).cpu() for rows in hidden.split(ROWS)]

    @torch.inference_mode()
    def error_of(self, model: Decoder) -> WeightError:
        """Of a model with the same vocabulary."""
        divergence = likelihood = agreed = 0.0
        following = torch.tensor(self.ids[1:]).split(ROWS)
        for rows, expected, targets in zip(
            hidden_states(model, self.ids)[:-1].split(ROWS), self._logprobs, following, strict=True
        ):
            found = model.logits(rows).log_softmax(-1).cpu()
            divergence += (expected.exp() * (expected - found)).nan_to_num(0.0).sum().item()
            likelihood += (expected - found).gather(1, targets[:, None]).sum().item()
            agreed += (expected.argmax(-1) == found.argmax(-1)).sum().item()
        count = len(self.ids) - 1
        return WeightError(self.name, count, divergence / count, likelihood / count, agreed / count)


def error_of_checkpoint(folder: Path, reference: Path) -> WeightError:
    """Of a checkpoint against a dense one, both on this CPU in float32: `folder` by the kernels that serve it."""
    ids = text_ids(reference, from_end=True)  # not the text that calibrates
    predictions = ReferencePredictions(reference.name, load_model(reference, torch.float32, CPU, None), ids)
    return predictions.error_of(load_model(folder, torch.float32, CPU, None, weights="auto"))
