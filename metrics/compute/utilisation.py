"""How much of the device a recorded run used: model FLOPs and bandwidth utilisation by phase; and what its tokens were.

Everything is a quotient of sums over `steps.parquet`, against the ceilings in `run.json` (metrics/compute/roofline.py).
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from sojourn.metrics.cells import lengths, row_sums, sums_by_key, values
from sojourn.metrics.compute.roofline import Ceilings, product_precision
from sojourn.metrics.records import COMPOSITIONS, PROMPT_KINDS


class Use(msgspec.Struct, frozen=True):
    """What some steps made of the device. Shares are None where its ceilings were never measured.

    `busy` divides by the time of the model's own work, `wall` adds copies of KV tiers and the gaps before the steps,
    when the device waited for the host;
    time without any work is in neither. MFU says nothing of steps that memory bounds, MBU nothing of those that
    arithmetic bounds; `roofline` takes in each step the greater bound, so it is what a step could still gain.
    """

    phase: str  # one of COMPOSITIONS, or all
    steps: int
    tokens: int
    device_ns: int
    wall_ns: int | None  # None where a run is older than the record of gaps
    flops: int
    moved_bytes: int
    mfu_busy: float | None = None
    mfu_wall: float | None = None
    mbu_busy: float | None = None
    mbu_wall: float | None = None
    roofline_busy: float | None = None
    copy_ns: int = 0  # of the device's time beside `device_ns`: KV blocks to and from host memory
    copied_bytes: int = 0
    copy_roofline: float | None = None  # share of it that those bytes need at least; None beside a GPU


class TokenNumbers(msgspec.Struct, frozen=True):
    """What a run records about its tokens beside their number; None where it does not."""

    entropy_nats: float | None  # mean of the draws that were looked at
    nucleus_mass: float | None  # mean share of the probability that truncation left, of the same draws
    looks: int  # how many those were
    prompt_characters_per_token: float | None  # None unless all prompts were sent as text
    output_characters_per_token: float | None


def copy_ns(steps: pd.DataFrame) -> pd.Series:
    """Of the device's time of each step, copies between the KV cache and host memory; 0 of an older run."""
    known = [steps[name].fillna(0).astype("int64") for name in ("load_ns", "store_ns") if name in steps]
    return sum(known, pd.Series(0, index=steps.index))


def _copied_bytes(steps: pd.DataFrame) -> int:
    """To and from the tier of host memory."""
    copied = [steps[name] for name in ("tier_loaded_bytes", "tier_stored_bytes") if name in steps]
    return sum(int(sums_by_key(column, ["host"]).host.sum()) for column in copied)


def phases(steps: pd.DataFrame) -> np.ndarray:
    """The phase of each step, as `records.composition` has it."""
    kinds, rows = values(steps.kinds)
    prompts = np.bincount(rows[np.isin(kinds, PROMPT_KINDS)], minlength=len(steps))
    all_prompts = np.where(prompts == lengths(steps.kinds), "prefill", "mixed")
    return np.where(prompts == 0, "decode", all_prompts).astype(object)


def ceilings_from(meta: Mapping[str, Any]) -> Ceilings | None:
    """Those of the device that a run was made on; None where `run.json` has none, because they were not measured."""
    recorded = meta.get("ceilings")
    return None if recorded is None else msgspec.convert(recorded, Ceilings)


def arithmetic(meta: Mapping[str, Any]) -> str | None:
    """The precision in which a run's matrix products were computed. None where the server did not record it, as our own
    does."""
    core = meta.get("core")
    if core is None or "weights" not in core:
        return None
    return product_precision(core["weights"], core["dtype"], core["device"])


def utilisation(steps: pd.DataFrame, ceilings: Ceilings | None = None, precision: str | None = None) -> list[Use]:
    """One Use a phase that occurred, and one of `all`. Raises CalibrationError if the precision was not measured."""
    names = phases(steps)
    masks = {phase: names == phase for phase in COMPOSITIONS} | {"all": np.ones(len(steps), dtype=bool)}
    return [_use(phase, steps[mask], ceilings, precision) for phase, mask in masks.items() if mask.any()]


def _use(phase: str, steps: pd.DataFrame, ceilings: Ceilings | None, precision: str | None) -> Use:
    flops, moved = steps.flops.astype("float64"), steps.bytes.astype("float64")
    copies_ns = copy_ns(steps)
    device_ns = int((steps.device_ns - copies_ns).sum())
    wall_ns = device_ns + int(copies_ns.sum() + steps.gap_ns.sum()) if steps.gap_ns.notna().all() else None
    use = Use(
        phase=phase,
        steps=len(steps),
        tokens=int(row_sums(steps.new_tokens).sum()),
        device_ns=device_ns,
        wall_ns=wall_ns,
        flops=int(flops.sum()),
        moved_bytes=int(moved.sum()),
        copy_ns=int(copies_ns.sum()),
        copied_bytes=_copied_bytes(steps),
    )
    if ceilings is None or precision is None or device_ns <= 0:
        return use
    needed_ns = ceilings.roofline_ns(flops, moved, precision).sum()
    on_cpu = ceilings.launch_ns is None
    return msgspec.structs.replace(
        use,
        copy_roofline=ceilings.copies_ns(use.copied_bytes) / use.copy_ns if on_cpu and use.copy_ns else None,
        mfu_busy=ceilings.mfu(use.flops, device_ns, precision),
        mfu_wall=None if wall_ns is None else ceilings.mfu(use.flops, wall_ns, precision),
        mbu_busy=ceilings.mbu(use.moved_bytes, device_ns),
        mbu_wall=None if wall_ns is None else ceilings.mbu(use.moved_bytes, wall_ns),
        roofline_busy=float(needed_ns) / device_ns,
    )


def token_numbers(steps: pd.DataFrame, requests: pd.DataFrame) -> TokenNumbers:
    """Of `steps.parquet` and `requests.parquet`, alone or joined to the client's; older runs lack some columns."""
    entropy, mass = (_listed(steps, name) for name in ("entropy_millinats", "nucleus_mass_ppm"))
    side = "server_" if "server_prompt_tokens" in requests else ""
    prompt_tokens, prompt_characters = _total(requests, f"{side}prompt_tokens"), _total(requests, "prompt_characters")
    output_tokens, output_characters = _total(requests, f"{side}output_tokens"), _total(requests, "output_characters")
    # A request that the server has no record of has none of its columns.
    as_text = bool(prompt_characters) and not (requests.prompt_characters.astype("float64") == 0).any()
    return TokenNumbers(
        entropy_nats=float(entropy.mean()) / 1e3 if len(entropy) else None,
        nucleus_mass=float(mass.mean()) / 1e6 if len(mass) else None,
        looks=len(entropy),
        prompt_characters_per_token=prompt_characters / prompt_tokens if as_text else None,
        output_characters_per_token=output_characters / output_tokens if output_characters else None,
    )


def _total(table: pd.DataFrame, column: str) -> int:
    return int(table[column].fillna(0).sum()) if column in table else 0


def _listed(table: pd.DataFrame, column: str) -> np.ndarray:
    return values(table[column])[0].astype("float64") if column in table else np.zeros(0)
