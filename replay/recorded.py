"""The requests of a run as a replay sends them: when, how long, with which tokens, and what surrounded the core."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from sojourn.metrics.errors import ReplayError
from sojourn.metrics.request.goodput import after_warmup
from sojourn.metrics.results.load import declared_window_s, is_closed
from sojourn.metrics.run.directory import RunDirectory, section
from sojourn.replay.token_tree import give_token_ids

SESSION_BEGIN = -1  # instead of a place: when the first request of the session is due
SCHEDULE_FILE = "schedule.parquet"  # what was to be sent: lengths and patience of those that the server never served
# Accounts of the way from the due moment to the core, and of the way from the core to the client.
WAY_ACCOUNTS = (
    "client.lag", "client.network", "request.routing", "token.encode", "request.quota", "request.cold_start",
    "request.moderation", "request.admission", "token.decode", "request.stream",
)  # fmt: skip


@dataclass(slots=True)
class RecordedRequest:
    """One request. Times are nanoseconds; moments are relative to the first due moment of the schedule."""

    id: str
    klass: str
    tenant: str
    priority: int
    due_ns: int
    prompt_tokens: int
    output_tokens: int
    way_in: dict[str, float]  # account → ns before the core; their sum is the whole way
    first_out: dict[str, float]  # the first token committed → read by the client
    last_out: dict[str, float]  # the last token committed → last byte read
    last_text_ns: float  # the last token committed → the last read with text
    first_read_tokens: float
    patience_ns: int | None
    patience_for: str
    is_measured: bool
    is_prelude: bool
    position: int = 0  # in the schedule
    session: str = ""  # of its conversation; its own id where it has none
    follows: int | None = None  # the turn before it in its conversation
    waits_for: tuple[int, ...] = ()  # places of the requests that end before it is due; SESSION_BEGIN among them
    place: int = -1  # among all requests of the load
    head: int = -1  # place of the request that begins its session; below 0 it is its own
    pause_ns: int = 0  # from the last of those ends, or of its slot's last request, to its due moment
    tpot_is_measured: bool = True
    weight: int = 1  # of its tenant
    adapter: str | None = None  # the LoRA adapter that it named
    choices: int = 1  # sequences of one prompt, which share its blocks; `output_tokens` is of all
    token_ids: list[int] = field(default_factory=list)  # prompt and output
    shared_tokens: int = 0  # at their beginning, with an earlier request
    foreign_tokens: int = 0  # those of them that stand in front of what only its own session has

    @property
    def tokens_of_choice(self) -> int:
        """Output tokens of each sequence."""
        return max(1, round(self.output_tokens / self.choices))


@dataclass(slots=True)
class RecordedLoad:
    """All requests of a run in order of their index, and how they were sent."""

    requests: list[RecordedRequest]
    origin_ns: int  # the moment 0, on the clock of the run
    slots: int | None  # of a closed loop
    until_ns: int | None  # of a closed loop: nothing is due from then on
    may_repeat: bool  # a closed loop without a count: a faster server is sent more than was recorded
    timeout_ns: int | None
    declared_window_s: float | None
    doubts: list[str]


def recorded_load(run: RunDirectory, frame: pd.DataFrame, meta: Mapping[str, Any]) -> RecordedLoad:
    """From `RunDirectory.requests()`. Raises ReplayError where nothing of it can be replayed."""
    schedule = _schedule(run)
    frame = _with_schedule(frame, schedule)
    lengths = frame.server_prompt_tokens.fillna(frame.prompt_tokens).fillna(frame.scheduled_prompt)
    outputs = _outputs(frame)
    known = (lengths.notna() & outputs.notna()).to_numpy()
    if not known.any():
        raise ReplayError(f"{run.name} has no request whose prompt and output lengths are known; replay needs them")
    frame = frame[known].reset_index(drop=True)
    origin = int(frame.due_ns[~frame.prelude].min() if (~frame.prelude).any() else frame.due_ns.min())
    requests = _requests(frame, lengths[known].astype(int), outputs[known].astype(int), origin, meta)
    doubts = []
    if (missing := int((~known).sum())) > 0.02 * len(known):
        doubts.append(f"{missing} of {len(known)} requests have no recorded lengths, and the replay leaves them out.")
    if (unended := int(((frame.status != "ok") & frame.scheduled_output.isna()).sum())) > 0.02 * len(frame):
        doubts.append(f"{unended} of {len(frame)} requests did not end: their answers are taken to be of usual length.")
    slots = _follow(requests, frame, meta)
    give_token_ids(frame, requests)
    scenario = section(meta, "scenario")
    arrivals, target = section(scenario, "arrivals"), section(scenario, "target")
    duration, timeout = arrivals.get("duration_s"), target.get("timeout_s")
    closed = slots is not None
    return RecordedLoad(
        requests=requests,
        origin_ns=origin,
        slots=slots,
        until_ns=round(duration * 1e9) if closed and duration else None,
        may_repeat=closed and arrivals.get("count") is None,
        timeout_ns=round(timeout * 1e9) if timeout else None,
        declared_window_s=declared_window_s(dict(meta)),
        doubts=doubts,
    )


def _schedule(run: RunDirectory) -> pd.DataFrame | None:
    file = run.path / SCHEDULE_FILE
    if not file.exists():
        return None
    try:
        return pq.read_table(file).to_pandas()
    except (pa.ArrowException, OSError):
        return None  # the records tell the rest


def _with_schedule(frame: pd.DataFrame, schedule: pd.DataFrame | None) -> pd.DataFrame:
    """Adds what only the schedule knows, null where there is none: `scheduled_prompt`, `scheduled_output`,
    `patience_ns`, `patience_for`, `priority`, `pause_ns`, `prelude`, `shared_prefix`, `position`, `after`."""
    wanted = {
        "prompt_tokens": "scheduled_prompt", "max_tokens": "scheduled_output", "patience_ns": "patience_ns",
        "patience_for": "patience_for", "priority": "priority", "pause_ns": "pause_ns", "prelude": "prelude",
        "shared_prefix": "shared_prefix", "shared_prefix_tokens": "shared_prefix_tokens", "index": "position",
        "after": "after",
    }  # fmt: skip
    if schedule is None:
        schedule = pd.DataFrame({"request_id": pd.Series(dtype="object")})
    present = {old: new for old, new in wanted.items() if old in schedule}
    rows = schedule[["request_id", *present]].rename(columns=present).drop_duplicates("request_id")
    joined = frame.merge(rows, on="request_id", how="left")
    for name in wanted.values():
        if name not in joined:
            joined[name] = np.nan
    joined["prelude"] = joined.prelude.map(lambda flag: flag is True)
    return joined


def _outputs(frame: pd.DataFrame) -> pd.Series:
    """Tokens that each request asks the core for: what was made, unless it ended early against the schedule."""
    made = frame.server_output_tokens.fillna(frame.output_tokens)
    complete = (frame.status == "ok") & (made > 0)
    usual = made[complete].groupby(frame.klass[complete]).median()
    asked = frame.scheduled_output.where(frame.scheduled_output > 0).fillna(frame.klass.map(usual))
    return made.where(complete, asked.fillna(made.where(made > 0))).clip(lower=1)


def _requests(
    frame: pd.DataFrame, lengths: pd.Series, outputs: pd.Series, origin: int, meta: Mapping[str, Any]
) -> list[RecordedRequest]:
    way_in, first_out, last_out, last_text = _ways(frame)
    measure = section(section(meta, "scenario"), "measure")
    due = frame.due_ns.to_numpy(dtype="int64")
    counts = after_warmup(due, measure.get("warmup_s") or 0, int(measure.get("warmup_requests") or 0))
    first_reads = _first_reads(frame)
    served = (frame.status == "ok").to_numpy()
    unmeasured = served & frame.tpot_ms.isna().to_numpy() & (outputs.to_numpy() > 1)
    patience = [_whole(value) for value in frame.patience_ns]
    left = _left_after(frame)
    return [
        RecordedRequest(
            id=str(row.request_id),
            klass=row.klass or "",
            tenant=row.tenant or "",
            priority=_whole(row.priority) or 0,
            adapter=row.adapter if isinstance(row.adapter, str) else None,
            due_ns=int(due[i]) - origin,
            prompt_tokens=int(lengths.iloc[i]),
            output_tokens=int(outputs.iloc[i]),
            way_in=way_in[i],
            first_out=first_out[i],
            last_out=last_out[i],
            last_text_ns=last_text[i],
            first_read_tokens=float(first_reads[i]),
            patience_ns=patience[i] if patience[i] is not None else left[i],
            patience_for=_patience_for(row) if patience[i] is not None else _left_for(row),
            is_measured=bool(counts[i]),
            is_prelude=bool(row.prelude),
            position=i if pd.isna(row.position) else int(row.position),
            session=row.session_id if isinstance(row.session_id, str) and row.session_id else str(row.request_id),
            pause_ns=_whole(row.pause_ns) or 0,
            tpot_is_measured=not unmeasured[i],
            choices=_choices(row.longest_output_tokens, row.server_output_tokens),
        )
        for i, row in enumerate(frame.itertuples(index=False))
    ]


def _ways(frame: pd.DataFrame) -> tuple[list[dict[str, float]], list[dict[str, float]], list[dict[str, float]], list]:
    """Each request's ways in and out by account, ns; those of a typical request where it has none."""
    numbers = {name: frame[name].astype("float64").to_numpy(na_value=np.nan) for name in _STAMPS}
    first_ns, last_ns = (_token_ns(frame.token_ns, place) for place in (0, -1))
    last_chunk = _token_ns(frame.chunk_ns, -1)
    encode = np.nan_to_num(numbers["ledger_token_encode_ns"])
    quota = np.nan_to_num(numbers["ledger_request_quota_ns"])
    cold = np.nan_to_num(numbers["ledger_request_cold_start_ns"])
    moderation = np.nan_to_num(numbers["ttft_request_moderation_ns"])
    front_in = numbers["encoded_ns"] - numbers["arrived_ns"]
    front_in = np.where(np.isnan(front_in), encode + quota + cold + moderation, front_in)
    rest = np.maximum(front_in - encode - quota - cold, 0.0)
    handover = numbers["queued_ns"] - numbers["encoded_ns"]
    routing = np.nan_to_num(numbers["ledger_request_routing_ns"])
    known = handover[~np.isnan(handover)]
    usual_handover = float(np.quantile(known, 0.05)) if len(known) else 0.0
    into = {
        "client.lag": numbers["sent_ns"] - numbers["due_ns"],
        "client.network": numbers["arrived_ns"] - numbers["sent_ns"] - routing,
        "request.routing": routing,
        "token.encode": encode,
        "request.quota": quota,
        "request.cold_start": cold,
        "request.moderation": np.minimum(moderation, rest),
        "request.admission": rest - np.minimum(moderation, rest) + usual_handover,
    }
    ways_in = _rows(into)
    outs = []
    for written, read, made, ledger in (
        ("first_written_ns", "first_token_ns", first_ns, "ttft"), ("written_ns", "last_byte_ns", last_ns, "ledger"),
    ):  # fmt: skip
        front = numbers[written] - made
        decode = np.clip(numbers[f"{ledger}_token_decode_ns"], 0.0, np.maximum(front, 0.0))
        outs.append(
            _rows(
                {
                    "token.decode": decode,
                    "request.stream": front - decode,
                    "client.network": numbers[read] - numbers[written],
                }
            )
        )
    text = last_chunk - last_ns
    return ways_in, outs[0], outs[1], np.where(np.isnan(text), np.nanmedian([*text, 0.0]), text).tolist()


_STAMPS = (
    "due_ns", "sent_ns", "arrived_ns", "encoded_ns", "queued_ns", "first_written_ns", "written_ns", "first_token_ns",
    "last_byte_ns", "ledger_token_encode_ns", "ledger_request_quota_ns", "ledger_request_cold_start_ns",
    "ledger_request_routing_ns", "ttft_request_moderation_ns", "ttft_token_decode_ns", "ledger_token_decode_ns",
)  # fmt: skip


def _rows(columns: Mapping[str, np.ndarray]) -> list[dict[str, float]]:
    """A dictionary a request; a request without all of them gets the medians of the others."""
    whole = ~np.any([np.isnan(values) for values in columns.values()], axis=0)
    usual = {name: float(np.median(values[whole])) if whole.any() else 0.0 for name, values in columns.items()}
    lists = {name: np.where(whole, values, usual[name]).tolist() for name, values in columns.items()}
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


def _token_ns(stamps: pd.Series, place: int) -> np.ndarray:
    return np.array([float(s[place]) if _has_any(s) else np.nan for s in stamps])


def _choices(longest: Any, made: Any) -> int:
    """Sequences of a call, from the tokens of the longest and of all; they end about alike, at `max_tokens`."""
    return 1 if pd.isna(longest) or pd.isna(made) or not 0 < longest < made else max(1, round(made / longest))


def _has_any(stamps: Any) -> bool:
    """A list with something in it; where the server has no record of a request, its lists are NaN."""
    return hasattr(stamps, "__len__") and len(stamps) > 0


def _first_reads(frame: pd.DataFrame) -> np.ndarray:
    """Tokens in the first read with text, as `RunDirectory.requests` counts them; 1 where that is not known."""
    found = np.ones(len(frame))
    for place, (stamps, counts) in enumerate(zip(frame.chunk_ns, frame.chunk_tokens, strict=True)):
        if _has_any(counts) and _has_any(stamps) and len(counts) == len(stamps):
            found[place] = sum(c for ns, c in zip(stamps, counts, strict=True) if ns == stamps[0])
    return found


def _patience_for(row: Any) -> str:
    return row.patience_for if isinstance(row.patience_for, str) else "answer"


def _left_for(row: Any) -> str:
    """What a client that left waited for: who had no token yet would have stayed for it."""
    return "first_token" if pd.isna(row.first_token_ns) else "answer"


def _left_after(frame: pd.DataFrame) -> list[int | None]:
    """How long after its due moment a client left that gave no patience beforehand; None where it stayed."""
    found: list[int | None] = []
    for row in frame.itertuples(index=False):
        if row.status != "cancelled":
            found.append(None)
            continue
        end = row.last_byte_ns if not pd.isna(row.last_byte_ns) else row.finished_ns
        found.append(None if pd.isna(end) else max(0, int(end) - int(row.due_ns)))
    return found


def _follow(requests: list[RecordedRequest], frame: pd.DataFrame, meta: Mapping[str, Any]) -> int | None:
    """Sets what each request follows, and its pause. Returns the slots of a closed loop."""
    ends = [_whole(value) for value in frame.last_byte_ns]
    due = frame.due_ns.tolist()
    last: dict[str, int] = {}
    place_of = {request.position: place for place, request in enumerate(requests)}
    for index, row in enumerate(frame.itertuples(index=False)):
        session, request = row.session_id or "", requests[index]
        request.place = request.head = index
        if session and row.turn and session in last:
            request.follows = last[session]
        if session:
            last[session] = index
        named = [int(each) for each in row.after] if isinstance(row.after, list | np.ndarray) else []
        request.waits_for = tuple(place_of.get(each, SESSION_BEGIN) for each in named)
        if not named and request.follows is not None:
            request.waits_for = (request.follows,)
        if request.waits_for:
            _wait(requests, index, due, ends)
    if not is_closed(dict(meta)):
        return None
    arrivals = section(section(meta, "scenario"), "arrivals")
    slots = arrivals.get("users") or arrivals.get("in_flight")
    return int(slots) if slots else None


def _wait(requests: list[RecordedRequest], index: int, due: list[int], ends: list[int | None]) -> None:
    """Sets the session of a request that waits for others, and its pause after the last of their ends."""
    request = requests[index]
    earlier = [place for place in request.waits_for if place != SESSION_BEGIN]
    # A session is a part of the schedule without a gap: who waits for its begin alone stands behind another one.
    request.head = requests[earlier[0] if earlier else index - 1].head
    moments = [ends[place] for place in earlier]
    if moments and None not in moments:
        request.pause_ns = max(0, due[index] - max(moments))


def _whole(value: Any) -> int | None:
    return None if value is None or pd.isna(value) else int(value)
