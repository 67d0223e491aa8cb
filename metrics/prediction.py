"""A change of a recorded run, what a replay predicts for it, and the protocol of whoever predicts.

This file knows no engine: `replay` implements `Predictor`, and whoever shows a prediction reads these structs.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

import msgspec

from sojourn.metrics.errors import ReplayError

FACTORS = ("device_speed", "kv_scale", "arrival_rate")  # of a change; 1 changes nothing
Routing = Literal["round-robin", "least-requests", "consistent-hash", "prefix-aware"]
ROUTINGS: tuple[str, ...] = get_args(Routing)
NEARLY_ALL = 0.9  # of all shares: an attainment within so wide bounds is not predicted
FAR_APART = 20.0  # times: likewise a latency, of a run without objectives
REMOVED = "removed."  # before an account in words of a change: removed.client.network=1 takes all of its time away


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What is different in a replay. The default changes nothing: the run's own check."""

    settings: Mapping[str, Any] = msgspec.field(default_factory=dict)  # of EngineConfig, by name
    device_speed: float = 1.0  # 2.0: every step's device time is half
    removed: Mapping[str, float] = msgspec.field(default_factory=dict)  # account of the ledger → share (0 to 1) removed
    kv_scale: float = 1.0  # 2.0: twice the blocks
    arrival_rate: float = 1.0  # 2.0: the same requests in half the time
    arrivals: Literal["recorded", "even"] = "recorded"  # even: as many at a constant rate
    sessions: int | None = None  # slots of a closed loop: users, or requests in flight; None: as recorded
    replicas: int = 1
    routing: Routing = "round-robin"  # of a run of several servers, the default is the choices that its router made
    servers: Literal["recorded", "equal"] = "recorded"  # equal: those of a fleet are as fast and as large as its best
    objectives: Sequence[Mapping[str, Any]] | None = None  # None: those of the run


class Interval(msgspec.Struct, frozen=True):
    """A predicted quantity: median, and the bounds between which 80% of outcomes are expected.

    NaN where a quantile lies among failed requests. JSON has no NaN: what a document has as null is NaN again here.
    """

    low: float | None
    median: float | None
    high: float | None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) is None:
                msgspec.structs.force_setattr(self, name, math.nan)


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay says of one change. Milliseconds; attainment is a share of the sent requests, 0 to 1."""

    change: Change
    attainment: Interval
    goodput_rps: Interval
    ttft_ms: dict[str, Interval]  # p50, p90, p99
    tpot_ms: dict[str, Interval]
    e2e_ms: dict[str, Interval]
    attainment_by_class: dict[str, Interval]
    output_tokens_per_s: float
    preemptions: int
    is_trusted: bool
    doubts: list[str]  # a sentence each: why the replay cannot be trusted, or [] where it can
    is_refused: bool = False  # the change cannot be replayed: the figures are those of the unchanged run
    is_open: bool = False  # nearly every outcome lies within the bounds: it cannot be predicted. Set from the bounds

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "is_open", _says_nothing(self.attainment, self.e2e_ms.get("p50")))


def _says_nothing(share: Interval, e2e_ms: Interval | None) -> bool:
    if not math.isnan(share.high - share.low):
        return share.high - share.low >= NEARLY_ALL
    return e2e_ms is not None and e2e_ms.low > 0 and e2e_ms.high >= FAR_APART * e2e_ms.low


def attainment_text(prediction: Prediction) -> str:
    """With its bounds: "87% (80–93%)"; "cannot be predicted (2–99%)"."""
    found = prediction.attainment
    if any(math.isnan(bound) for bound in msgspec.structs.astuple(found)):
        return "cannot be predicted" if prediction.is_open else "–"
    bounds = f"({100 * found.low:.0f}–{found.high:.0%})"
    return f"cannot be predicted {bounds}" if prediction.is_open else f"{found.median:.0%} {bounds}"


def change_words(change: Change) -> list[str]:
    """What a change changes, as `sojourn replay --set` takes it: ["max_num_seqs=32", "device_speed=2"]."""
    words = [shown_setting(name, value) for name, value in change.settings.items()]
    words += [f"{name}={getattr(change, name):g}" for name in FACTORS if getattr(change, name) != 1.0]
    words += [f"{REMOVED}{account}={share:g}" for account, share in change.removed.items()]
    if change.arrivals != "recorded":
        words.append(f"arrivals={change.arrivals}")
    if change.sessions is not None:
        words.append(f"sessions={change.sessions}")
    if change.replicas != 1:
        words.append(f"replicas={change.replicas}")
    if change.routing != "round-robin":
        words.append(f"routing={change.routing}")
    if change.servers != "recorded":
        words.append(f"servers={change.servers}")
    if change.objectives is not None:
        words.append("other objectives")
    return words


def change_text(change: Change) -> str:
    """`max_num_seqs=18, device_speed=2`."""
    return ", ".join(change_words(change)) or "no change"


def shown_setting(name: str, value: Any) -> str:
    """As `--set` takes it: `prefix_caching=true`, `priority_ageing=null`."""
    return f"{name}={value if isinstance(value, str) else json.dumps(value)}"


def settings_text(settings: Mapping[str, Any]) -> str:
    """`max_num_seqs=32, priority_ageing=null`; "" for none."""
    return ", ".join(shown_setting(*each) for each in settings.items())


class Predictor(Protocol):
    """Replays one run with changes. A predictor belongs to one run; its first prediction is that of `Change()`."""

    def check(self, change: Change) -> None:
        """Raises ReplayError, with a sentence, for a change that cannot be replayed."""
        ...

    def predict(self, changes: Sequence[Change], *, quick: bool = False) -> list[Prediction]:
        """One prediction a change, in their order; what was replayed before is not replayed again.

        `quick` is for choosing among many: the same medians in a fraction of the time. Its bounds are as wide as those
        of the unchanged run, and wider where steps are larger or smaller than those of the run. Raises ReplayError
        where the run cannot be replayed at all.
        """
        ...


class NoPredictor:
    """Stands for the predictor of a run that cannot be replayed, and says why."""

    def __init__(self, why: str) -> None:
        self._why = why

    def check(self, change: Change) -> None:
        raise ReplayError(self._why)

    def predict(self, changes: Sequence[Change], *, quick: bool = False) -> list[Prediction]:
        raise ReplayError(self._why)
