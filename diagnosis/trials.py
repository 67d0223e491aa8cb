"""Replays of fixes: which ones are made, what they regain, and whether the replay of this run can be trusted."""

import time
from collections.abc import Sequence

import msgspec

from sojourn.diagnosis.evidence import Client, tightest
from sojourn.diagnosis.excess import attainment
from sojourn.diagnosis.suspects import Suspect
from sojourn.diagnosis.symptoms import TOLERATED_MISSES
from sojourn.metrics.errors import ReplayError
from sojourn.metrics.prediction import Change, Prediction, Predictor
from sojourn.metrics.time_limit import OutOfTime, TimeLimit

MOST_CHANGES = 48  # of a diagnosis
FEWEST_CHANGES = 16  # that are replayed alone, however slow a diagnosis is
SECONDS = 5.0  # of all replays of a diagnosis: it is to be read at once
ALONE = 0.6  # of that time, for fixes alone; the rest is for fixes on top of others
TRUSTED_WITHIN = 0.10  # attainment: the unchanged replay must come so near to what was measured
ALIKE_WITHIN = 0.15  # of a latency, or of its objective: what the two sides of an objective may differ by
STEPS_ARE_READ = ("steps", "kernels", "all")  # the levels at which a run can be replayed
# A fix that brings no request within its objective may still bring all of them nearer to it. Progress of that kind
# counts this much of the share of the overshoot that is gone: it breaks ties, and never beats a request regained.
NEARER = 0.2


class Trials:
    """The replays of one run. `usable` is False where there is no predictor, or where it cannot repeat the run.

    `beyond` is the attainment that the run replayed unchanged has more than was measured. What was lost there has a
    cause that no replay has: blocks that leak, a core that dies. Such a cause regains it, and no setting does.
    """

    def __init__(
        self, facts: Client, predictor: Predictor | None, suspects: Sequence[Suspect], limit: TimeLimit | None = None
    ):
        self._limit, self._left_out = limit, 0
        self.unchanged: Prediction | None = None
        self.refused = _refusal(facts, predictor)
        self.usable = not self.refused
        self.beyond = 0.0
        self._facts, self._predictor = facts, predictor
        self._of: dict[str, list[Prediction]] = {}
        self._spent_s, self._num_predictions, self._each_s = 0.0, 0, 0.0
        if not self.usable or not any(each.proposal.fixes or not each.proposal.in_replay for each in suspects):
            self.usable = False
            return
        try:
            self.unchanged = self.predict([Change()], quick=False)[0]
            self._compare(attainment(facts))
            if self.usable:
                self._try(suspects)
        except OutOfTime:
            self.refused, self.usable, self._left_out = f"no replay fits into {limit.seconds:g} s", False, 1
        except ReplayError as error:
            self.refused, self.usable = str(error), False

    def predict(self, changes: Sequence[Change], *, quick: bool = True) -> list[Prediction]:
        """One prediction a change; not `quick` where its bounds are to be its own. What does not fit into the time
        limit is refused. Raises ReplayError."""
        begin = time.monotonic()
        if self._limit is None:
            found = self._predictor.predict(changes, quick=quick)
        else:
            found = [self._predict_within(self._limit, change, quick=quick) for change in changes]
        self._spent_s += time.monotonic() - begin
        self._num_predictions += len(found)
        return found

    def _predict_within(self, limit: TimeLimit, change: Change, *, quick: bool) -> Prediction:
        before_s = limit.left()
        try:
            if before_s < self._each_s:
                raise OutOfTime
            (found,) = self._predictor.predict([change], quick=quick)
        except OutOfTime:
            if self.unchanged is None:
                raise
            self._left_out += 1
            return msgspec.structs.replace(self.unchanged, change=change, is_refused=True)
        if quick:
            self._each_s = before_s - limit.left()
        return found

    @property
    def left_out(self) -> list[str]:
        """What the time limit left out, and how to get it."""
        if not self._left_out or self._limit is None:
            return []
        count = f"{self._left_out} replay{'s' if self._left_out > 1 else ''}"
        told = f"{count} did not fit into {self._limit.seconds:g} s, so another fix may be better"
        if self.unchanged is None:
            told = f"no replay fits into {self._limit.seconds:g} s"
        return [f"{told}: `sojourn diagnose {self._facts.path} --thorough` makes all"]

    def affordable(self) -> int:
        """How many further changes can be replayed before a reader would wait too long; 0 where none can."""
        if not self.usable:
            return 0
        each_s = self._spent_s / max(self._num_predictions, 1)
        left_s = SECONDS - self._spent_s
        if self._limit is not None:
            left_s = min(left_s, self._limit.left())
        return max(0, min(MOST_CHANGES, int(left_s / max(each_s, 1e-3))))

    def of(self, suspect: Suspect) -> list[Prediction]:
        return self._of.get(suspect.key, []) if self.usable else []

    def gain(self, prediction: Prediction) -> float:
        """Attainment regained, 0 to 1."""
        return prediction.attainment.median - self.unchanged.attainment.median

    def progress(self, prediction: Prediction) -> float:
        """What a fix regains on the way to a healthy run, and a little for bringing late requests nearer to their
        objective. Beyond a healthy run nothing counts: twice the devices would regain the last request, too."""
        needed = 1.0 - TOLERATED_MISSES - self.unchanged.attainment.median
        gained = max(0.0, self.gain(prediction))
        return (min(gained, needed) if needed > 0 else gained) + NEARER * max(0.0, self._nearer(prediction))

    def regained_beyond(self) -> float:
        """The same of a cause that no replay has."""
        return max(0.0, min(self.beyond, 1.0 - TOLERATED_MISSES - attainment(self._facts)))

    def _try(self, suspects: Sequence[Suspect]) -> None:
        """Replays the fixes of the suspects, the first ones first, while there is time."""
        for place, (key, change) in enumerate(_chosen(suspects)):
            if place >= MOST_CHANGES or (place >= FEWEST_CHANGES and self._spent_s > ALONE * SECONDS):
                break
            (prediction,) = self.predict([change])
            if not prediction.is_refused:
                self._of.setdefault(key, []).append(prediction)

    def _compare(self, measured: float) -> None:
        """Sets what the run replayed unchanged has more than the run, and whether it is too far below it.

        What the replay itself doubts (a step model of few steps, a shared machine) lowers the confidence, no more.
        """
        found = self.unchanged.attainment
        if found.low <= measured <= found.high or abs(found.median - measured) <= TRUSTED_WITHIN or self._is_alike():
            return
        if found.median > measured:
            self.beyond = found.median - measured
            return
        self.usable = False
        self.refused = (
            f"the run replayed unchanged has an attainment of {found.median:.0%}, and {measured:.0%} were measured"
        )

    def _is_alike(self) -> bool:
        """Whether the latencies that have objectives are nearly the same: an attainment may differ all the same, where
        many requests are near to their objective."""
        served = self._facts.rows[self._facts.rows.status == "ok"]
        replayed = {
            "ttft_ms": self.unchanged.ttft_ms,
            "tpot_ms": self.unchanged.tpot_ms,
            "e2e_ms": self.unchanged.e2e_ms,
        }
        for name, found in replayed.items():
            bound, values = tightest(self._facts, name), served[name].dropna().astype("float64")
            if bound is None or not len(values):
                continue
            for label, share in (("p50", 0.5), ("p90", 0.9)):
                had = float(values.quantile(share))
                if label not in found or not abs(found[label].median - had) <= ALIKE_WITHIN * max(had, bound):
                    return False
        return len(served) == len(self._facts.rows)

    def _nearer(self, prediction: Prediction) -> float:
        before, after = _slow_ms(self.unchanged), _slow_ms(prediction)
        missed = 1.0 - self.unchanged.attainment.median
        return missed * max((1.0 - after[name] / before[name] for name in before if before[name] > 0), default=0.0)


def combine(first: Change, second: Change) -> Change:
    """Both changes; where they disagree on a setting the first one stands."""
    removed = dict(second.removed)
    for account, share in first.removed.items():
        removed[account] = max(share, removed.get(account, 0.0))
    return msgspec.structs.replace(
        first,
        settings={**second.settings, **first.settings},
        device_speed=max(first.device_speed, second.device_speed),
        removed=removed,
        kv_scale=max(first.kv_scale, second.kv_scale),
        arrival_rate=min(first.arrival_rate, second.arrival_rate),
        arrivals="even" if "even" in (first.arrivals, second.arrivals) else "recorded",
        replicas=max(first.replicas, second.replicas),
        routing=first.routing if first.replicas > 1 or first.routing != Change().routing else second.routing,
        servers="equal" if "equal" in (first.servers, second.servers) else "recorded",
        objectives=first.objectives if first.objectives is not None else second.objectives,
    )


def _refusal(facts: Client, predictor: Predictor | None) -> str:
    if facts.level not in STEPS_ARE_READ:
        return f"a diagnosis at the level `{facts.level}` reads no steps, and a replay takes them"
    return (
        ""
        if predictor is not None
        else "no replay was made; `sojourn diagnose` makes one where the engine is installed"
    )


def _chosen(suspects: Sequence[Suspect]) -> list[tuple[str, Change]]:
    """The first fix of every suspect, then the second ones, and so on; the best supported first."""
    order = sorted(suspects, key=lambda each: -each.explained * each.support)
    deepest = max((len(each.proposal.fixes) for each in order), default=0)
    return [(each.key, each.proposal.fixes[at]) for at in range(deepest) for each in order
            if at < len(each.proposal.fixes)]  # fmt: skip


def _slow_ms(prediction: Prediction) -> dict[str, float]:
    found = {"ttft": prediction.ttft_ms, "tpot": prediction.tpot_ms, "e2e": prediction.e2e_ms}
    return {name: each["p90"].median for name, each in found.items() if "p90" in each}
