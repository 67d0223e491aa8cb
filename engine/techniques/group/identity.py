"""What the ranks of a group compare before they load anything."""

import hashlib
import platform
from importlib import metadata
from pathlib import Path

from sojourn.engine.config import EngineConfig
from sojourn.engine.runner.checkpoint_files import files_digest
from sojourn.engine.techniques.group.messages import Identity

_DIFFERENCE = {
    "version": "runs other software ({theirs}, and rank 0 {ours}); install the same on all ranks",
    "settings": "has other settings than rank 0; start all ranks with the same ones",
    "weights": "reads other weights than rank 0; give all ranks the same files",
}


def identity(config: EngineConfig, folder: Path) -> Identity:
    """Of this process."""
    versions = [f"python {platform.python_version()}"]
    versions += [f"{package} {metadata.version(package)}" for package in ("sojourn", "torch")]
    return Identity(
        version=", ".join(versions),
        settings=hashlib.blake2b(config.model_dump_json().encode(), digest_size=16).hexdigest(),
        weights=files_digest(folder, is_dummy=config.load_format == "dummy").hex(),
    )


def difference(ours: Identity, theirs: Identity) -> str | None:
    """What keeps two ranks from being one group, as the rest of a sentence about the other; None where nothing does."""
    for name, sentence in _DIFFERENCE.items():
        own, other = getattr(ours, name), getattr(theirs, name)
        if own != other:
            return sentence.format(ours=own, theirs=other)
    return None
