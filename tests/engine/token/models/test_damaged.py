"""Models that are damaged or absurd are refused from config.json and the headers alone, before memory is taken."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from sojourn.engine.config import EngineConfig, model_folder
from sojourn.engine.runner.memory_plan import planned
from sojourn.engine.token.models.registry import load_model, outlined_model
from sojourn.engine.token.models.settings import MOST_LAYERS, MOST_POSITIONS
from sojourn.metrics.errors import ModelError

NAN, HUGE = float("nan"), 10**12
SHARD = "model.safetensors"


@pytest.fixture
def folder(tmp_path) -> Path:
    return shutil.copytree(model_folder("tiny-model"), tmp_path / "model")


def refusal(folder: Path, *, dummy: bool = False) -> str:
    """The sentence of a refusal without memory, which loading gives as well."""
    sentences = []
    looks = ((outlined_model, {"dummy": dummy}), (load_model, {"load_format": "dummy" if dummy else "auto"}))
    for look, options in looks:
        with pytest.raises(ModelError) as refused:
            look(folder, torch.float32, torch.device("cpu"), None, **options)
        sentences.append(str(refused.value))
    assert sentences[0] == sentences[1] and "\n" not in sentences[0]
    return sentences[0]


def configure(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("num_hidden_layers", 10**9, f"at most {MOST_LAYERS:,}"),
        ("num_hidden_layers", MOST_LAYERS + 1, f"at most {MOST_LAYERS:,}"),
        ("num_hidden_layers", MOST_LAYERS, "they are of different models"),
        ("vocab_size", HUGE, "vocab_size=1000000000000; it must be at most 16,777,216"),
        ("vocab_size", 1 << 24, "describes 4,297,034,496 weights"),
        ("vocab_size", 2561, "tensor model.embed_tokens.weight has shape [2560, 256], expected [2561, 256]"),
        ("hidden_size", HUGE, "must be at most"),
        ("hidden_size", 512, "has shape"),
        ("intermediate_size", 417, "has shape"),
        ("num_hidden_layers", 3, "tensor model.layers.3.input_layernorm.weight has no place"),
        ("num_hidden_layers", 5, "weights lack 11 tensors, among them model.layers.4."),
        ("max_position_embeddings", HUGE, f"at most {MOST_POSITIONS:,}"),
        ("num_attention_heads", 10**400, "must be at most"),
        ("num_key_value_heads", 3, "do not divide"),
        ("rms_norm_eps", NAN, "rms_norm_eps=nan; it must be a number"),
        ("rms_norm_eps", 1e300, "below 1e+18"),
        ("head_dim", NAN, "head_dim=nan; it must be a whole number"),
        ("hidden_size", True, "must be a whole number"),
        ("rope_parameters", {"rope_theta": 1.0, "rope_type": "default"}, "must be at least 1.5"),
        ("rope_parameters", {"rope_theta": 1e4, "rope_type": "yarn", "factor": 1e308}, "below 1e+18"),
        ("hidden_act", "x" * 5000, "…"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_absurd_settings_of_a_model_are_refused_by_name(folder, key, value, says):
    layers = {"layer_types": None} if key == "num_hidden_layers" else {}
    configure(folder, **layers, **{key: value})
    sentence = refusal(folder)
    assert says in sentence and len(sentence) < 400


def rewrite_header(folder: Path, edit) -> None:
    """Replaces the header of the weights by `edit(header)`: a mapping, or bytes with their length before them."""
    content = (folder / SHARD).read_bytes()
    size = int.from_bytes(content[:8], "little")
    changed = edit(json.loads(content[8 : 8 + size]))
    raw = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
    (folder / SHARD).write_bytes(len(raw).to_bytes(8, "little") + raw + content[8 + size :])


def of_dtype(dtype: str, width: int):
    def edit(header: dict) -> dict:
        tensor = header["model.norm.weight"]
        begin, end = tensor["data_offsets"]
        return header | {
            "model.norm.weight": {"dtype": dtype, "shape": [(end - begin) // width], "data_offsets": [begin, end]}
        }

    return edit


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda header: b"{" * 100, "is damaged"),
        (lambda header: b'{"a": ' + b"[" * 5000, "is damaged"),
        (lambda header: b"\xff\xfe\x00", "is damaged"),
        (lambda header: b"", "is damaged"),
        (lambda header: {}, "is damaged"),
        (lambda header: header | {"model.norm.weight": 5}, "is damaged"),
        (lambda header: header | {"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "is damaged"),
        (lambda header: header | {"x": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 4]}}, "is damaged"),
        (of_dtype("I32", 4), "tensor model.norm.weight is torch.int32; only 16 and 32 bit floats"),
        (of_dtype("U8", 1), "tensor model.norm.weight is torch.uint8; only"),
        (of_dtype("U32", 4), "tensor model.norm.weight is U32; only"),
        (of_dtype("F16", 2), "has shape [512], expected [256]"),
    ],
    ids=["braces", "nested", "no text", "empty", "no tensors", "number", "negative", "overflow", "I32", "U8", "U32",
         "F16"],
)  # fmt: skip
def test_damaged_headers_are_refused_in_a_sentence(folder, edit, says):
    rewrite_header(folder, edit)
    assert says in refusal(folder)


def make_folder(folder: Path) -> str:
    (folder / SHARD).unlink()
    (folder / SHARD).mkdir()
    return "lacks model.safetensors"


def cut_to_nothing(folder: Path) -> str:
    (folder / SHARD).write_bytes(b"")
    return "is damaged or not complete"


def cut_the_last_byte(folder: Path) -> str:
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-1])
    return "is damaged or not complete"


def nest_the_config(folder: Path) -> str:
    (folder / "config.json").write_text("[" * 100_000)
    return "is not JSON"


def long_number(folder: Path) -> str:
    (folder / "config.json").write_text('{"architectures": ["x"], "vocab_size": ' + "9" * 10_000 + "}")
    return "is not JSON"


def unreadable_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    return "cannot be read"


@pytest.mark.parametrize(
    "damage", [make_folder, cut_to_nothing, cut_the_last_byte, nest_the_config, long_number, unreadable_config]
)
def test_damaged_files_are_refused_in_a_sentence(folder, damage):
    says = damage(folder)
    assert says in refusal(folder)


@pytest.mark.parametrize(
    "changes", [{"vocab_size": 1 << 24, "hidden_size": 1 << 14}, {"max_position_embeddings": MOST_POSITIONS}], ids=str
)
def test_a_model_without_weights_is_bounded_by_memory(folder, changes):
    (folder / SHARD).unlink()
    configure(folder, **changes)
    with pytest.raises(ModelError) as refused:
        planned(EngineConfig(model=str(folder), load_format="dummy", device="cpu"), folder)
    assert "does not fit" in str(refused.value) and "GiB" in str(refused.value)
