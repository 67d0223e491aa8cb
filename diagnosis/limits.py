"""What limits a diagnosis: a sentence each, shown under it."""

from typing import Any

from sojourn.diagnosis.evidence import Client, Records, declared_classes, steps_of, tightest, view_of
from sojourn.diagnosis.expectation import is_expectation
from sojourn.diagnosis.foreign_server import warnings_of
from sojourn.diagnosis.state import FEWEST_REQUESTS
from sojourn.diagnosis.verdict import Closure
from sojourn.interop.sources.registry import SOURCES
from sojourn.metrics.ledger import LIFECYCLES, TEXT_ACCOUNTS
from sojourn.metrics.machine.steal import steal_sentence
from sojourn.metrics.records import NO_END
from sojourn.metrics.results.load import load_notes
from sojourn.metrics.run.directory import section
from sojourn.metrics.run.join import uncertainty_sentence
from sojourn.metrics.run.server_alone import MARK

CLIENT_LAG_WARNS = 0.02  # of the tightest objective
NO_OBJECTIVE = (
    "no objective is named: a request counts as late where it takes more than twice the own work of its class, which "
    "makes the bounds shown; `--slo 'ttft:500 tpot:50'` names others"
)
WARMED = "the prefix cache was warm"  # begins the one warning that a short report never leaves to the long one
WARMED_POINTS = 0.05  # of the prompt tokens: chat templates and the cache's blocks explain less
CLOSURE_WARNS = 0.95  # share of the joined requests that must close before the accounts are to be trusted


def warnings(facts: Client, closed: Closure) -> list[str]:
    found = [
        *_of_warm_cache(facts),
        *_of_load(facts),
        *_of_requests(facts),
        *_of_records(facts),
        *_of_probe(section(facts.meta, "probe")),
    ]
    found += filter(None, (steal_sentence(facts.steal), uncertainty_sentence(facts.meta)))
    if closed.closed < CLOSURE_WARNS * closed.joined:
        ledgers = f"only {closed.closed} of {closed.joined} ledgers close"
        found.append(f"{ledgers} within 1% and 1 ms; shares are that uncertain")
    return found


def _of_warm_cache(facts: Client) -> list[str]:
    """More hits than the requests of a scenario with stated shared parts can have among themselves."""
    view, classes = view_of(facts), declared_classes(facts.meta)
    ideal = section(section(facts.meta, "workload"), "prefix").get("ideal_hit_rate")
    is_stated = classes and not any(
        klass.get("content") == "recorded" or klass.get("session") or klass.get("prefix_tree") for klass in classes
    )
    if view is None or view.hit_rate is None or not (is_stated or ideal is not None):
        return []
    shared = max(facts.declared_shared_share, ideal or 0.0)
    if view.hit_rate - shared < WARMED_POINTS:
        return []
    return [
        f"{WARMED}: {view.hit_rate:.0%} of the prompt tokens were prefix hits, and this load shares {shared:.0%}; an "
        "earlier load of the same prompts explains that: restart the server, or take another --seed"
    ]


def unmeasured_speed(facts: Client) -> list[str]:
    """The normal speed that there was no time to measure behind the run."""
    left_out = section(facts.meta, "speed_reference").get("left_out")
    if not left_out:
        return []
    return [
        f"the normal speed of this machine was not measured for {left_out} settings, for want of time: "
        f"`sojourn diagnose {facts.path} --thorough` measures it"
    ]


def _of_load(facts: Client) -> list[str]:
    found = [MARK] if facts.measured_by == "server" else []
    found += [NO_OBJECTIVE] if is_expectation(facts.objectives) else []
    found += load_notes(facts.meta)
    imported = section(facts.meta, "imported")
    found += list(imported.get("notes") or ())
    found += [f"not in the imported file: {each}" for each in imported.get("unseen") or ()]
    return found


def _of_requests(facts: Client) -> list[str]:
    """Too few, or not sent, not served, not measured, sent late."""
    found = []
    bound = tightest(facts, "ttft_ms") or tightest(facts, "e2e_ms")
    if 0 < facts.sent < FEWEST_REQUESTS:
        found.append(f"only {facts.sent} requests were measured; shares of fewer than {FEWEST_REQUESTS} mean little")
    if unsent := facts.errors.get(NO_END, 0):
        sentence = f"{unsent} of {facts.sent} requests were not sent, or nobody recorded their end"
        found.append(f"{sentence}: they count as not good, and say nothing of the server")
    if facts.served + unsent < facts.sent:
        errors = [f"{count} × {error}" for error, count in facts.errors.items() if error != NO_END]
        unserved = f"{facts.sent - facts.served - unsent} of {facts.sent} requests were not served"
        found.append(f"{unserved}: {', '.join(errors[:3])}")
    if unseen := int(facts.rows.ttft_unmeasured.sum()):
        found.append(
            f"{unseen} of {facts.served} served requests have no first token (their answers were not streamed, came in "
            "one piece, or held no text): their time to it is unknown, and they are judged without it"
        )
    if unseen := int(facts.rows.ttfa_unmeasured.sum()):
        found.append(
            f"no answer of {unseen} served requests came with its reasoning apart: their time to the first answer "
            "token is unknown, and they are judged without it"
        )
    if unmeasured := int(facts.rows.tpot_unmeasured.sum()):
        found.append(
            f"the time per output token of {unmeasured} of {facts.served} served requests could not be measured (their "
            "text came in one read, or there was none): they are judged without it"
        )
    if bound and facts.lag_p90_ms is not None and facts.lag_p90_ms > CLIENT_LAG_WARNS * bound:
        found.append(
            f"the load generator sent late by {facts.lag_p90_ms:.1f} ms (p90): {facts.lag_p90_ms / bound:.0%} of the "
            f"objective of {bound:g} ms is its own delay"
        )
    return found


def _of_records(facts: Client) -> list[str]:
    """What the server did not record."""
    found, joined, steps = [], facts.joined if isinstance(facts, Records) else 0, steps_of(facts)
    if (view := view_of(facts)) is not None:
        found += warnings_of(view, facts.served)
    elif facts.served and not joined:
        found.append(f"no server records: the accounts of {', '.join(LIFECYCLES)} cannot be seen, only client.lag")
        if facts.scraped:
            known = ", ".join(source.title for source in SOURCES)
            found.append(f"its /metrics is of none of the servers that are known here: {known}")
    elif joined < facts.served:
        found.append(f"{facts.served - joined} of {facts.served} served requests have no server record")
    if joined and steps is None and not facts.servers:
        found.append("no step records: causes that show only in steps cannot be found")
    elif steps is not None and steps.model is None:
        found.append(f"only {steps.count} steps: too few for a step model, so capacity is not estimated")
    if changes := section(facts.meta, "core").get("changes_outputs"):
        found.append(f"the outputs are not the model's own ({', '.join(changes)}): times are judged, and not the texts")
    return found


def _of_probe(probe: dict[str, Any]) -> list[str]:
    """What a probe in a foreign server did not see; [] for a server of ours."""
    if not probe:
        return []
    accounts = ", ".join(each for each in probe.get("unseen_accounts") or () if each not in TEXT_ACCOUNTS)
    found = [f"recorded by sojourn-probe, which does not see {accounts}: their time lies in the work of the steps"]
    found += [str(sentence) for sentence in probe.get("unseen") or ()]
    if dropped := probe.get("dropped_records"):
        found.append(f"the probe dropped {dropped:,} records: steps and requests are missing")
    return found
