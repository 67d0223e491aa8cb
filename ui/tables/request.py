"""Records shaped for showing: pure functions from the tables of a run to small tables, in milliseconds and seconds."""

import numpy as np
import pandas as pd

from sojourn.metrics import cells
from sojourn.metrics.catalog.memory import BLOCK_STATES
from sojourn.metrics.ledger import ACCOUNTS, UNACCOUNTED
from sojourn.metrics.records import KINDS, REFUSALS, STAGES
from sojourn.metrics.request.goodput import total_tokens
from sojourn.ui.text import missing, number, percent

SLOWEST_SHARE = 0.1
# What a client alone can tell of a request when no server recorded it.
CLIENT_SPANS = ("client.lag", "until the first token", "after the first token")


def accounts_ms(requests: pd.DataFrame, prefix: str = "ledger") -> pd.DataFrame:
    """Milliseconds by account, one row per request with a whole ledger; `prefix` is `ledger` or `ttft`."""
    left_over = "unaccounted_ns" if prefix == "ledger" else "ttft_unaccounted_ns"
    columns = {f"{prefix}_{info.column}": info.name for info in ACCOUNTS} | {left_over: UNACCOUNTED}
    whole = requests[requests[left_over].notna()]
    return whole[list(columns)].rename(columns=columns) / 1e6


def client_spans_ms(requests: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds by CLIENT_SPANS, one row per request that was read to its end."""
    done = requests[requests.last_byte_ns.notna() & requests.sent_ns.notna()]
    first = done.first_token_ns.fillna(done.last_byte_ns)
    spans = (done.sent_ns - done.due_ns, first - done.sent_ns, done.last_byte_ns - first)
    return pd.DataFrame(dict(zip(CLIENT_SPANS, spans, strict=True)), index=done.index) / 1e6


def classes(requests: pd.DataFrame) -> list[str]:
    """Names of the classes in order of their size."""
    return [str(name) for name in requests.klass.fillna("").value_counts().index]


def cohorts(requests: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """All requests, each class where there are several, and the slowest tenth: name → rows."""
    groups = {"all requests": requests}
    names = classes(requests)
    if len(names) > 1:
        groups |= {name or "(no class)": requests[requests.klass.fillna("") == name] for name in names}
    done = requests[requests.e2e_ms.notna()]
    if len(done) >= 10:
        groups["slowest 10%"] = done.nlargest(max(1, round(SLOWEST_SHARE * len(done))), "e2e_ms")
    return groups


def account_shares(requests: pd.DataFrame, prefix: str = "ledger") -> pd.DataFrame:
    """Share of a cohort's time by account: index cohort, columns accounts, then `requests` and `mean_ms`."""
    rows = {}
    for cohort, members in cohorts(requests).items():
        booked = accounts_ms(members, prefix)
        if len(booked) and booked.to_numpy().sum() > 0:
            rows[cohort] = (booked.sum() / booked.to_numpy().sum()).to_dict() | {
                "requests": len(booked), "mean_ms": booked.sum(axis=1).mean()
            }  # fmt: skip
    return pd.DataFrame.from_dict(rows, orient="index")


def chosen(requests: pd.DataFrame, order: str, count: int) -> pd.DataFrame:
    """The `count` first requests in an order: `e2e_ms`, `ttft_ms`, `tpot_ms` (slowest first) or `due_ns` (as sent)."""
    done = requests[requests[order].notna()]
    return done.sort_values(order, ascending=order == "due_ns", kind="stable").head(count)


def tokens_by_kind(steps: pd.DataFrame) -> pd.DataFrame:
    """New tokens of each step by kind: index of `steps`, columns KINDS."""
    if steps.empty:
        return pd.DataFrame(columns=list(KINDS), index=steps.index, dtype="float64")
    codes, names = pd.factorize(cells.values(steps.kinds)[0])
    tokens, step = cells.values(steps.new_tokens)
    return pd.DataFrame(
        {
            kind: np.bincount(step, weights=np.where(codes == list(names).index(kind), tokens, 0.0),
                              minlength=len(steps)) if kind in names else np.zeros(len(steps))
            for kind in KINDS
        },
        index=steps.index,
    )  # fmt: skip


def refusals_by_reason(steps: pd.DataFrame) -> pd.DataFrame:
    """Waiting requests that each step held back, by reason: index of `steps`, columns REFUSALS."""
    return cells.sums_by_key(steps.refusals, REFUSALS)


def step_series(steps: pd.DataFrame, begin_ns: float) -> pd.DataFrame:
    """One row per step: begin in s, wall, device and predicted ms, tokens by kind, refusals, stages in ms, blocks."""
    series = pd.DataFrame(
        {
            "step": steps.step,
            "begin_s": (steps.begin_ns - begin_ns) / 1e9,
            "end_s": (steps.end_ns - begin_ns) / 1e9,
            "wall_ms": (steps.end_ns - steps.begin_ns) / 1e6,
            "device_ms": steps.device_ns / 1e6,
            "predicted_ms": steps.predicted_ns / 1e6,
            "running": cells.lengths(steps.request_ids).astype("float64"),
            "waiting": steps.waiting,
            "budget": steps.budget,
            "preempted": cells.lengths(steps.preempted_ids).astype("float64"),
        }
    )
    parts = [series, tokens_by_kind(steps).add_prefix("tokens_"), refusals_by_reason(steps).add_prefix("refused_")]
    parts.append(pd.DataFrame({f"stage_{name}_ms": steps[f"stage_{name}_ns"] / 1e6 for name in STAGES}))
    parts.append(steps[[f"blocks_{state}" for state in BLOCK_STATES]])
    return pd.concat(parts, axis=1)


def binned(series: pd.DataFrame, bins: int = 200) -> tuple[pd.DataFrame, float]:
    """`step_series` as means over equal spans of time, and the width of a span in s (0 where a row is one step).

    Few steps stay as they are. Spans without a step, in which the engine was idle, hold zeros for what flows (tokens,
    times, waiting) and the last value for what stands (blocks, budget).
    """
    if len(series) <= bins:
        return series.assign(at_s=series.begin_s), 0.0
    first, last = series.begin_s.min(), series.end_s.max()
    width = (last - first) / bins
    which = ((series.begin_s - first) / width).astype(int).clip(0, bins - 1)
    means = series.groupby(which).mean().reindex(range(bins))
    standing = [name for name in means.columns if name.startswith("blocks_") or name in ("budget", "step")]
    means[standing] = means[standing].ffill()
    unknown = [name for name in means.columns if name not in (*standing, "predicted_ms")]
    means[unknown] = means[unknown].fillna(0.0)
    return means.assign(at_s=first + (np.arange(bins) + 0.5) * width), width


def steps_of(steps: pd.DataFrame, request_id: str) -> pd.DataFrame:
    """The steps that a request took part in: `step, begin_ns, end_ns, kind, new_tokens, past_tokens, batch`."""
    ids, place = cells.values(steps.request_ids)
    own = cells.as_objects(steps.iloc[np.unique(place[ids == request_id])])
    rows = [
        (record.step, record.begin_ns, record.end_ns, record.kinds[place], int(record.new_tokens[place]),
         int(record.past_tokens[place]), len(record.request_ids))
        for record in own.itertuples() for place, member in enumerate(record.request_ids) if member == request_id
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["step", "begin_ns", "end_ns", "kind", "new_tokens", "past_tokens", "batch"])


def throughput_tokens_per_s(requests: pd.DataFrame) -> float | None:
    """Output tokens of all served requests over the time from the first intended send to the last byte; None where
    nobody told them."""
    served = requests[requests.status == "ok"]
    if served.empty:
        return None
    seconds = (requests.last_byte_ns.max() - requests.due_ns.min()) / 1e9
    tokens = total_tokens(served.output_tokens)
    return tokens / seconds if tokens is not None and seconds > 0 else None


def request_facts(request: pd.Series) -> dict[str, str]:
    """What is known of one request, as names and text."""
    facts: dict[str, object] = {"class": request.klass or "–", "status": request.status}
    facts |= {"error": request.error} if isinstance(request.error, str) and request.error else {}
    facts["latency"] = f"{number(request.e2e_ms, 'ms')}, first token after {number(request.ttft_ms, 'ms')}"
    prompt = request.prompt_tokens if missing(request.server_prompt_tokens) else request.server_prompt_tokens
    cached = request.cached_tokens if missing(request.server_cached_tokens) else request.server_cached_tokens
    facts["prompt tokens"] = f"{number(prompt)}, {number(cached)} from the cache"
    if request.recomputed_tokens > 0:
        facts["prompt tokens"] += f"; {number(request.recomputed_tokens)} tokens rebuilt after a preemption"
    facts["output tokens"] = f"{number(request.output_tokens)}, {number(request.tpot_ms, 'ms')} each after the first"
    if not missing(request.first_step):
        facts["steps"] = (
            f"{request.first_step:,.0f} to {request.last_step:,.0f}, {number(request.preemptions)} preemptions"
        )
    if isinstance(request.finish_reason, str):
        facts["finished by"] = request.finish_reason
    return {name: str(value) for name, value in facts.items()}


def failures(requests: pd.DataFrame, count: int = 20) -> pd.DataFrame:
    """The first requests that were not served, as text: `request, class, due (s), status`, and `error` where errors
    differ."""
    rows = requests[requests.status != "ok"]
    shown = rows.head(count)
    table = pd.DataFrame(
        {
            "request": shown.request_id,
            "class": shown.klass.fillna(""),
            "due (s)": ((shown.due_ns - requests.due_ns.min()) / 1e9).map(number),
            "status": shown.status,
            "error": shown.error.fillna("–"),
        }
    )
    return table if rows.error.nunique(dropna=False) > 1 else table.drop(columns="error")


def failure_reasons(requests: pd.DataFrame, count: int = 10) -> pd.DataFrame:
    """Why requests were not served, most frequent first: `error, class, status, requests`, and when the first and the
    last of them were due."""
    rows = requests.loc[requests.status != "ok", ["status", "error", "klass", "due_ns"]]
    rows = rows.assign(
        error=rows.error.fillna("–"), klass=rows.klass.fillna(""), due_s=(rows.due_ns - requests.due_ns.min()) / 1e9
    )
    groups = rows.groupby(["error", "klass", "status"], sort=False).due_s.agg(["size", "min", "max"]).reset_index()
    groups = groups.sort_values("size", ascending=False, kind="stable").head(count)
    spans = zip(groups["min"].map(number), groups["max"].map(number), strict=True)
    return pd.DataFrame(
        {
            "error": groups.error,
            "class": groups.klass,
            "status": groups.status,
            "requests": groups["size"].map("{:,}".format),
            "due (s)": [f"{first} to {last}" for first, last in spans],
        }
    )


def slowest_requests(requests: pd.DataFrame, count: int = 10) -> pd.DataFrame:
    """The slowest requests with the account that took most of each, as text and rounded numbers."""
    rows = chosen(requests, "e2e_ms", count)
    booked = accounts_ms(rows)
    largest = [
        f"{booked.loc[row].idxmax()} ({percent(booked.loc[row].max() / booked.loc[row].sum())})"
        if row in booked.index else "–" for row in rows.index
    ]  # fmt: skip
    return pd.DataFrame(
        {
            "request": rows.request_id,
            "class": rows.klass.fillna(""),
            "latency (ms)": rows.e2e_ms.map(number),
            "TTFT (ms)": rows.ttft_ms.map(number),
            "TPOT (ms)": rows.tpot_ms.map(number),
            "prompt tokens": rows.prompt_tokens.fillna(rows.server_prompt_tokens).map(number),
            "output tokens": rows.output_tokens.map(number),
            "largest account": largest,
        }
    )


def longest_steps(steps: pd.DataFrame, begin_ns: float, count: int = 10) -> pd.DataFrame:
    """The steps that took longest, with what they held and what was expected of the device."""
    rows = step_series(steps, begin_ns).nlargest(count, "wall_ms")
    table = pd.DataFrame(
        {
            "step": rows.step.astype(int),
            "begin (s)": rows.begin_s.round(2),
            "wall (ms)": rows.wall_ms.round(2),
            "device (ms)": rows.device_ms.round(2),
            "expected (ms)": rows.predicted_ms.round(2),
            "residual (ms)": (rows.device_ms - rows.predicted_ms).round(2),
            "running": rows.running.astype(int),
            "waiting": rows.waiting.astype(int),
        }
    )
    for kind in KINDS:
        if rows[f"tokens_{kind}"].any():
            table[f"{kind} tokens"] = rows[f"tokens_{kind}"].astype(int)
    return table
