"""Every Triton specialisation that a dry run of the engine saw, compiled for compute capability 9.0, as a table.

python -m bench.gpu.compiled qwen3-0.6b [--set max_num_seqs=256] [--workers 2]
"""

import argparse
from collections.abc import Iterable

from bench.gpu.compilation import Compilation, Resources, compile_for_hopper
from bench.gpu.dry_run import in_a_process

CHOICES = ("BLOCK_M", "BLOCK_N", "ROWS", "COLUMNS", "EIGHT_BIT", "EDITED", "MASKED", "ADD")  # that tell variants apart
HEADER = "| kernel | variant | warps | stages | registers | spilled bytes | shared bytes | tensor cores |"


def compilations(specialisations: Iterable[dict]) -> list[Compilation]:
    return [
        Compilation(
            item["kernel"], item["signature"], item["constants"], item.get("num_warps", 4), item.get("num_stages", 3)
        )
        for item in specialisations
    ]


def variant(job: Compilation) -> str:
    """The constants and types by which one specialisation of a kernel differs from another."""
    named = [f"{name} {job.constants[name]}" for name in CHOICES if name in job.constants]
    first = next(iter(job.signature.values())).split(":")[0].lstrip("*")
    return ", ".join([first, *named])


def row(job: Compilation, found: Resources) -> str:
    kinds = {"HGMMA": "wgmma", "HMMA": "mma"}
    products = [f"{found.instructions[kind]} {name}" for kind, name in kinds.items() if found.instructions[kind]]
    cells = (
        job.kernel.split(":")[1].removesuffix("_kernel"), variant(job), job.num_warps, job.num_stages, found.registers,
        found.local_bytes, f"{found.shared_bytes:,}", " ".join(products) or "-",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a shape of bench/shapes.py, or a file of config.json")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the engine")
    parser.add_argument("--workers", type=int, default=2, help="compilers at the same time")
    options = parser.parse_args()
    record = in_a_process(options.model, dict(item.split("=", 1) for item in options.set))
    jobs = sorted(compilations(record.specialisations.values()), key=lambda job: job.kernel)
    found = compile_for_hopper(jobs, 3600, options.workers)
    print(HEADER)
    print("|---|---|---:|---:|---:|---:|---:|---|")
    print("\n".join(row(job, resources) for job, resources in zip(jobs, found, strict=True)))


if __name__ == "__main__":
    main()
