"""Judge estimates of devices by public measurements, and write docs/results/silicon.md and the file of known errors.

    python -m bench.silicon [--servcalc PYTHON] [--latencyprism FOLDER] [--judged FILE]

Needs the extra `silicon`. Takes some 15 minutes on two cores; --judged keeps what was simulated for another page.
"""

import pickle
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from bench.silicon.figures import by_one_point, cells, half_of, host_times, pairs, ratio_cells
from bench.silicon.judged import Estimated, Refused, judged
from bench.silicon.page import page
from bench.silicon.peers import public_steps, servcalc
from bench.silicon.rows import Measured, read_rows
from sojourn.metrics.machine.host import hardware
from sojourn.replay.device.known_errors import Judged, Maker, write_judged

PAGE = Path(__file__).parents[2] / "docs" / "results" / "silicon.md"
FITTED_ON = "h100_sxm"
MAKERS: tuple[Maker, ...] = ("kernels", "roofline")


def main(
    servcalc_python: Annotated[Path | None, typer.Option("--servcalc", help="a Python with servcalc")] = None,
    latencyprism: Annotated[Path | None, typer.Option(help="a checkout of kunluninsight/LatencyPrism")] = None,
    judged_file: Annotated[Path | None, typer.Option("--judged", help="keeps what was simulated")] = None,
) -> None:
    rows, unusable = read_rows()
    found = {maker: _judged(rows, maker, judged_file) for maker in MAKERS}
    fitted = [
        each for each in found["kernels"][0]
        if each.measured.deployment.device == FITTED_ON and half_of(each.measured.deployment) == 0
    ]  # fmt: skip
    host_ns = host_times(fitted)
    estimated = {maker: [with_host(each, host_ns) for each in found[maker][0]] for maker in MAKERS}
    write_judged({
        maker: Judged(
            cells=cells(estimated[maker]), ratios=ratio_cells(pairs(estimated[maker])),
            corrected=cells(by_one_point(estimated[maker])),
        )
        for maker in MAKERS
    })  # fmt: skip
    PAGE.write_text(page(
        rows, unusable, estimated["kernels"], estimated["roofline"], _reasons(found["kernels"][1]), host_ns,
        servcalc(rows, servcalc_python) if servcalc_python else None,
        public_steps(latencyprism) if latencyprism else [], _head(len(rows) + len(unusable)),
    ))  # fmt: skip
    print(f"wrote {PAGE}; host times {host_ns}: composition.py should have them")


def with_host(each: Estimated, host_ns: dict[str, float]) -> Estimated:
    """In a closed loop of equal requests the steps are the same ones, however long each takes."""
    own_ms = host_ns[each.measured.deployment.backend] / 1e6 * each.steps_per_token
    later = each.measured.output_tokens - 1
    return each._replace(
        tpot_ms=each.tpot_ms + own_ms, e2e_ms=each.e2e_ms + own_ms * later,
    )  # fmt: skip


def _judged(rows: Sequence[Measured], maker: Maker, file: Path | None) -> tuple[list[Estimated], list[Refused]]:
    """Without host time: it is added behind."""
    kept = None if file is None else file.with_suffix(f".{maker}")
    if kept is not None and kept.exists():
        return pickle.loads(kept.read_bytes())
    found = judged(rows, maker, host_ns=dict.fromkeys(("vllm", "sglang", "trtllm"), 0.0))
    if kept is not None:
        kept.write_bytes(pickle.dumps(found))
    return found


def _reasons(refused: Sequence[Refused]) -> list[tuple[str, str, str]]:
    found = []
    for row, said in refused:
        reason = said.partition(" is outside of the tables: ")[2] or said
        if "tensor parallelism" in said:
            reason = "more devices than the tables of all-reduce have"
        reason = "no table of its experts in this format" if "MoE data missing" in reason else reason
        if "leaves no memory" in said:
            reason = "no memory for keys and values, by the package's model of memory"
        found.append((row.deployment.model, row.deployment.device, reason.partition(" at ")[0].replace("|", "/")))
    return found


def _head(rows: int) -> str:
    machine = hardware()
    return (
        "# Estimates of GPUs, judged by public measurements\n\n"
        "This page was made by `python -m bench.silicon --servcalc PYTHON --latencyprism FOLDER` "
        f"on {datetime.now(UTC):%Y-%m-%d}, on "
        f"{machine['cores']} cores without a GPU. It judges the step times of measured kernels "
        "(`aiconfigurator-core` 0.12.0) under Sojourn's own scheduler, in a closed loop of equal requests, by "
        f"{rows:,} public measurements of one server. What nobody measured is refused, not guessed."
    )


if __name__ == "__main__":
    sys.exit(typer.run(main))
