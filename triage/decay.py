"""Whether decoding gets slower with the uptime of a server, at the same batch and the same contexts.

What a running request gets per second is compared between the thirds of a series. The size of the batch is taken out
by a line through both logarithms. A series in which contexts or prompts grow meanwhile says nothing of the uptime.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from sojourn.interop.held.held import Held
from sojourn.interop.sources.names import canonical
from sojourn.interop.sources.pressure import GENERATED, KV_USE, RUNNING
from sojourn.interop.sources.registry import recognise
from sojourn.interop.sources.translate import over_time
from sojourn.triage.document import Level, Likely

FEWEST, LEAST_S = 24, 600.0  # moments with load, and the time that they span
FELL, CLEAR = 0.2, 4.0  # of the speed, from the first third to the last; in errors of a third's median
GREW = 1.2  # KV or prompt tokens of a running request, last third over the first: then the work is another one
PROMPTS = "sojourn_token_prompt_tokens_total"


def decay_of(group: Sequence[Held], level: Level) -> Likely | None:
    """The cause, where it shows."""
    moments = _moments([row for held in group for row in held.series])
    if len(moments) < FEWEST or moments.ns.iloc[-1] - moments.ns.iloc[0] < LEAST_S * 1e9:
        return None
    running, speed = np.log(moments.running.to_numpy()), np.log(moments.speed.to_numpy())
    slope = np.polyfit(running, speed, 1)[0] if np.ptp(running) > 0.1 else 0.0
    thirds = np.array_split(speed - slope * running, 3)
    first, middle, last = (float(np.median(third)) for third in thirds)
    error = max(_error(third) for third in thirds)
    fell = 1 - float(np.exp(last - first))
    if fell < FELL or not first >= middle >= last or first - last < CLEAR * error or _work_grew(moments):
        return None
    hours = (moments.ns.iloc[-1] - moments.ns.iloc[0]) / 3.6e12
    return Likely(
        key="decay", cause=f"decoding gets slower with the uptime: {fell:.0%} within {hours:.1f} h at the same batch",
        confidence=0.6 if "kv" in moments else 0.4, level=level, source=group[0].name,
        evidence=f"tokens/s of a running request fell by {fell:.0%} from the first third of {len(moments)} moments to "
        "the last, with the size of the batch taken out",
        rivals=["longer contexts" if "kv" not in moments else "somebody else on the device who came meanwhile"],
        change="restart one replica: the cause is in the process if that one is fast again",
    )  # fmt: skip


def _moments(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """`ns, running, speed`, and `kv` and `prompts` of a running request where they are known; those with load only."""
    frame = pd.DataFrame(
        [(row["ns"], float(row["value"]), canonical(row["name"]), dict(row["labels"])) for row in rows],
        columns=["ns", "value", "name", "labels"],
    )
    source = recognise(set(frame.name))
    if source is None:
        return pd.DataFrame(columns=["ns", "running", "speed"])
    gauges, counters = (over_time(source, kind, frame, "value") for kind in ("gauge", "counter"))
    if RUNNING not in gauges or GENERATED not in counters:
        return pd.DataFrame(columns=["ns", "running", "speed"])
    found = pd.DataFrame({"running": gauges[RUNNING], "tokens": counters[GENERATED]}).dropna().sort_index()
    seconds = np.diff(found.index.to_numpy("int64"), prepend=0) / 1e9
    mean = (found.running + found.running.shift()) / 2
    found["speed"] = found.tokens.diff() / seconds / mean
    if KV_USE in gauges:
        found["kv"] = gauges[KV_USE] / found.running
    if PROMPTS in counters:
        found["prompts"] = counters[PROMPTS].diff() / seconds / mean
    found = found[(mean >= 1) & (found.running >= 1) & (found.speed > 0) & np.isfinite(found.speed)]
    return found.reset_index(names="ns")


def _error(values: np.ndarray) -> float:
    """Of a median."""
    return float(1.25 * np.std(values) / np.sqrt(len(values)))


def _work_grew(moments: pd.DataFrame) -> bool:
    """Whether contexts or prompts are longer in the last third than in the first."""
    size = len(moments) // 3
    for name in ("kv", "prompts"):
        if name in moments:
            before, after = moments[name].iloc[:size].median(), moments[name].iloc[-size:].median()
            if before > 0 and after > GREW * before:
                return True
    return False
