"""What the device did in a run, shaped for showing: pure functions from its tables to small ones."""

import pandas as pd

from sojourn.metrics.cells import row_sums
from sojourn.metrics.compute.cost_model import PARTS
from sojourn.metrics.compute.roofline import Ceilings
from sojourn.metrics.compute.utilisation import TokenNumbers, phases
from sojourn.metrics.compute.utilisation import utilisation as metrics_of
from sojourn.metrics.records import COMPOSITIONS

TOKEN_MEANING = {
    "computed": "prompt and output tokens that went through the model the first time",
    "cached": "prompt tokens whose keys and values were in the prefix cache",
    "recomputed": "computed again after a preemption",
    "drafted": "proposed by speculation",
    "accepted": "of the drafted ones, those that verification accepted",
    "padding": "computed to fill the bucket of a graph",
    "overrun": "computed for a request that had ended meanwhile",
}


def points(steps: pd.DataFrame) -> pd.DataFrame:
    """One row per step that computed something: `step, phase, intensity` (FLOPs a byte), `gflops, gbytes` (per
    second of device time), `device_ms, tokens`."""
    rows = steps[(steps.device_ns > 0) & (steps.flops > 0) & (steps.bytes > 0)]
    seconds = rows.device_ns / 1e9
    return pd.DataFrame(
        {
            "step": rows.step,
            "phase": phases(rows),
            "intensity": rows.flops / rows.bytes,
            "gflops": rows.flops / seconds / 1e9,
            "gbytes": rows.bytes / seconds / 1e9,
            "device_ms": rows.device_ns / 1e6,
            "tokens": row_sums(rows.new_tokens),
        }
    )


def utilisation(steps: pd.DataFrame, ceilings: Ceilings | None, precision: str) -> pd.DataFrame:
    """How near to its ceilings the device came: a row a phase, then all steps on busy time and, where the run tells its
    gaps, on wall time.

    Columns: `phase, steps, seconds`, and the shares `mfu, mbu, of_roofline`, NaN without ceilings.
    """
    known = ceilings is not None and precision in ceilings.precisions
    rows = []
    for use in metrics_of(steps, ceilings if known else None, precision if known else None):
        name = "all, device busy" if use.phase == "all" else use.phase
        rows.append((name, use.steps, use.device_ns / 1e9, use.mfu_busy, use.mbu_busy, use.roofline_busy))
        if use.phase == "all" and use.wall_ns is not None:
            share = None if use.roofline_busy is None else use.roofline_busy * use.device_ns / max(use.wall_ns, 1)
            rows.append(("all, wall time", use.steps, use.wall_ns / 1e9, use.mfu_wall, use.mbu_wall, share))
    table = pd.DataFrame(rows, columns=["phase", "steps", "seconds", "mfu", "mbu", "of_roofline"])
    return table.astype(dict.fromkeys(("mfu", "mbu", "of_roofline"), "float64"))


def tokens(requests: pd.DataFrame, steps: pd.DataFrame) -> pd.Series:
    """Tokens of the run by kind, as TOKEN_MEANING names them; those that are more than 0."""
    sums = {
        "computed": requests.computed_tokens.sum(),
        "cached": requests.server_cached_tokens.sum(),
        "recomputed": requests.recomputed_tokens.sum(),
        "drafted": requests.drafted_tokens.sum(),
        "accepted": requests.accepted_tokens.sum(),
        "padding": steps.padding_tokens.sum(),
        "overrun": steps.overrun_tokens.sum(),
    }
    found = pd.Series(sums, dtype="float64")
    return found[found > 0]


def token_sentences(numbers: TokenNumbers) -> str:
    """Characters a token and how certain the draws were, as sentences; "" where a run tells neither."""
    sentences = []
    texts = (("prompts", numbers.prompt_characters_per_token), ("outputs", numbers.output_characters_per_token))
    if known := [f"{value:.2f} characters per token in {name}" for name, value in texts if value is not None]:
        sentences.append(f"{', '.join(known)}.")
    if numbers.entropy_nats is not None:
        sentences.append(
            f"Sampling entropy: mean {numbers.entropy_nats:.2f} nats over {numbers.looks:,} sampled tokens; truncation "
            f"kept {numbers.nucleus_mass:.1%} of the probability mass."
        )
    return " ".join(sentences)


def flops_by_part(steps: pd.DataFrame) -> pd.DataFrame:
    """FLOPs of each phase (rows) by part of the model (columns PARTS), `tokens` and `steps`; empty where untold."""
    columns = [f"flops_{part}" for part in PARTS]
    steps = steps.reindex(columns=[*steps.columns, *(name for name in columns if name not in steps)])  # of older runs
    if not steps[columns].sum().sum():
        return pd.DataFrame(columns=[*PARTS, "tokens"])
    summed = steps[columns].astype("float64").fillna(0.0).set_axis(list(PARTS), axis=1)
    summed["tokens"] = row_sums(steps.new_tokens)
    table = summed.groupby(phases(steps)).sum()
    return table.reindex([name for name in COMPOSITIONS if name in table.index])


def kernel_times(kernels: pd.DataFrame) -> pd.Series:
    """Nanoseconds of the profile bursts by class of kernel, largest first."""
    if kernels.empty:
        return pd.Series(dtype="float64")
    return kernels.groupby("klass").total_ns.sum().astype("float64").sort_values(ascending=False)


def largest_kernels(kernels: pd.DataFrame, count: int = 12) -> pd.DataFrame:
    """The kernels that took most: `class, kernel, runs, time (ms), share (%)`."""
    if kernels.empty:
        return pd.DataFrame()
    table = kernels.groupby(["klass", "name"], as_index=False)[["count", "total_ns"]].sum()
    table = table.sort_values("total_ns", ascending=False, kind="stable").head(count)
    whole = float(kernels.total_ns.sum()) or 1.0
    return pd.DataFrame(
        {
            "class": table.klass,
            "kernel": table.name.str.slice(0, 90),
            "runs": table["count"].map("{:,.0f}".format),
            "time (ms)": (table.total_ns / 1e6).map("{:,.2f}".format),
            "share (%)": (100 * table.total_ns / whole).map("{:.1f}".format),
        }
    )


# Column of `system`, its name, its unit, what it is multiplied by, and its panel.
SENSORS = (
    ("gpu_power_watts", "GPU power", "W", 1.0, "power (W)"),
    ("cpu_power_watts", "CPU power", "W", 1.0, "power (W)"),
    ("gpu_sm_clock_mhz", "SM clock", "MHz", 1.0, "clock (MHz)"),
    ("gpu_memory_clock_mhz", "memory clock", "MHz", 1.0, "clock (MHz)"),
    ("core_cpu_percent", "core process", "%", 1.0, "of one core (%)"),
    ("front_cpu_percent", "front process", "%", 1.0, "of one core (%)"),
    ("gpu_utilisation_percent", "GPU has a kernel", "%", 1.0, "of one core (%)"),
    ("host_steal_percent", "CPU steal", "%", 1.0, "of all cores (%)"),
)


def sensors(system: pd.DataFrame) -> list[tuple[str, str, str, float, str]]:
    """Those of SENSORS that this machine has."""
    return [sensor for sensor in SENSORS if system[sensor[0]].notna().any()]
