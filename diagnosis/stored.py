"""The diagnosis that lies with a run: `diagnosis.json`. One that rests on more is not replaced by one that rests on
less, whoever makes it."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sojourn.diagnosis.verdict import Diagnosis
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.version import own_version

FILE = "diagnosis.json"


class Kept(NamedTuple):
    """What lies with a run after a diagnosis was made."""

    diagnosis: Diagnosis  # to show: the better one, as far as it can be read
    is_new: bool  # it was written just now, and differs from what lay there
    note: str  # why the other one stays, or ""


class _Head(msgspec.Struct):
    made_by: str = ""


def keep_better(run: RunDirectory, made: Diagnosis) -> Kept:
    """Writes a diagnosis of the run by its own objectives, unless a better one lies there. Raises OSError.

    A diagnosis of fewer requests than were recorded since is no better one.
    """
    made = msgspec.structs.replace(made, made_by=own_version())
    file = run.current_diagnosis()
    head, stored = _read(file) if file is not None else (_Head(), None)
    if _numbers(head.made_by) > _numbers(made.made_by):
        return Kept(stored or made, False, _note(run, f"a newer Sojourn made it ({head.made_by})"))
    if stored is not None and (more := more_of(stored, made)):
        return Kept(stored, False, _note(run, more))
    if stored is not None and _plain(stored) == _plain(made):
        return Kept(made, False, "")
    run.set_report_aside()
    run.write_json(FILE, msgspec.to_builtins(made))
    return Kept(made, True, "")


def more_of(stored: Diagnosis, made: Diagnosis) -> str:
    """What `stored` rests on and `made` does not, or "". Both are of one run."""
    if stored.against is not None:  # an older version wrote what a comparison said
        return ""
    for name, before, now in (
        ("requests", stored.goodput[0].sent, made.goodput[0].sent),
        ("requests with server records", stored.closure.joined, made.closure.joined),
    ):
        if before > now:
            return f"it rests on {before:,} {name}, and the records here have {now:,}"
    if stored.predicted is not None and made.predicted is None:
        return f"it has replays, and none could be made now{f': {made.replay_refused}' if made.replay_refused else ''}"
    if stored.made_by != made.made_by:
        return ""
    predicted, now = (sum(each.prediction is not None for each in one.findings) for one in (stored, made))
    if predicted > now:
        return f"it predicts {predicted} fixes, and now {now} could be predicted"
    if len(made.left_out) > len(stored.left_out):
        return f"it was made with more time: {made.left_out[0]}"
    known, now = (sum(check.status != "unknown" for check in one.checks) for one in (stored, made))
    return f"it decides {known} symptoms, and the records here {now}" if known > now else ""


def _note(run: RunDirectory, why: str) -> str:
    return f"{run.path / FILE} stays, for {why.rstrip('.')}; remove that file to replace it"


def _read(file: Path) -> tuple[_Head, Diagnosis | None]:
    """Who made it, and the diagnosis; None where it is damaged or of another version."""
    content, head = file.read_bytes(), _Head()
    try:
        head = msgspec.json.decode(content, type=_Head)
        return head, msgspec.json.decode(content, type=Diagnosis)
    except msgspec.MsgspecError:
        return head, None


def _plain(diagnosis: Diagnosis) -> Any:
    """As it is written: a whole float may have been read as an integer."""
    return msgspec.json.decode(msgspec.json.encode(diagnosis))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
