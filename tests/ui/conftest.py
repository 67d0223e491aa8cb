"""Runs to show: a diagnosed one, one under way, one of a foreign server, an empty one, and one with hostile names."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest
from streamlit.components.v2 import manifest_scanner

from sojourn.diagnosis.diagnose import diagnose
from sojourn.metrics.run.directory import REQUIRED, RunDirectory
from sojourn.metrics.run.server_alone import SERVER_ALONE
from sojourn.ui.run_data import RunData, load
from tests.loadgen.search.search_documents import sweep_of
from tests.metrics.foreign import Life, VllmPage, foreign_run
from tests.metrics.synthetic import PLANTS, synthetic_run

HOSTILE_ID = '"><img src=x onerror=alert(1)><script>alert(2)</script>![x](http://127.0.0.1:9/x.png)'
HOSTILE_NAME = "</script><script>alert(3)</script>{{7*7}}<b>![x](http://127.0.0.1:9/x.png)"


def _forget_the_server(records) -> None:
    records.requests.clear()
    records.steps.clear()


def _hostile(records) -> None:
    """Every request id and class becomes markup, which stays different for each request."""

    def klass(record) -> str:
        return f"{HOSTILE_NAME}{int(record.request_id[1:]) % 2}"

    renamed = {record.request_id: f"{HOSTILE_ID}{record.request_id}" for record in records.client}
    for table in (records.client, records.requests):
        table[:] = [
            msgspec.structs.replace(record, request_id=renamed[record.request_id], klass=klass(record))
            for record in table
        ]
    records.steps[:] = [
        msgspec.structs.replace(step, request_ids=[renamed[name] for name in step.request_ids])
        for step in records.steps
    ]


@pytest.fixture(scope="session", autouse=True)
def components():
    """Streamlit reads the metadata of every installed package for each `AppTest`; once is enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_scanner, "scan_component_manifests", cache(manifest_scanner.scan_component_manifests))
        yield


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    """A folder of runs: chat, tiny-kv, under-way, foreign, vllm, hostile, server-only, failing, empty."""
    folder = tmp_path_factory.mktemp("runs")
    for name, plant in (("chat", "long_beside_chat"), ("tiny-kv", "tiny_kv")):
        run = synthetic_run(folder / name, plant=plant, requests=80)
        run.write_json("diagnosis.json", msgspec.to_builtins(diagnose(run)))
    synthetic_run(folder / "under-way", requests=20, compact=False)
    synthetic_run(folder / "foreign", requests=20, keep=_forget_the_server)
    crowd = [
        Life(due_s=0.1 * n, queue_s=0.15 * n, prefill_s=0.05, decode_s=0.45, preemptions=n % 3 == 0) for n in range(40)
    ]
    foreign_run(folder / "vllm", crowd, VllmPage())
    synthetic_run(folder / "hostile", requests=15, name=HOSTILE_NAME, keep=_hostile)
    alone = synthetic_run(folder / "server-only", requests=10, keep=lambda records: records.client.clear())
    alone.update_meta(valid=False, invalid_reasons=[SERVER_ALONE])
    failing = replace(PLANTS["healthy"], failing_share=0.5)
    synthetic_run(folder / "failing", plant=failing, requests=20)
    RunDirectory.create(folder / "empty", dict.fromkeys(REQUIRED))
    sweep_of(folder / "sweep-made", {2: 1.0, 4: 0.96, 8: 0.85})
    return folder


@pytest.fixture(scope="session")
def chat(runs) -> RunData:
    return load(runs / "chat")


@pytest.fixture(scope="session")
def tiny_kv(runs) -> RunData:
    return load(runs / "tiny-kv")


@pytest.fixture(scope="session")
def vllm(runs) -> RunData:
    """A run of a vLLM that was scraped meanwhile."""
    return load(runs / "vllm")


@pytest.fixture(scope="session")
def foreign(runs) -> RunData:
    return load(runs / "foreign")
