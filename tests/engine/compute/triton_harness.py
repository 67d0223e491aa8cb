"""Triton without a GPU: kernels run in its interpreter, and compile for Hopper with nobody to run them.

Import this before anything that imports triton: whether kernels are interpreted is settled when they are defined.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHARED_LIMIT_BYTES = 227 * 1024  # of one block on compute capability 9.0
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")


def round_to_nearest() -> None:
    """Makes the interpreter round float32 to fewer bits as a GPU and torch do. It cuts the digits off, and where it is
    told to round, it loses the carry."""
    import triton.language as tl
    from triton.runtime import interpreter

    cut_off, rounded = interpreter._convert_float, {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}

    def convert(data, source, target, rounding_mode):
        if source != tl.float32 or target not in rounded:
            return cut_off(data, source, target, rounding_mode)
        bits = torch.from_numpy(data.copy()).to(rounded[target])
        return bits.view(torch.uint16 if target == tl.bfloat16 else torch.uint8).numpy()

    interpreter._convert_float = convert


def patch_once() -> None:
    """Spares a device function that the interpreter looks through the whole language again: its kernel has done so."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    call = InterpretedFunction.__call__

    def patched(self, *args, **kwargs):
        if self.fn.__globals__.get("tl") is tl:
            return self.rewrite()(*args, **kwargs)
        return call(self, *args, **kwargs)

    InterpretedFunction.__call__ = patched


if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    round_to_nearest()
    patch_once()


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


def compile_for_hopper(compilations: list[Compilation], timeout_seconds: int = 600) -> list[Resources]:
    """Compiles kernels for compute capability 9.0 in a process of its own, without the interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    jobs = json.dumps([asdict(item) for item in compilations])
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.compute.triton_harness"],
        input=jobs, capture_output=True, text=True, timeout=timeout_seconds, env=environment,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [Resources(**item) for item in json.loads(done.stdout.splitlines()[-1])]


def assert_no_spills(compilations: list[Compilation]) -> None:
    """Each kernel compiles for Hopper, keeps its registers and fits into a block's shared memory."""
    for job, resources in zip(compilations, compile_for_hopper(compilations), strict=True):
        assert resources.local_bytes == 0, job
        assert resources.shared_bytes <= SHARED_LIMIT_BYTES, job


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
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
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
    kinds = ("HGMMA", "HMMA", "LDGSTS", "LDG", "LDL", "STL", "FFMA", "MUFU.EX2")
    counts = {kind: len(re.findall(rf"\b{re.escape(kind)}\b", code)) for kind in kinds}
    return Resources(int(re.search(r"\bREG:(\d+)", usage)[1]), shared_bytes, local, counts)


def main() -> None:
    jobs = [Compilation(**item) for item in json.load(sys.stdin)]
    print(json.dumps([asdict(_compile(job)) for job in jobs]))


if __name__ == "__main__":
    main()
