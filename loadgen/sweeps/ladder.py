"""`sojourn dev ladder`: the techniques of a serving engine one by one, each as one setting, measured interleaved."""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from sojourn.loadgen.run.experiment import OnProgress, run_scenario
from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.loadgen.sweeps.run_point import engine_build
from sojourn.metrics.compare.ladder import FILE_NAME, Ladder, Rung, RungRun, read_ladder, rung_run
from sojourn.metrics.compare.settings import differences
from sojourn.metrics.errors import ExperimentError, InputError
from sojourn.metrics.machine.host import hardware, versions
from sojourn.metrics.whole_file import write_whole

DECODE, PREFILL, OTHERS = "compute.decode", "compute.prefill", "request.interference"
WITHOUT_PAGES = 1024  # tokens of a block, the largest that the engine has: a request's whole room as one piece

OnRun = Callable[[int, int, str], None]  # number of the run, from 1; of how many; its rung


def rungs(device: str) -> list[Rung]:
    """All rungs of a device, `cpu` or `cuda`, from the lowest up. Only the names of settings are known here: the engine
    refuses a value that it lacks.

    `published` are the multipliers of the article that this project follows, in its order.
    """
    on_gpu = device == "cuda"
    weights, dense = ("fp8", "auto") if on_gpu else ("int8", "float32")
    hidden = {"overlap": "on", "graphs": "on"} if on_gpu else {"overlap": "on"}
    return [
        Rung(name="static batching", on={"policy": "static"}, meaning="A batch is filled and ends as a whole."),
        Rung(
            name="continuous batching", on={"policy": "fcfs"}, off={"policy": "static"}, published=2.5,
            meaning="A request joins the batch as soon as another one ends.",
        ),
        Rung(
            name="paged KV cache", on={"block_size": 16}, off={"block_size": WITHOUT_PAGES}, published=1.7,
            meaning="A request holds blocks of 16 tokens in place of room for its longest length.",
        ),
        Rung(
            name="flash-style attention", on={"attention_backend": "auto"}, off={"attention_backend": "torch"},
            published=1.3, works_on=(DECODE, PREFILL, OTHERS),
            meaning="One kernel reads KV by blocks and never writes the scores to memory.",
        ),
        Rung(
            name="quantised weights", on={"weights": weights}, off={"weights": dense}, published=1.8,
            works_on=(DECODE, PREFILL, OTHERS), meaning=f"Matrices are {weights} in place of {dense}.",
        ),
        Rung(
            name="fused kernels", on={"fused_operations": "auto"}, off={"fused_operations": "off"}, published=1.3,
            works_on=(DECODE, PREFILL, OTHERS), meaning="Norms, rotation, cache writes and gates are fused kernels.",
        ),
        Rung(
            name="CUDA graphs and overlap" if on_gpu else "overlap", on=hidden, off=dict.fromkeys(hidden, "off"),
            published=1.3, works_on=("compute.host",),
            meaning="The host plans a step while the device computes the one before."
            + ("" if on_gpu else " A CPU has no CUDA graphs."),
        ),
        Rung(
            name="prefix cache", on={"prefix_caching": True}, off={"prefix_caching": False},
            works_on=(PREFILL, OTHERS), meaning="A prompt that begins like an earlier one reuses its KV.",
        ),
        Rung(
            name="speculation", on={"speculation": "ngram"}, off={"speculation": "none"}, works_on=(DECODE,),
            meaning="Tokens that the text suggests are verified several in one step.",
        ),
    ]  # fmt: skip


def settings_of(every: Sequence[Rung], rung: Rung) -> dict[str, Any]:
    """The engine settings of a rung: its own and those below switched on, those above off."""
    place = every.index(rung)
    chosen: dict[str, Any] = {}
    for position, each in enumerate(every):
        chosen |= each.on if position <= place else {k: v for k, v in each.off.items() if k not in chosen}
    return chosen


@dataclass(frozen=True, slots=True)
class LadderPlan:
    """Every rung once, then all again, so that a drift of the machine does not look like an effect of a rung."""

    scenario: Scenario
    every: list[Rung]  # of the device: what is not measured is on below a rung and off above it
    rungs: list[Rung]  # that are measured
    repeats: int
    seed: int
    device: str
    command: str = ""
    overrides: dict[str, Any] = field(default_factory=dict)  # of the engine, for every rung

    def settings(self, rung: Rung) -> dict[str, Any]:
        return self.overrides | settings_of(self.every, rung)

    def document(self) -> dict[str, Any]:
        return msgspec.to_builtins({
            "scenario": self.scenario.model_dump(mode="json"), "seed": self.seed, "overrides": self.overrides,
            "rungs": {rung.name: self.settings(rung) for rung in self.rungs}, "device": self.device,
            "engine_build": engine_build(),
        })  # fmt: skip


def chosen_rungs(every: list[Rung], names: str | None) -> list[Rung]:
    """The rungs that are named, with commas between them, in their order. Raises InputError for an unknown one, or
    where fewer than two are left."""
    if names is None:
        return every
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [rung.name for rung in every]
    for name in wanted:
        if name not in known:
            raise InputError(f"--rungs has {name!r}; the rungs are: {', '.join(known)}")
    if len(set(wanted)) < 2:
        raise InputError("--rungs needs two rungs at least: each is compared with the one below")
    return [rung for rung in every if rung.name in wanted]


def run_ladder(
    plan: LadderPlan, folder: Path, *, on_run: OnRun, progress: OnProgress, on_note: Callable[[str], None]
) -> Ladder:
    """Measures the missing runs of the ladder in `folder`; an interrupted one keeps every finished run.

    Raises ExperimentError where the folder holds another ladder, or where a server does not start.
    """
    ladder = _document(plan, folder)
    done = {(each.rung, each.repeat) for each in ladder.runs}
    if done:
        on_note(f"{len(done)} runs kept; remove {folder} to measure again")
    wanted = [(rung, repeat) for repeat in range(1, plan.repeats + 1) for rung in plan.rungs]
    for number, (rung, repeat) in enumerate(wanted, 1):
        if (rung.name, repeat) in done:
            continue
        on_run(number, len(wanted), rung.name)
        path = folder / f"{rung.name.replace(' ', '-')}-{repeat}"
        if path.exists():  # cut short
            shutil.rmtree(path)
        run = run_scenario(
            plan.scenario, path, engine_overrides=plan.settings(rung), seed=plan.seed, progress=progress,
            with_reference=False,
        )  # fmt: skip
        found = rung_run(run, rung.name, repeat)
        for note in _notes(found):
            on_note(note)
        ladder.runs.append(found)
        _write(ladder, folder)
    return ladder


def _document(plan: LadderPlan, folder: Path) -> Ladder:
    if (folder / FILE_NAME).exists():
        ladder = read_ladder(folder)
        if different := differences(ladder.plan, plan.document()):
            raise ExperimentError(
                f"{folder} holds another ladder: {'; '.join(different)}; choose another folder, or remove it first"
            )
        return ladder
    if folder.is_dir() and any(folder.iterdir()):
        raise ExperimentError(f"{folder} is not empty and holds no ladder; choose another folder, or remove it first")
    now = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds")
    ladder = Ladder(plan=plan.document(), rungs=plan.rungs, command=plan.command, date=now, hardware=hardware(),
                    versions=versions(), device=plan.device)  # fmt: skip
    _write(ladder, folder)
    return ladder


def _write(ladder: Ladder, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / FILE_NAME, msgspec.json.format(msgspec.json.encode(ladder), indent=2) + b"\n")
    except OSError as error:
        raise ExperimentError(f"{folder} cannot be written: {error.strerror}; choose another with --dir") from None


def _notes(run: RungRun) -> list[str]:
    failed = run.sent - run.completed
    notes = [f"{run.rung}: {failed:,} of {run.sent:,} requests were not served"] if failed else []
    return notes + [f"{run.rung}: run {run.run} is not valid: {reason}" for reason in run.reasons if not run.valid]
