"""The documents that scripts and agents read: one versioned schema each.

A document names its schema in its first field: `sojourn.NAME/VERSION`. Within a version fields are only added. A field
that is removed, or that means something else, raises the version.
"""

from typing import Any, Literal

import msgspec

from sojourn.diagnosis.explanation import Explanation
from sojourn.diagnosis.verdict import Diagnosis
from sojourn.live.kv_lens.document import KvLens
from sojourn.live.watch.document import Watch
from sojourn.metrics.compare.verdict import Comparison
from sojourn.metrics.prediction import Prediction
from sojourn.metrics.run.listing import ListedRun
from sojourn.triage.document import Triage

Scalar = str | int | float | bool | None


class RunToRun(msgspec.Struct, frozen=True, kw_only=True):
    """How much runs of the same system differ, which is in the intervals of a replay."""

    speed: float  # standard deviation of the speed of the machine, relative
    repeats: int  # runs beside this one that it was measured on; 0: from this run alone


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """What a recorded run would have been with something changed. Latencies are in milliseconds."""

    schema: str = "sojourn.replay/1"
    run: str
    recorded: dict[str, float | None]  # latency:quantile → ms; goodput_rps; attainment; preemptions
    step_model_error: float | None  # relative, at sizes left out of the fit; None: too few sizes
    larger_steps_error: float | None  # relative, for sizes beyond those of the run
    run_to_run: RunToRun
    rests_on: str  # a sentence: what the intervals rest on
    unchanged: Prediction  # the check: the run replayed as it was
    predictions: list[Prediction]  # one for each change


class RunList(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of a folder, newest first."""

    schema: str = "sojourn.runs/1"
    runs: list[ListedRun]


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a run, or of one class of it, went: sums over requests in ns. Closed by `unaccounted`."""

    schema: str = "sojourn.ledger/1"
    run: str
    klass: str | None  # null: all classes
    requests: int  # measured requests, without the warm-up
    seen: int  # of those, with a server's records; the others are not in the sums
    ledger_ns: dict[str, float]  # account → ns up to the last byte
    ttft_ledger_ns: dict[str, float]  # account → ns up to the first text
    unknown: list[str]  # sentences: what the records cannot show


class QueryResult(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of an SQL query over a run's tables."""

    schema: str = "sojourn.query/1"
    columns: list[str]
    rows: list[list[Any]]  # in the order of `columns`; times in nanoseconds where the column ends with _ns
    truncated: bool  # there were more rows


Name = Literal["diagnosis", "explanation", "replay", "comparison", "runs", "ledger", "query", "watch", "kv_lens"]
DOCUMENTS: dict[str, tuple[type[msgspec.Struct], str]] = {  # name → its type, and who writes it
    "diagnosis": (Diagnosis, "`sojourn diagnose RUN --json`, `diagnosis.json`, `run.diagnose()`, the tool `diagnose`"),
    "explanation": (Explanation, "`sojourn explain RUN REQUEST --json`, `run.explain(id)`, the tool `explain_request`"),
    "replay": (Replay, "`sojourn replay RUN --set … --json`, `run.replay(…)`, the tool `replay`"),
    "comparison": (Comparison, "`sojourn compare A B --json`, `a.compare(b)`, the tool `compare`"),
    "runs": (RunList, "`sojourn runs --json`, the tool `list_runs`"),
    "ledger": (Ledger, "the tool `ledger`"),
    "query": (QueryResult, "the tool `query`"),
    "kv_lens": (
        KvLens,
        "`sojourn kv-lens RUN --json`, `sojourn kv-lens ADDRESS --once --json`, `run.kv_lens()`, "
        "`sojourn.kv_lens(address)`, the tool `kv_lens`",
    ),
    "triage": (Triage, "`sojourn triage FILE --json`, `sojourn.triage_of(file)`, the tool `triage`"),
    "watch": (Watch, "`sojourn watch URL --once --json`, `sojourn.watch(url)`, the tool `watch_server`"),
}


def json_schema(name: Name) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a document."""
    return msgspec.json.schema(DOCUMENTS[name][0])


def plain(document: msgspec.Struct) -> dict[str, Any]:
    """The document as JSON has it: null for what is no number."""
    return msgspec.json.decode(msgspec.json.encode(document))
