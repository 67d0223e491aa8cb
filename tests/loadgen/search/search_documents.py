"""Sweeps as `sojourn capacity --rates` writes them, of made-up points."""

from pathlib import Path

import msgspec

from sojourn.loadgen.search.points import SCALES, Point, Search


def point(rate_rps: float, attainment: float, repeat: int = 1, *, sent: int = 200, valid: bool = True) -> Point:
    good = round(attainment * sent)
    quantiles = {"p50": 40.0 * rate_rps, "p90": 90.0 * rate_rps, "p95": None, "p99": None, "max": 100.0 * rate_rps}
    return Point(
        rate_rps=rate_rps, repeat=repeat, seed=repeat, run=f"rate-{rate_rps:g}-{repeat}", valid=valid,
        invalid_reasons=[] if valid else ["the load generator sent late"], sent=sent, completed=sent, good=good,
        attainment=good / sent, effective=float(sent), growing=False, goodput_rps=rate_rps * attainment,
        goodput_tokens_per_s=20 * rate_rps * attainment, tokens_per_s=20 * rate_rps,
        quantiles_ms=dict.fromkeys(("ttft_ms", "tpot_ms", "e2e_ms"), quantiles),
        goodput_by_scale={f"{scale:g}": rate_rps * attainment * min(1.0, scale) for scale in SCALES},
    )  # fmt: skip


def sweep_of(folder: Path, attainment_by_rate: dict[float, float]) -> Path:
    """Two runs a rate; the second of the largest is not valid."""
    largest = max(attainment_by_rate)
    points = [
        point(rate, share, repeat, valid=repeat == 1 or rate != largest)
        for repeat in (1, 2)
        for rate, share in attainment_by_rate.items()
    ]
    plan = {
        "scenario": {"name": "chat"}, "rates_rps": list(attainment_by_rate), "repeats": 2, "seed": 0,
        "target": {"base_url": "http://127.0.0.1:8000"}, "objectives_ms": {"ttft_ms": 400.0, "tpot_ms": 40.0},
    }  # fmt: skip
    folder.mkdir(parents=True)
    document = msgspec.json.encode(Search(kind="sweep", plan=plan, points=points))
    (folder / "sweep.json").write_bytes(document)
    return folder
