"""The page of the judgement: docs/results/levels.md."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench.json_process import ROOT
from bench.levels.cases import CASES, SLO, Case
from bench.levels.collect import CASE
from bench.levels.judge import LEVELS, Verdict, counts, places, read_judgement

PAGE = ROOT / "docs" / "results" / "levels.md"
HEADS = "| case | planted | good |" + "".join(f" {level} |" for level in LEVELS)
TEXT = """# What each level of evidence names

This page answers: of faults planted in a real vLLM, which does a log name, a summary, a page, a client, or the probe?

`python -m bench.levels collect --python .../vllm/bin/python --model CHECKPOINT --into FOLDER`, then `judge FOLDER` and
`write FOLDER`; vLLM 0.32.0 on a CPU with one thread, a random model of 29 million parameters, 2 cores (AMD EPYC) which
other work shared, {dates}, {runs} of {n} cases. Objectives: TTFT {ttft:.0f} ms, TPOT {tpot:.0f} ms.

- **log**: `sojourn triage` of the server's log; **summary**: of the result file of `vllm bench serve` without its
  requests.
- **page**: all that a watch named over the pages of `/metrics`, one each second; **page, SLO**: with the objectives.
- **page + client**: the diagnosis of the load's run with the pages, and the watch where that names no cause.
- **probe**: the diagnosis with the records of the probe.
- **thresholds**: the bounds of public alert sets and runbooks, on the pages and the client's latencies.

*right*: the first cause is the planted one. *beside*: another one stands before it. *—*: no cause is named, which is
honest. **wrong**: another cause alone. Where runs differ, each has its own word, in order. *good* is the share of the
requests that met their objectives. A run of a fault that hurt no more than one request in ten, and one of a control
that did, count in no total; their figures are in brackets.

## In total

{totals}

Goals: page and client 75%, page 65%, log 50%, a summary never wrong, false alarms at most 3%.

## Planted faults

{faults}

## Controls

A control is right where nothing is named.

{controls}

## Public reports, rebuilt

The cases above that rebuild what users report, and the first cause that page and client, and the probe, name.

{reports}

## Limits of this page

- An engine that hung with an empty batch leaves gauges at zero: its page looks like that of an idle server.
- The first evidence of eight cases was spoilt: cases of one server shared a seed, so prompts of the case before were in
  its prefix cache. They were measured again, each with its own seed. `full-front`, whose requests vLLM refused without
  harm, was replaced by `blocked-front`.
- Expectations that were widened after a look at a judgement: a cap counts for both full batches of overload, a cap and
  overload count for `n-logprobs`, and `slow_grammar` counts for `grammar`. With the first expectations those cells were
  wrong.
- Rules were mended after each run had been judged. So the totals of these runs are no estimate for situations that
  nobody has looked at: `collect` with another `--seed`, judged before any rule is changed, gives one.
- Six of the faults lie between server and client, or in the client. No page of a server shows them.
- Cases that are not here were not measured: adapters, an offload tier, data-parallel engines, and what takes a GPU.
"""
SHOWN = {"right": "right", "beside": "beside", "cannot tell": "—", "silent": "silent", "no evidence": ""}


def page(folders: Sequence[Path]) -> str:
    verdicts = read_judgement(folders[-1])
    lies = places(folders)
    measured = [case for case in CASES if any(each is case for each, _ in lies)]
    dates = sorted({_date(folder) for _, folder in lies})
    return TEXT.format(
        dates=" to ".join(dict.fromkeys((dates[0], dates[-1]))), n=len(measured),
        runs=_runs(folders), ttft=SLO["ttft_ms"], tpot=SLO["tpot_ms"],
        totals=totals(verdicts), faults=table([case for case in measured if not case.is_control], verdicts),
        controls=table([case for case in measured if case.is_control], verdicts),
        reports=reports([case for case in measured if case.report], verdicts),
    )  # fmt: skip


def _runs(folders: Sequence[Path]) -> str:
    """`a run of 35`, or `runs of 35, 35 and 22`."""
    *sizes, last = (str(len(places([folder]))) for folder in folders)
    return f"runs of {', '.join(sizes)} and {last}" if sizes else f"a run of {last}"


def _date(folder: Path) -> str:
    return json.loads((folder / CASE).read_text(encoding="utf-8"))["date"].split()[0]


def table(cases: Sequence[Case], verdicts: Sequence[Verdict]) -> str:
    lines = [HEADS, "|---" * (3 + len(LEVELS)) + "|"]
    for case in cases:
        cells = [_cells(case, level, verdicts) for level in LEVELS]
        good = ", ".join(_good(case, each.good) for each in _of(case, LEVELS[0], verdicts))
        lines.append(f"| {case.name} | {case.what} | {good} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _of(case: Case, level: str, verdicts: Sequence[Verdict]) -> list[Verdict]:
    return [each for each in verdicts if each.case == case.name and each.level == level]


def _good(case: Case, good: float | None) -> str:
    return "" if good is None else f"{good:.0%}" if counts(case, good) else f"({good:.0%})"


def _cells(case: Case, level: str, verdicts: Sequence[Verdict]) -> str:
    """One word where all runs agree."""
    cells = [_cell(each) for each in _of(case, level, verdicts)]
    return ", ".join(cells if len(set(cells)) > 1 else cells[:1])


def _cell(verdict: Verdict) -> str:
    first = f": `{verdict.said.keys[0]}`" if verdict.said.keys else ""
    shown = SHOWN.get(verdict.right)
    if shown is None:
        return f"**{verdict.right}**{first}"
    return f"{shown}{first}" if verdict.right in ("right", "beside") else shown


def totals(verdicts: Sequence[Verdict]) -> str:
    """Of the cases that count, by level."""
    by_name = {case.name: case for case in CASES}
    lines = ["| level | right | beside | cannot tell | wrong | right of all | false alarms |", "|---" * 7 + "|"]
    for level in LEVELS:
        known = [each for each in verdicts if each.level == level and each.right != "no evidence"]
        own = [each for each in known if counts(by_name[each.case], each.good)]
        found = Counter(each.right for each in own)
        faults = sum(not by_name[each.case].is_control for each in own)
        cells = [str(found[right]) for right in ("right", "beside", "cannot tell", "wrong")]
        share = f"{found['right'] / faults:.0%}" if faults else ""
        alarms = f"{found['false alarm']} of {len(own) - faults}"
        lines.append(f"| {level} | {' | '.join(cells)} | {share} | {alarms} |")
    return "\n".join(lines)


def reports(cases: Sequence[Case], verdicts: Sequence[Verdict]) -> str:
    lines = ["| report | case | page + client | probe |", "|---" * 4 + "|"]
    for case in cases:
        cells = (_cells(case, level, verdicts) for level in ("page + client", "probe"))
        lines.append(f"| {case.report} | {case.name} | {' | '.join(cells)} |")
    return "\n".join(lines)
