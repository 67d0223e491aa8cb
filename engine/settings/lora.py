"""The settings of LoRA adapters (docs/lora.md)."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationInfo, field_validator

from sojourn.engine.settings.named_paths import checked_names, named_pairs
from sojourn.engine.settings.panels import MEMORY, TOKEN

LARGEST_RANK = 256
SCENARIOS = Path(__file__).parents[2] / "scenarios"
BUNDLED = "tiny-adapters"  # in that folder: adapters of the bundled model


class LoraSettings(BaseModel):
    """Which adapters are served, and how much memory they get."""

    lora_adapters: dict[str, Path] = TOKEN(
        {}, description="NAME=FOLDER of a LoRA adapter of PEFT, repeatable; requests name it as their model"
    )
    max_loras: int = MEMORY(8, ge=1, le=256, description="adapters that may be used in one batch: slots on the device")
    max_lora_rank: int | None = MEMORY(
        None,
        ge=1,
        le=LARGEST_RANK,
        description="largest rank of an adapter; by default the largest of lora_adapters, and 64 with "
        "lora_runtime_loading",
    )
    lora_host_gib: float = MEMORY(
        2, gt=0, le=65_536, description="GiB of host memory for adapters that were read; the rest stays on disk"
    )
    lora_runtime_loading: bool = TOKEN(
        False, description="serve /v1/load_lora_adapter and /v1/unload_lora_adapter; needs lora_folder"
    )
    lora_folder: Path | None = TOKEN(
        None, validate_default=True, description="lora_runtime_loading: adapters are loaded from below this folder only"
    )

    @property
    def has_loras(self) -> bool:
        """Requests may name adapters."""
        return bool(self.lora_adapters) or self.lora_runtime_loading

    @field_validator("lora_adapters", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        """NAME=FOLDER, one or several with commas or in a list, as a command line has them."""
        return named_pairs(value, "adapters")

    @field_validator("lora_adapters")
    @classmethod
    def _are_names(cls, value: dict[str, Path]) -> dict[str, Path]:
        return {name: _adapter_folder(folder) for name, folder in checked_names(value, "an adapter").items()}

    @field_validator("lora_folder")
    @classmethod
    def _folder_for_loading(cls, folder: Path | None, info: ValidationInfo) -> Path | None:
        loads = info.data.get("lora_runtime_loading", folder is not None)
        if loads != (folder is not None):
            raise ValueError("lora_runtime_loading and lora_folder go together; set both or neither")
        return folder


def _adapter_folder(folder: Path) -> Path:
    """The folder that a setting names, or that of a bundled adapter: `tiny-adapters/files`."""
    is_bundled = folder.parts[:1] == (BUNDLED,) and not folder.is_dir()
    return SCENARIOS / folder if is_bundled else folder
