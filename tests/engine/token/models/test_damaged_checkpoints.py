"""A checkpoint that is damaged, not complete or another model's is refused in a sentence that names what is wrong."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sojourn.engine.token.models.registry import load_model
from sojourn.metrics.errors import ModelError


def remove_shard(folder: Path) -> str:
    sorted(folder.glob("*.safetensors"))[1].unlink()
    return "which its index names; the download is incomplete"


def truncate_shard(folder: Path) -> str:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-100])
    return "is damaged or not complete"


def garble_header(folder: Path) -> str:
    path = sorted(folder.glob("*.safetensors"))[1]
    content = bytearray(path.read_bytes())
    content[0:8] = (2**60).to_bytes(8, "little")
    path.write_bytes(content)
    return "is damaged or not complete"


def overlap_offsets(folder: Path) -> str:
    path = sorted(folder.glob("*.safetensors"))[1]
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = sorted(key for key in header if key != "__metadata__")[0]
    header[name]["data_offsets"] = [10**9, 10**9 + 4]
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + content[8 + size :])
    return "is damaged or not complete"


def leave_the_folder(folder: Path) -> str:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "../secret.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return "names the shard '../secret.safetensors', which is not a file of that folder"


def edit_tensors(folder: Path, edit) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path)


def another_shape(folder: Path) -> str:
    def edit(tensors):
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"] = torch.ones(63)

    edit_tensors(folder, edit)
    return "tensor model.norm.weight has shape [63], expected [64]"


def another_dtype(folder: Path) -> str:
    def edit(tensors):
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"] = torch.ones(64).to(torch.float8_e4m3fn)

    edit_tensors(folder, edit)
    return "tensor model.norm.weight is torch.float8_e4m3fn; only 16 and 32 bit floats are supported"


def no_norm(folder: Path) -> str:
    edit_tensors(folder, lambda tensors: tensors.pop("model.norm.weight", None))
    return "weights lack 1 tensors, among them model.norm.weight"


def unknown_tensor(folder: Path) -> str:
    def edit(tensors):
        if "model.norm.weight" in tensors:
            tensors["model.norm.bias"] = torch.ones(64)

    edit_tensors(folder, edit)
    return "tensor model.norm.bias has no place in this architecture"


@pytest.mark.parametrize(
    "damage",
    [remove_shard, truncate_shard, garble_header, overlap_offsets, leave_the_folder, another_shape, another_dtype,
     no_norm, unknown_tensor],
)  # fmt: skip
def test_damaged_checkpoint_is_refused_in_a_sentence(damage, checkpoints, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(checkpoints["llama"], folder)
    sentence = damage(folder)
    with pytest.raises(ModelError) as refused:
        load_model(folder, torch.float32, torch.device("cpu"), None)
    assert sentence in str(refused.value)
