"""What the package never does, and versions without known holes. docs/threat_model.md cites it."""

import ast
import re

import pytest

from tests.test_floors import ROOT, modules

# Calls that run or load code out of data. `x` stands for any name before the dot.
FORBIDDEN_CALLS = {"eval", "exec", "os.system", "os.popen", "tempfile.mktemp", "yaml.unsafe_load", "yaml.full_load"}
FORBIDDEN_KEYWORDS = {
    ("shell", True), ("allow_pickle", True), ("trust_remote_code", True), ("weights_only", False), ("verify", False),
}  # fmt: skip
SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader", "yaml.BaseLoader"}

# Package → the first version without the holes that were known in November 2026. Sources: GitHub's advisories. The
# advisories of servers like this one (vLLM, SGLang, llama.cpp, Ollama, Ray) name faults, not packages: each has a test.
FIRST_SAFE_VERSIONS = {
    "certifi": "2024.7.4",  # CVE-2024-39689
    "fastapi": "0.109.1",  # CVE-2024-24762
    "filelock": "3.20.1",  # CVE-2025-68146
    "Flask": "3.1.1",  # CVE-2025-47278
    "flask-cors": "6.0.0",  # CVE-2024-6866
    "h11": "0.16.0",  # CVE-2025-43859
    "idna": "3.7",  # CVE-2024-3651
    "Jinja2": "3.1.6",  # CVE-2025-27516
    "pillow": "11.3.0",  # CVE-2025-48379
    "protobuf": "6.31.1",  # CVE-2025-4565
    "pyarrow": "14.0.1",  # CVE-2023-47248
    "python-multipart": "0.0.18",  # CVE-2024-53981
    "requests": "2.32.4",  # CVE-2024-47081
    "starlette": "0.49.1",  # CVE-2025-62727
    "streamlit": "1.43.2",  # CVE-2025-1684
    "torch": "2.8.0",  # CVE-2025-32434, CVE-2025-2953
    "tqdm": "4.66.3",  # CVE-2024-34062
    "transformers": "4.53.0",  # CVE-2025-3777
    "urllib3": "2.6.0",  # CVE-2025-66418
    "uvicorn": "0.11.7",  # CVE-2020-7695
    "Werkzeug": "3.1.4",  # CVE-2025-66221
}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or an attribute; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def own_loaders(tree: ast.AST) -> set[str]:
    """Classes of a module that make a safe loader stricter."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {node.name for node in classes if {dotted(base) for base in node.bases} & SAFE_LOADERS}


def dangers(source: str, extra_loaders: frozenset[str] = frozenset()) -> list[str]:
    """Calls that run or load code out of data. `extra_loaders` are safe ones of other modules."""
    tree = ast.parse(source)
    loaders = SAFE_LOADERS | own_loaders(tree) | extra_loaders
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        keywords = {(kw.arg, kw.value.value) for kw in node.keywords if isinstance(kw.value, ast.Constant)}
        if name in FORBIDDEN_CALLS or keywords & FORBIDDEN_KEYWORDS:
            found.append(name)
        if name == "torch.load" and ("weights_only", True) not in keywords:
            found.append(name)
        if name in ("yaml.load", "yaml.load_all"):
            given = [dotted(each) for each in node.args[1:]]
            given += [dotted(kw.value) for kw in node.keywords if kw.arg == "Loader"]
            if not set(given) & loaders:
                found.append(name)
        if name == "jinja2.Environment":
            found.append(name)
    return found


@pytest.mark.parametrize(
    "source",
    [
        "eval(x)", "exec(x)", "os.system(x)", "subprocess.run(x, shell=True)", "np.load(x, allow_pickle=True)",
        "torch.load(x)", "torch.load(x, weights_only=False)", "yaml.load(x)", "yaml.load(x, yaml.Loader)",
        "yaml.unsafe_load(x)", "jinja2.Environment()", "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "class L(yaml.Loader): pass\nyaml.load(x, L)",
    ],
)  # fmt: skip
def test_each_dangerous_call_is_seen(source):
    assert dangers(source)


def test_safe_calls_pass():
    safe = "yaml.safe_load(x)\ntorch.load(x, weights_only=True)\nmodel.eval()\nre.compile(x)\nsubprocess.run([x])\n"
    assert not dangers(safe + "class L(yaml.SafeLoader): pass\nyaml.load(x, Loader=L)")


def test_no_module_runs_or_loads_code_out_of_data():
    sources = {name: path.read_text(encoding="utf-8") for name, path in modules().items()}
    loading = [source for source in sources.values() if "Loader)" in source]
    loaders = frozenset().union(*(own_loaders(ast.parse(source)) for source in loading))
    found = {name: calls for name, source in sources.items() if (calls := dangers(source, loaders))}
    assert not found


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def test_pinned_versions_are_above_the_known_advisories():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    below = [f"{name} {pinned[name]}" for name, first in FIRST_SAFE_VERSIONS.items()
             if name in pinned and version(pinned[name]) < version(first)]  # fmt: skip
    assert not below and set(FIRST_SAFE_VERSIONS) <= set(pinned)


def test_every_test_that_the_threat_model_cites_exists():
    cited = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "threat_model.md").read_text(encoding="utf-8")))
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(cited) > 20
    assert cited <= set(re.findall(r"def (test_\w+)\(", source))
