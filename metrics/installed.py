"""Which packages are missing here, and the smallest install that brings them. Looks for packages, imports none."""

from importlib.util import find_spec

from sojourn.metrics.errors import SojournError

# The extras of pyproject.toml, the smallest first, with the modules of their packages that Sojourn imports.
EXTRAS = {
    "kv-events": ("zmq",),
    "redis": ("redis",),
    "otel": ("opentelemetry", "google"),
    "mcp": ("mcp", "mcp_types"),
    "silicon": ("aiconfigurator_core",),
    "loadgen": ("locust", "gevent", "jinja2", "tokenizers"),
    "ui": ("streamlit", "plotly", "grafanalib"),
    "engine": (
        "torch", "fastapi", "ahocorasick", "gguf", "httpx", "jinja2", "limits", "llguidance", "pynvml", "re2",
        "safetensors", "tokenizers", "uvicorn", "zmq",
    ),
}  # fmt: skip
OPTIONAL = ("gguf", "llguidance", "pynvml")  # of an extra: only what uses them needs them


class PackageMissing(SojournError):
    """An answer needs a package that is not installed."""


def missing(*names: str) -> list[str]:
    """Modules that cannot be imported here. `names`: modules, or extras, which stand for all that they need."""
    wanted = [module for name in names for module in (_needed_of(name) if name in EXTRAS else [name])]
    return [module for module in dict.fromkeys(wanted) if not is_installed(module)]


def is_installed(module: str) -> bool:
    return find_spec(module) is not None


def install_command(modules: list[str]) -> str:
    """The smallest install that brings these modules: `pip install '.[loadgen,ui]'`; `pip install .` where they belong
    to no extra."""
    chosen: list[str] = []
    by_choice = sorted(modules, key=lambda module: sum(module in given for given in EXTRAS.values()))
    for module in by_choice:
        givers = [extra for extra, given in EXTRAS.items() if module in given]
        if givers and not set(givers) & set(chosen):
            chosen.append(givers[0])
    return f"pip install '.[{','.join(sorted(chosen))}]'" if chosen else "pip install ."


def say_missing(modules: list[str], what: str = "this command") -> str:
    """`this command needs plotly: pip install '.[ui]', in Sojourn's folder`."""
    shown = modules if len(modules) <= 4 else [*modules[:2], f"{len(modules) - 2} more packages"]
    names = " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
    return f"{what} needs {names}: {install_command(modules)}, in Sojourn's folder"


def need(*names: str, what: str = "this command") -> None:
    """Raises PackageMissing if one of these modules or extras is missing here."""
    if lacking := missing(*names):
        raise PackageMissing(say_missing(lacking, what))


def _needed_of(extra: str) -> list[str]:
    return [module for module in EXTRAS[extra] if module not in OPTIONAL]
