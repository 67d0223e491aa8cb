"""docs/triage.md, written from the registry and the rules: `python -m sojourn.triage.page > docs/triage.md`."""

from collections.abc import Iterable, Sequence

from sojourn.interop.held.registry import READERS
from sojourn.triage.event_rules import EVENTS
from sojourn.triage.summary_rules import RULES

HEAD = """# Triage: what the evidence in your hand shows

This page answers: what can be concluded from a log, a page, a summary or a paste?

`python -m sojourn.triage.page` writes this page from the code. A test compares the two.

```
sojourn triage server.log result.json
kubectl logs pod/vllm-0 | sojourn triage -
sojourn triage http://127.0.0.1:8000 --for 30
```

The answer has at most 25 lines: what is *certain*, what is *likely* with its confidence and evidence, what is
*unknowable from this*, and one next command. `--json` prints the [document](json.md#triage). The
[exit code](commands.md#exit-codes) is 6 for a problem, 7 for a hung engine, 3 for "cannot tell".

Several pieces of evidence are read together. In Python: `sojourn.triage_of("server.log", "result.json")`. For agents:
the tool `triage` takes a pasted text.

Files may be packed (gzip, bzip2, xz, zstd, zip), in UTF-8 or UTF-16, coloured, with CRLF, and with the prefixes of
docker, kubectl, containerd and journalctl. A file of another kind is refused with a sentence that says what to give.

## Levels of evidence

A row for each request is judged like [a run](diagnosis.md). Series of a log or of several pages are judged like
[a live server](watch.md). A summary has no time and no server in it: it carries a cause only by the rules below.

A figure keeps its definition: whose clock, from where to where. `--json` and
`python -c "import sojourn; print(sojourn.triage_of('result.json'))"` show it. Units are proved by the file's own
figures, such as TTFT + TPOT x (tokens - 1) against E2E. A file that contradicts itself by a unit is refused.
"""


FACT = "none: a fact only"


def page() -> str:
    readers = [(each.kind, each.shows) for each in READERS]
    rules = [(f"`{each.key}`", each.cause or FACT, "; ".join(each.rivals), each.unknown) for each in RULES]
    events = [(kind, each.cause or FACT, "; ".join(each.rivals)) for kind, each in EVENTS.items()]
    return "\n".join([
        HEAD, "## What is read", "", *_table(("evidence", "what it shows"), readers), "", "## Rules of summaries", "",
        *_table(("rule", "cause", "what looks alike", "what stays open"), rules), "",
        "Several benchmarks of one tool are a sweep. Where more load gives no more output, it is saturated.", "",
        "## Events in logs", "", *_table(("event", "cause", "what looks alike"), events), "",
    ])  # fmt: skip


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(cell or '–' for cell in row)} |" for row in rows]
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines]


if __name__ == "__main__":
    print(page(), end="")
