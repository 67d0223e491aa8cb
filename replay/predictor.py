"""The predictor of one run: its replays, their intervals, and whether they can be trusted."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
import pandas as pd

from sojourn.engine.config import EngineConfig
from sojourn.metrics.compute.group_facts import group_facts
from sojourn.metrics.errors import ReplayError
from sojourn.metrics.prediction import Change, Interval, Prediction
from sojourn.metrics.request.goodput import measured
from sojourn.metrics.request.objectives import EVERY_CLASS
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.fleet import servers_of
from sojourn.metrics.run.server_alone import requests_of
from sojourn.metrics.time_limit import TimeLimit
from sojourn.replay import trust
from sojourn.replay.device.carried import is_carried, without_hardware
from sojourn.replay.intervals import both_errors, interval_named
from sojourn.replay.material import fleet_material, material_of
from sojourn.replay.noise import Noise
from sojourn.replay.outcome import Answers, figures, recorded_answers
from sojourn.replay.parallel import told
from sojourn.replay.processes import Job, ReplayProcesses
from sojourn.replay.settings import OBJECTIVE_SETTINGS, changed_config, check, check_drafts, recorded_config
from sojourn.replay.simulate import Accident, Material, Replayed, Replayer
from sojourn.replay.simulated_tiers import check_tiers
from sojourn.replay.spread import NORMAL_80, USUAL_SPEED_SPREAD, Spread, spread_of
from sojourn.replay.steps_table import step_columns
from sojourn.replay.verdict.measured import QUANTILES

# Of the speed of the machine, in standard deviations: quantiles 0.1 to 0.9, the outer ones first. Nine outcomes that
# could change places enclose the tenth with a probability of 80%, whichever of speed and order makes them differ.
SPEEDS = (0.0, -NORMAL_80, NORMAL_80, -0.8416, 0.8416, -0.5244, 0.5244, -0.2533, 0.2533)
FAR_NS = 0.25e9
OF_CALM_RUN = 5  # replays
FEWEST_SHARED = 50  # steps of another run, of sizes that this one has
MOST_STEPS = 1_000_000  # of a run: a replay of more takes minutes
FOR_CHANGES = 0.6  # of a time limit that the bounds of the unchanged run leave to the changes
FOR_BOUNDS = 3  # replays: the run's own speed, and the two outer ones
LONG_SECONDS = 10.0  # of replays for one list of changes, before each is replayed less often
Figures = dict[str, float]


class StepErrors(NamedTuple):
    """How much longer the device took for the steps of another run than for equal ones of this run. Relative."""

    known: float  # of sizes that this run has: the machine between the two runs
    beyond: float  # of larger ones; NaN where there are none


class ReplayPredictor:
    """Implements `metrics.prediction.Predictor` for one run.

    `processes` above 1 replays a longer list of changes in as many processes.
    """

    def __init__(
        self, run: RunDirectory, *, processes: int = 1, most_steps: int = MOST_STEPS, limit: TimeLimit | None = None
    ) -> None:
        self.run, self._limit = run, limit
        self._meta = run.meta()
        requests, members = requests_of(run, self._meta), servers_of(run, self._meta)
        tables = [member.table("steps") for member in members or [run]]
        if (count := sum(map(len, tables))) > most_steps:
            raise ReplayError(f"{run.name} has {count:,} steps; at most {most_steps:,} are replayed here")
        server = run
        if members:
            self._material = fleet_material(run, self._meta, requests, members)
            best = next(each for each in self._material.servers if each.times is self._material.times)
            self._meta, self._config = dict(best.meta), best.config
            server = members[self._material.servers.index(best)]
        else:
            self._config = recorded_config(self._meta)
            self._material = material_of(run, self._meta, requests, tables[0], self._config)
        check_drafts(self._config, self._config, self._material.drafts)
        check_tiers(self._config, self._material.tier_speeds)
        self._replayer = Replayer(self._material, limit)
        self._processes = ReplayProcesses(self._material, processes)
        self._measured = measured(requests, self._meta)
        self.objectives = self._meta.get("objectives")
        self.recorded = self._figures(recorded_answers(self._measured), Change())
        self._group = group_facts(self._meta, tables[0])
        self.recorded_preemptions = sum(int(steps.preempted_ids.map(len).sum()) for steps in tables)
        self.spread: Spread = spread_of(run, run.meta(), self._material, requests, server)
        # Of a run that nothing disturbed the speed alone differs, and its outer quantiles say all
        self._most_replays = len(SPEEDS) if self.spread.disturbance.words() else OF_CALM_RUN
        self._known: dict[bytes, Prediction] = {}
        self._once: set[bytes] = set()  # those of them that were replayed once
        self._seconds = 0.0  # of one replay
        self._doubts: list[str] | None = None

    @property
    def model_error(self) -> float | None:
        """Relative error of the step model at sizes of steps left out of its fit; None where the run has too few sizes
        to tell."""
        error = self._material.times.error
        return error if math.isfinite(error) else None

    def step_errors(self, steps: pd.DataFrame) -> StepErrors:
        """What the step model of this run says of the steps of another one."""
        times = self._material.times
        columns = step_columns(steps, overlap=self._material.overlap)
        beyond = times.is_beyond(columns.tokens, columns.decodes)
        expected_ns, timed = times.expected_ns(columns), np.isfinite(columns.device_ns) & (columns.device_ns >= 0)

        def error(part: np.ndarray) -> float:
            if not (part := part & timed).any():
                return math.nan
            return float(columns.device_ns[part].sum() / expected_ns[part].sum() / times.mean_ratio - 1)

        return StepErrors(error(~beyond), error(beyond))

    def sentence(self) -> str:
        """On what the intervals rest."""
        spread = self.spread
        beside = f"{spread.repeats} repeats beside it" if spread.repeats else "no repeat of it lies beside it"
        beside = "; ".join([beside, *spread.disturbance.words()])
        known = self._material.known
        others = f"by {known.entries} other runs" if known is not None and known.tells_beyond else "a guess"
        return (
            f"{len(self._material.step_begins_ns):,} steps; {self._model_sentence()}; "
            f"runs differ by {100 * spread.speed:.1f}% in speed ({beside}); larger or smaller steps may be wrong by "
            f"{100 * spread.error_beyond:.0f}% more ({others}); an interval holds 8 of 10 outcomes"
        )

    def _model_sentence(self) -> str:
        if self._material.times.sizes < 2:
            return "they have one size, so that the time of other sizes cannot be predicted"
        if self.model_error is None:
            return "they have too few sizes to tell how wrong the step model is at others"
        return f"the step model is wrong by {100 * self.model_error:.1f}% at sizes of steps left out of its fit"

    def check(self, change: Change) -> None:
        """Raises ReplayError, with a sentence, for a change that cannot be replayed."""
        servers, plain = self._material.servers, change
        if is_carried(change, self._material.deployment):
            plain = without_hardware(change)
            if servers:
                raise ReplayError(
                    "a fleet cannot be carried to another device; replay the recording of one of its servers"
                )
        check(plain, is_closed=self._material.load.slots is not None, num_servers=len(servers) or 1)
        told(plain, self._group)
        changed = self._job(change)[1]
        for part in servers:
            changed_config(part.config, change, part.meta)
        check_drafts(self._config, changed, self._material.drafts)
        check_tiers(changed, self._material.tier_speeds)

    @property
    def material(self) -> Material:
        """What a replay of the run needs."""
        return self._material

    def changed_config(self, change: Change) -> EngineConfig:
        """The settings of a replay. Raises ReplayError."""
        return self._job(change)[1]

    def hardware_sentence(self, change: Change) -> str | None:
        """On what the time of another device rests; None of a change of settings alone. Raises ReplayError."""
        carried = self._replayer.carried(change)
        return None if carried is None else carried.sentence()

    def _job(self, change: Change) -> Job:
        """A change with all that the run tells of it, and its settings. Raises ReplayError."""
        carried = self._replayer.carried(change)
        if carried is None:
            return told(change, self._group), changed_config(self._config, change, self._meta)
        plain = without_hardware(change)
        if plain.settings.keys().isdisjoint(("num_kv_blocks", "kv_cache_gib")):
            plain = msgspec.structs.replace(plain, kv_scale=plain.kv_scale * carried.room)
        config = changed_config(self._config, plain, self._meta)
        longest = max(each.prompt_tokens + each.output_tokens for each in self._material.load.requests)
        carried.check(longest, config)
        return change, config

    def pool_tokens(self, change: Change) -> int:
        """Tokens that the KV pool of a replay holds. Raises ReplayError."""
        config = self._job(change)[1]
        return config.num_kv_blocks * config.block_size

    def predict(self, changes: Sequence[Change], *, quick: bool = False) -> list[Prediction]:
        """One prediction a change, in their order; `quick` replays each change once.

        A change that cannot be replayed (see `check`) has the figures of the unchanged run, and says so as a doubt.
        """
        if _key(Change()) not in self._known:
            self._predict_all([Change()], self._most_replays)
        refused: dict[int, str] = {}
        missing: dict[bytes, Change] = {}
        for place, change in enumerate(changes):
            key = _key(change)
            try:
                self.check(change)
            except ReplayError as error:
                refused[place] = str(error)
            else:
                if key not in self._known or (key in self._once and not quick):
                    missing[key] = change
        replays = 1 if quick else self._affordable(len(missing))
        self._predict_all(list(missing.values()), replays)
        self._once = self._once | missing.keys() if replays == 1 else self._once - missing.keys()
        return [
            self._unreplayed(change, refused[place]) if place in refused else self._known[_key(change)]
            for place, change in enumerate(changes)
        ]

    def predict_at(self, change: Change, steps: pd.DataFrame) -> Prediction | None:
        """Of the change, were the machine as fast at each moment as it was in another run, whose steps under load are
        given. Its bounds are those of the step model alone. None where the two have too few sizes of steps in common
        to tell. Raises ReplayError."""
        self.check(change)
        columns, times = step_columns(steps, overlap=self._material.overlap), self._material.times
        is_shared = ~times.is_beyond(columns.tokens, columns.decodes)
        if self._material.servers or is_shared.sum() < FEWEST_SHARED:
            return None
        self.predict([Change()])  # the doubts of all replays of the run
        used = columns.part(is_shared | _is_far(columns.begin_ns, columns.begin_ns[is_shared]))
        replayer = Replayer(replace(self._material, noise=Noise(used.begin_ns, times.ratios(used))))
        model = math.hypot(USUAL_SPEED_SPREAD, times.known_error)
        beyond = math.hypot(model, self.spread.error_beyond)
        accidents = [Accident(slowness=math.exp(z * model), slowness_beyond=math.exp(z * beyond)) for z in SPEEDS[:3]]
        replayed, config = self._job(change)
        return self._prediction(change, [replayer.replay(replayed, config, each) for each in accidents])

    def _predict_all(self, changes: Sequence[Change], replays: int) -> None:
        jobs = [self._job(each) for each in changes]
        if not jobs:
            return
        disturbed = [
            Accident(
                slowness=math.exp(z * self.spread.speed),
                slowness_beyond=math.exp(z * self.spread.beyond),
                seed=place or None,  # the first has the accidents of the run at their moments
            )
            for place, z in enumerate(SPEEDS[:replays])
        ]
        if replays > 1 and any(is_carried(each, self._material.deployment) for each in changes):
            disturbed[1:1] = [Accident(carried=-1), Accident(carried=1)]
        begin = time.monotonic()
        if self._limit is not None:
            outcomes = [self._replay_within(self._limit, job, disturbed) for job in jobs]
        else:
            outcomes = self._processes.replay(self._replayer, jobs, disturbed, self._seconds)
        if not self._seconds:
            self._seconds = (time.monotonic() - begin) / (len(jobs) * len(disturbed))
        for change, found in zip(changes, outcomes, strict=True):
            self._known[_key(change)] = self._prediction(change, found)

    def _replay_within(self, limit: TimeLimit, job: Job, accidents: Sequence[Accident]) -> list[Replayed]:
        """With the outer accidents, since the bounds rest on them, and with the others while most of the limit is left.

        Raises OutOfTime.
        """
        found: list[Replayed] = []
        for accident in accidents:
            if len(found) >= FOR_BOUNDS and limit.left() < FOR_CHANGES * limit.seconds:
                break
            found.append(self._replayer.replay(*job, accident))
        return found

    def _affordable(self, count: int) -> int:
        """Replays of each change: all; three, or one, where that would take long."""
        for replays in (self._most_replays, 3):
            if count * replays * self._seconds <= LONG_SECONDS:
                return replays
        return 1

    def _unreplayed(self, change: Change, why: str) -> Prediction:
        unchanged = self._known[_key(Change())]
        doubt = f"This change cannot be replayed, and the figures are those of the unchanged run: {why}."
        doubts = [doubt, *unchanged.doubts]
        return msgspec.structs.replace(unchanged, change=change, is_trusted=False, doubts=doubts, is_refused=True)

    def _prediction(self, change: Change, outcomes: Sequence[Replayed]) -> Prediction:
        found = [self._figures(each.answers, change) for each in outcomes]
        is_once = len(found) == 1
        if is_once:
            found += self._beyond_the_run(outcomes[0], change)
        if self._doubts is None:  # the first prediction is that of the unchanged run
            self._doubts = trust.of_run(self._material, self._measured)
            self._doubts += trust.of_unchanged(
                self.recorded, found[0], self.recorded_preemptions, outcomes[0].preemptions, self.objectives
            )
        doubts = self._doubts + trust.of_change(change, outcomes[0], self._material)
        if (carried := self._replayer.carried(change)) is not None:
            doubts = doubts + carried.doubts()
        named = {name: self._interval(name, found, is_once=is_once) for name in found[0]}
        said = Prediction(
            change=change,
            attainment=named["attainment"],
            goodput_rps=named["goodput_rps"],
            ttft_ms={label: named[f"ttft_ms:{label}"] for label in QUANTILES},
            tpot_ms={label: named[f"tpot_ms:{label}"] for label in QUANTILES},
            e2e_ms={label: named[f"e2e_ms:{label}"] for label in QUANTILES},
            attainment_by_class={
                name.partition(":")[2]: named[name] for name in named if name.startswith("attainment:")
            },
            output_tokens_per_s=found[0]["output_tokens_per_s"],
            preemptions=outcomes[0].preemptions,
            is_trusted=not doubts,
            doubts=doubts,
        )
        if not said.is_open:
            return said
        doubts = [trust.of_open(said, self.spread.disturbance), *doubts]
        return msgspec.structs.replace(said, is_trusted=False, doubts=doubts)

    def _figures(self, answers: Answers, change: Change) -> Figures:
        objectives = change.objectives if change.objectives is not None else self.objectives
        changed = {name.removeprefix("objective_"): value for name, value in change.settings.items()
                   if name in OBJECTIVE_SETTINGS}  # fmt: skip
        if changed:  # for all classes, also those with a bound of their own
            others = [{name: value for name, value in each.items() if name not in changed} for each in objectives or ()]
            objectives = [*others, {"klass": EVERY_CLASS, **changed}]
        window = self._material.load.declared_window_s
        return figures(answers, objectives, window / change.arrival_rate if window else None)

    def _beyond_the_run(self, replayed: Replayed, change: Change) -> list[Figures]:
        """What a change that was replayed once may be because of steps larger or smaller than those of the run. Its
        latencies are as much shorter or longer as the device's time may be; a queue would stretch them more."""
        error = NORMAL_80 * self.spread.error_beyond * replayed.extrapolated
        factors = [math.exp(-error), math.exp(error)] if error else []
        if (carried := self._replayer.carried(change)) is not None and carried.error is not None:
            factors += [carried.error.low, carried.error.high]
        return [self._figures(replayed.answers.stretched(factor), change) for factor in factors]

    def _as_unchanged(self, name: str, median: float) -> tuple[float, float]:
        """Bounds as wide as those of the unchanged run, a share by points."""
        unchanged = self._known.get(_key(Change()))
        interval = interval_named(unchanged, name) if unchanged is not None else None
        if interval is None:
            return median, median
        low, usual, high = (math.nan if bound is None else bound for bound in msgspec.structs.astuple(interval))
        if math.isnan(usual):
            return median, median
        if name.startswith("attainment"):
            return max(0.0, median - (usual - low)), min(1.0, median + (high - usual))
        scale = median / usual if usual else 1.0
        return low * scale, high * scale

    def _interval(self, name: str, found: Sequence[Figures], *, is_once: bool) -> Interval:
        values = [figure.get(name, math.nan) for figure in found]
        known = [value for value in values if not math.isnan(value)]
        if not known:
            return Interval(math.nan, math.nan, math.nan)
        median = values[0] if not math.isnan(values[0]) else float(np.median(known))
        low, high = min(known), max(known)
        is_share = name.startswith("attainment")
        if is_once:
            usual_low, usual_high = self._as_unchanged(name, median)
            if is_share:
                low = median - math.hypot(median - low, median - usual_low)
                high = median + math.hypot(high - median, usual_high - median)
            else:  # by factors: two errors together leave a latency above nought
                low, high = (both_errors(median, *each) for each in ((low, usual_low), (high, usual_high)))
        own = NORMAL_80 * self.spread.of_metric(name)  # of a share in points, of others of the logarithm
        if is_share:
            return Interval(max(0.0, min(low, median - own)), median, min(1.0, max(high, median + own)))
        return Interval(min(low, median * math.exp(-own)), median, max(high, median * math.exp(own)))


def _is_far(begins_ns: np.ndarray, known_ns: np.ndarray) -> np.ndarray:
    """[steps] whether no known moment is near: there only larger or smaller steps tell how fast the machine was."""
    after = np.minimum(np.searchsorted(known_ns, begins_ns), len(known_ns) - 1)
    before = np.maximum(after - 1, 0)
    return np.minimum(np.abs(known_ns[after] - begins_ns), np.abs(known_ns[before] - begins_ns)) > FAR_NS


def predictor_of(
    run: RunDirectory, *, processes: int = 1, most_steps: int = MOST_STEPS, limit: TimeLimit | None = None
) -> ReplayPredictor:
    """The predictor of a run, also of a fleet. Raises ReplayError, with a sentence, where it cannot be replayed at all.

    A run of more than `most_steps` is refused: a step takes about 50 µs of each replay.
    """
    try:
        return ReplayPredictor(run, processes=processes, most_steps=most_steps, limit=limit)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ReplayError(
            f"{run.name} has records that a replay cannot read ({type(error).__name__}: {error})"
        ) from error


def _key(change: Change) -> bytes:
    try:
        return msgspec.json.encode(change, order="deterministic")
    except (TypeError, ValueError) as error:
        raise ReplayError(f"a change has a value that is not a setting: {error}") from None
