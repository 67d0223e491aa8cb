"""Triton kernels compiled for compute capability 9.0 on any machine, and what each takes of a multiprocessor."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED_LIMIT_BYTES = 227 * 1024  # of one block on compute capability 9.0
KINDS = ("HGMMA", "HMMA", "LDGSTS", "LDG", "LDL", "STL", "FFMA", "MUFU.EX2")  # of instructions that are counted


@dataclass(frozen=True, slots=True)
class Compilation:
    """A kernel with the types of its arguments.

    `signature` names every argument that is no constant, in order: a Triton type such as `*bf16`, `i32` or `fp32`, with
    `:16` behind it where its value (or address) is a multiple of 16.
    """

    kernel: str  # module:name
    signature: dict[str, str]
    constants: dict[str, int | float | bool | str | None]
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel takes of one multiprocessor."""

    registers: int  # a thread
    shared_bytes: int  # a block
    local_bytes: int  # a thread's spilled registers and stack
    instructions: dict[str, int]  # how many of some kinds there are in the machine code


def compile_for_hopper(
    compilations: Sequence[Compilation], timeout_seconds: int = 600, workers: int = 1
) -> list[Resources]:
    """Compiles in processes of their own, without Triton's interpreter. Raises RuntimeError with its message."""
    shares = [compilations[start::workers] for start in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(lambda share: _compile_share(share, timeout_seconds), shares))
    return [found[index % workers][index // workers] for index in range(len(compilations))]


def _compile_share(compilations: Sequence[Compilation], timeout_seconds: int) -> list[Resources]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu.compilation"], input=json.dumps([asdict(item) for item in compilations]),
        capture_output=True, text=True, timeout=timeout_seconds, env={**os.environ, "TRITON_INTERPRET": "0"}, cwd=ROOT,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return [Resources(**item) for item in json.loads(done.stdout.splitlines()[-1])]


def _compile(job: Compilation) -> Resources:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = job.kernel.split(":")
    kernel = getattr(import_module(module), name)
    types = {name: spec.split(":")[0] for name, spec in job.signature.items()}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    missing = [name for name in kernel.arg_names if name not in types and name not in job.constants]
    assert not missing, f"{job.kernel} has arguments that the compilation does not name: {missing}"
    aligned = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name, spec in job.signature.items()
        if spec.endswith(":16")
    }
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages}
    source = ASTSource(kernel, signature, job.constants, aligned)
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    except Exception as error:
        raise RuntimeError(f"{job} does not compile: {error}") from error
    return _resources(compiled.asm["cubin"], compiled.metadata.shared)


def _resources(cubin: bytes, shared_bytes: int) -> Resources:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        code = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    local = sum(int(re.search(rf"\b{kind}:(\d+)", usage)[1]) for kind in ("STACK", "LOCAL"))
    counts = {kind: len(re.findall(rf"\b{re.escape(kind)}\b", code)) for kind in KINDS}
    return Resources(int(re.search(r"\bREG:(\d+)", usage)[1]), shared_bytes, local, counts)


def main() -> None:
    jobs = [Compilation(**item) for item in json.load(sys.stdin)]
    print(json.dumps([asdict(_compile(job)) for job in jobs]))


if __name__ == "__main__":
    main()
