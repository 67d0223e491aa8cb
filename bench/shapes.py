"""Models to benchmark: a checkpoint folder, or the shape of one, for random weights."""

import json
from pathlib import Path

from bench.results import BenchError
from sojourn.engine.config import model_folder

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000,
    "vocab_size": 151_936, "torch_dtype": "bfloat16",
}  # fmt: skip

# Of config.json on Hugging Face (Qwen/Qwen3-0.6B, Qwen/Qwen3-14B); `small` and `100m` are of no published model.
SHAPES = {
    "small": _QWEN3
    | {
        "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64,
        "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    },
    # 98.7 M parameters, with the ids of the bundled tokenizer.
    "100m": _QWEN3
    | {
        "vocab_size": 2560, "hidden_size": 768, "intermediate_size": 2816, "num_hidden_layers": 12, "head_dim": 64,
        "num_attention_heads": 12, "num_key_value_heads": 4, "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    },
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "qwen3-14b": _QWEN3
    | {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
        "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
}  # fmt: skip


def model_to_bench(model: str, folder: Path) -> tuple[str, str]:
    """The model's folder and its load_format. Shapes and bare files of config.json are made a folder below `folder`."""
    path = Path(model).expanduser()
    if model in SHAPES and not path.exists():
        return _bare(json.dumps(SHAPES[model], indent=1), folder / model), "dummy"
    if path.is_file():
        return _bare(path.read_text(encoding="utf-8"), folder / path.stem), "dummy"
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BenchError(f"model {model} has no config.json, so it is no checkpoint")
        weights = any(path.glob("*.safetensors"))
        return str(path), "auto" if weights else "dummy"
    if model == "tiny-model":
        return model, "auto"
    raise BenchError(
        f"model {model} is neither a checkpoint folder, nor a config.json, nor a shape; shapes are {', '.join(SHAPES)}"
    )


def add_tokenizer(folder: Path) -> None:
    """One word for each id of the model: a server needs a tokenizer, even where prompts are ids and weights random."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    vocabulary = {f"w{index}": index for index in range(vocab_size(str(folder)))}
    Tokenizer(WordLevel(vocabulary, "w0")).save(str(folder / "tokenizer.json"))


def vocab_size(model: str) -> int:
    """Token ids of a model, by its config.json. Raises BenchError."""
    path = model_folder(model) / "config.json"
    try:
        config = json.loads(path.read_bytes())
        return int(config.get("text_config", config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        raise BenchError(f"{path} has no vocab_size") from None


def _bare(config: str, folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config, encoding="utf-8")
    return str(folder)
