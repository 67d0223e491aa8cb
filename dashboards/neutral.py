"""One vocabulary for every engine: recording rules that give the samples of each server names that all share.

The rules are made from `interop.sources`, whose translations they repeat in PromQL. A family `sojourn_x` of our
catalogue is recorded as `llm:x`, with the label `engine` (sojourn, vllm, sglang). Labels of the target (job, instance,
namespace, …) and `model_name` stay; labels that only one engine has are summed over. Counters are recorded as counters,
so that a panel chooses its own window. What an engine does not tell has no series.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from sojourn.interop.sources.registry import SOURCES
from sojourn.interop.sources.sojourn import LEDGER, SOJOURN
from sojourn.interop.sources.source import PROCESS, Source, Sum, Term, Translation
from sojourn.interop.sources.translate import SUFFIXES
from sojourn.metrics.catalog.catalog import METRIC_BY_NAME, sample_names

PREFIX = "llm:"
PRESENT = f"{PREFIX}request_running"  # of every server that is understood
BOUND = "sojourn_request_objective_bound_seconds"
SPAN_SECONDS, SPAN_REQUESTS = f"{PREFIX}span_seconds_total", f"{PREFIX}span_requests_total"
OF_OURS = "sojourn_request_running"  # only our server has it, also where it lends vLLM's names
FOREIGN = tuple(source for source in SOURCES if source is not SOJOURN)
# The families of our catalogue that some other engine tells, too.
FAMILIES = tuple(dict.fromkeys(item.ours for source in FOREIGN for item in source.translations))


def neutral(name: str) -> str:
    """`sojourn_request_running` → `llm:request_running`."""
    return PREFIX + name.removeprefix("sojourn_")


def catalogue_name(name: str) -> str:
    """The name of our catalogue behind one of ours or a neutral one."""
    return "sojourn_" + name.removeprefix(PREFIX) if name.startswith(PREFIX) else name


def neutral_rules(objectives: Mapping[str, float] | None = None) -> list[dict[str, Any]]:
    """Recording rules of all engines. `objectives`: bounds in milliseconds by name (`ttft_ms`), for the servers that
    were told none themselves; they become series of `llm:request_objective_bound_seconds`."""
    rules = [*_own_rules()]
    for source in FOREIGN:
        for item in source.translations:
            rules += _translated(source, item)
        for span in source.spans:
            labels = {"engine": source.key, "span": span.name}
            for record, terms in ((SPAN_SECONDS, span.seconds), (SPAN_REQUESTS, span.requests)):
                rules.append({"record": record, "expr": _not_ours(_summed(source, terms)), "labels": labels})
    for objective, bound_ms in (objectives or {}).items():
        expr = f'0 * {PRESENT}{{engine!="sojourn"}} + {bound_ms / 1000:g}'
        rules.append({"record": neutral(BOUND), "expr": expr, "labels": {"klass": "all", "objective": objective}})
    return rules


def _own_rules() -> Iterable[dict[str, Any]]:
    """Our families are themselves; the stretches of a request's time are the accounts of its ledger."""
    label = {"engine": SOJOURN.key}
    for name in (*FAMILIES, BOUND):
        for sample in sample_names(METRIC_BY_NAME[name]):
            yield {"record": neutral(sample), "expr": sample, "labels": label}
    accounts = f'label_replace({LEDGER}, "span", "$1", "account", "(.+)")'
    yield {"record": SPAN_SECONDS, "expr": f"sum without (account, lifecycle) ({accounts})", "labels": label}
    requests = "sum without (outcome) (sojourn_request_finished_total)"
    expr = f"0 * sum without (account, lifecycle) ({accounts}) + ignoring (span) group_left () {requests}"
    yield {"record": SPAN_REQUESTS, "expr": expr, "labels": label}


def _translated(source: Source, item: Translation) -> Iterable[dict[str, Any]]:
    kind = METRIC_BY_NAME[item.ours].kind
    if kind == "histogram" and any(term.scale != 1 for terms in item.theirs for term in terms):
        return  # its bounds are labels, which PromQL cannot multiply
    for suffix in SUFFIXES.get(kind, ("",)):
        alternatives = [_summed(source, terms, suffix, item) for terms in item.theirs]
        if item.begins_beside:  # of a counter without a sample yet: 0 for each server that will have it
            alternatives.append(f"0 * {_summed(source, (Term(item.begins_beside),))}")
        yield {
            "record": neutral(item.ours) + suffix,
            "expr": _not_ours(" or ".join(alternatives)),
            "labels": {"engine": source.key, **dict(item.labels)},
        }


def _not_ours(expr: str) -> str:
    """Our server may lend another's names (`--compat vllm`): it is counted once, under its own."""
    return f"({expr}) unless on (job, instance) {OF_OURS}"


def _summed(source: Source, terms: Sum, suffix: str = "", item: Translation | None = None) -> str:
    """The terms, each summed over what only this engine tells apart; nothing where one of them is missing."""
    kept = item.same_labels if item is not None else ()
    operator = "max" if item is not None and item.largest else "sum"
    left_out = [label for label in (*source.own_labels, source.part_label, PROCESS) if label and label not in kept]
    written = ""
    for (name, sign, scale), group in groupby(terms, key=lambda term: (term.name, term.sign, term.scale)):
        series = _series(source, f"{name}{suffix}", list(group))
        joint = " - " if sign < 0 else " + " if written else ""
        factor = f"{scale:g} * " if scale != 1 else ""
        written += f"{joint}{factor}{operator} without ({', '.join(left_out)}) ({series})"
    return written


def _series(source: Source, name: str, terms: list[Term]) -> str:
    """The samples of one name that count. Of ranks that see the same requests, the largest reading of them."""
    where = _matchers(terms)
    if source.wholes:
        whole = _selector(name, [*where, f'{source.whole_label}=~"{"|".join(source.wholes)}"'])
        return f"{whole} or {_selector(name, where)} unless on (job, instance) {whole}"
    if not source.rank_labels:
        return _selector(name, where)
    rank = source.rank_labels[0]
    ranked = _selector(name, [*where, f'{rank}!=""', f'{source.part_label}=""'])
    without_rank = _selector(name, [*where, f'{rank}=""'])
    return f"max without ({', '.join((*source.rank_labels, PROCESS))}) ({ranked}) or {without_rank}"


def _matchers(terms: list[Term]) -> list[str]:
    """Terms of one name differ in the value of the same labels."""
    values: dict[str, list[str]] = {}
    for term in terms:
        for label, value in term.where:
            values.setdefault(label, []).append(value)
    return [
        f'{label}="{found[0]}"' if len(found) == 1 else f'{label}=~"{"|".join(found)}"'
        for label, found in values.items()
    ]


def _selector(name: str, matchers: list[str]) -> str:
    return f"{name}{{{','.join(matchers)}}}" if matchers else name
