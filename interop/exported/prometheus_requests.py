"""RequestRecords → counters and histograms. One more family is a line in the catalogue and a line in a table here."""

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter

import numpy as np

from sojourn.interop.exported.prometheus_series import Series, Tallies
from sojourn.interop.exported.request_outcome import Bounds, gaps_ns, latencies_ns, met, outcome
from sojourn.metrics.catalog.catalog import GOOD
from sojourn.metrics.catalog.memory import POOL_RATIOS
from sojourn.metrics.ledger import SERVER_ACCOUNTS, Account, closes
from sojourn.metrics.records import RequestRecord
from sojourn.metrics.request.objectives import EVERY_CLASS

# Counters that are sums of a number field.
SUMS = {
    "sojourn_token_prompt_tokens_total": "prompt_tokens",
    "sojourn_token_prompt_characters_total": "prompt_characters",
    "sojourn_token_output_characters_total": "output_characters",
    "sojourn_token_computed_tokens_total": "computed_tokens",
    "sojourn_token_generated_tokens_total": "output_tokens",
    "sojourn_token_drafted_tokens_total": "drafted_tokens",
    "sojourn_token_accepted_tokens_total": "accepted_tokens",
    "sojourn_compute_rejected_seconds_total": "rejected_ns",
    "sojourn_memory_recomputed_tokens_total": "recomputed_tokens",
    "sojourn_memory_infinite_hit_tokens_total": "infinite_hit_tokens",
}
# Counters whose label values are the keys of a map.
TALLIES = {
    "sojourn_request_wait_seconds_total": "waits",
    "sojourn_memory_prefix_outcome_tokens_total": "prefix_outcomes",
}
# Histograms of a number field; None is not observed.
SPECTRA = {
    "sojourn_request_prompt_length_tokens": "prompt_tokens",
    "sojourn_request_output_length_tokens": "output_tokens",
    "sojourn_memory_evicted_ago_seconds": "evicted_ago_ns",
}
# Histograms of an account of the ledger up to the last byte.
ACCOUNTS = {
    "sojourn_request_quota_seconds": Account.REQUEST_QUOTA,
    "sojourn_request_admission_seconds": Account.REQUEST_ADMISSION,
    "sojourn_request_queue_seconds": Account.REQUEST_QUEUE,
    "sojourn_request_interference_seconds": Account.REQUEST_INTERFERENCE,
    "sojourn_request_stream_seconds": Account.REQUEST_STREAM,
    "sojourn_request_remote_prefill_seconds": Account.REQUEST_REMOTE_PREFILL,
    "sojourn_memory_blocked_seconds": Account.MEMORY_BLOCKED,
    "sojourn_memory_transfer_seconds": Account.MEMORY_TRANSFER,
    "sojourn_memory_adapter_load_seconds": Account.MEMORY_ADAPTER_LOAD,
    "sojourn_token_encode_seconds": Account.TOKEN_ENCODE,
    "sojourn_token_sample_seconds": Account.TOKEN_SAMPLE,
    "sojourn_token_decode_seconds": Account.TOKEN_DECODE,
}
VERDICTS = ("met", "missed", "unjudged")
MOST_TENANTS = 100  # with series of their own: without keys a client can send any name
NO_TENANT, OTHER_TENANTS = "(none)", "(others)"
_OF_SERVER = [info.account for info in SERVER_ACCOUNTS]
_FIELDS = sorted({*SUMS.values(), *SPECTRA.values()})
_read_fields = attrgetter(*_FIELDS)


class RequestFold:
    """Folds ended requests in, and judges them by the objectives of their class."""

    def __init__(self, series: Series, objectives: Bounds):
        self._numbers, self._histograms = series.numbers, series.histograms
        self._objectives = objectives
        self._tallies = Tallies(series, TALLIES)
        self._judged = series.numbers["sojourn_request_objective_total"]
        self._good_tokens = series.numbers["sojourn_token_good_tokens_total"]
        self._by_tenant = series.numbers["sojourn_request_tenant_requests_total"]
        self._tenants: set[str] = set()
        bound_of = series.numbers["sojourn_request_objective_bound_seconds"]
        for klass, bounds in objectives.items():
            bound_of.update(((klass, objective), round(ms * 1e6)) for objective, ms in bounds.items())
            for objective in (*bounds, GOOD):
                for verdict in ("met", "missed"):
                    self._judged[klass, objective, verdict] = 0
            self._good_tokens[(klass,)] = 0

    def observe_all(self, requests: Sequence[RequestRecord]) -> None:
        """Many at once: a request on its own would cost several times as much."""
        if not requests:
            return
        for ended, number in Counter(map(outcome, requests)).items():
            self._numbers["sojourn_request_finished_total"][(ended,)] += number
        columns = dict(zip(_FIELDS, zip(*map(_read_fields, requests), strict=True), strict=True))
        for name, field in SUMS.items():
            self._numbers[name][()] += sum(filter(None, columns[field]))
        for name, field in SPECTRA.items():
            self._histograms[name][()].observe_all([value for value in columns[field] if value is not None])
        self._tallies.add_all(lambda field: map(attrgetter(field), requests))
        self._observe_prefixes(requests)
        self._observe_ledgers(requests)
        gaps = gaps_ns([request.token_ns for request in requests])
        self._histograms["sojourn_request_itl_seconds"][()].observe_all(gaps)
        latencies = [latencies_ns(request) for request in requests]
        for objective in ("ttft_ms", "tpot_ms", "e2e_ms"):
            known = [found[objective] for found in latencies if objective in found]
            self._histograms[histogram_of(objective)][()].observe_all(known)
        for request, found in zip(requests, latencies, strict=True):
            self._by_tenant[self.tenant(request.tenant), self._judge(request, found)] += 1

    def _observe_prefixes(self, requests: Sequence[RequestRecord]) -> None:
        ran = [request for request in requests if request.first_step is not None]  # others were never looked up
        cached = sum(request.cached_tokens for request in ran)
        prefix = self._numbers["sojourn_memory_prefix_tokens_total"]
        prefix[("hit",)] += cached
        prefix[("miss",)] += sum(request.prompt_tokens for request in ran) - cached
        resized = self._numbers["sojourn_memory_resized_hit_tokens_total"]
        for request in requests:
            for ratio, hit_tokens in zip(POOL_RATIOS, request.resized_hit_tokens, strict=False):
                resized[(ratio,)] += hit_tokens

    def _observe_ledgers(self, requests: Sequence[RequestRecord]) -> None:
        booked = np.array([request.ledger for request in requests])
        ttft = np.array([request.ttft for request in requests])
        for kind, ledgers in (("ledger", booked), ("ttft_ledger", ttft)):
            samples, totals = self._numbers[f"sojourn_request_{kind}_seconds_total"], ledgers.sum(axis=0).tolist()
            for info in SERVER_ACCOUNTS:  # the client's accounts are no server's to export
                samples[info.lifecycle, info.name] += totals[info.account]
        for name, account in ACCOUNTS.items():
            self._histograms[name][()].observe_all(booked[:, account])
        accounted = booked[:, _OF_SERVER].sum(axis=1).tolist()
        for request, accounted_ns in zip(requests, accounted, strict=True):
            if request.written_ns is not None:
                latency_ns = request.written_ns - request.arrived_ns
                unaccounted_ns = latency_ns - accounted_ns
                self._numbers["sojourn_request_unaccounted_seconds_total"][()] += abs(unaccounted_ns)
                self._numbers["sojourn_request_unclosed_total"][()] += not closes(unaccounted_ns, latency_ns)
            if request.preemptions:
                preempted_ns = request.ledger[Account.MEMORY_PREEMPTED]
                self._histograms["sojourn_memory_preempted_seconds"][()].observe(preempted_ns)

    def tenant(self, name: str) -> str:
        """The value of the label `tenant`."""
        if name not in self._tenants and len(self._tenants) < MOST_TENANTS:
            self._tenants.add(name)
        label = (name or NO_TENANT) if name in self._tenants else OTHER_TENANTS
        for verdict in VERDICTS:
            self._by_tenant.setdefault((label, verdict), 0)
        return label

    def _judge(self, request: RequestRecord, latencies: Mapping[str, float]) -> str:
        """Met, missed or unjudged. Counts each objective of the request's class and all of them together."""
        if not self._objectives or outcome(request) == "content_filter":
            return "unjudged"  # a filtered one ended as the operator wants it, and says nothing about latency
        klass = request.klass if request.klass in self._objectives else EVERY_CLASS
        if klass not in self._objectives:
            return "unjudged"
        verdicts = met(request, latencies, self._objectives[klass])
        for objective, is_met in verdicts.items():
            self._judged[klass, objective, "met" if is_met else "missed"] += 1
        verdict = "met" if all(verdicts.values()) else "missed"
        self._judged[klass, GOOD, verdict] += 1
        self._good_tokens[(klass,)] += request.output_tokens if verdict == "met" else 0
        return verdict


def histogram_of(objective: str) -> str:
    """The histogram of the latency that an objective bounds."""
    return f"sojourn_request_{objective.removesuffix('_ms')}_seconds"
