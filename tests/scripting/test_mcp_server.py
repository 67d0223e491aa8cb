"""The MCP server, by the SDK's own client over stdin and stdout: answers, sentences for wrong questions, no way out."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from tests.interop.held.shapes import TABLE
from tests.live.kv_lens.recorded_runs import run_of
from tests.metrics.memory.simulated_cache import chains
from tests.metrics.synthetic import synthetic_run

mcp = pytest.importorskip("mcp")
pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]
TOOLS = {"list_runs", "diagnose", "explain_request", "ledger", "replay", "compare", "kv_lens", "query", "watch_server",
         "triage"}  # fmt: skip
WRONG = [
    ("diagnose", {"run": "../secret"}, "not a run in the folder"),
    ("diagnose", {"run": "."}, "not a run in the folder"),
    ("diagnose", {"run": "absent"}, "list_runs names those there are"),
    ("diagnose", {"run": "nul\x00byte"}, "no name of a run"),
    ("diagnose", {}, "Field required"),
    ("ledger", {"run": "leaving"}, "a link that leads out"),
    ("ledger", {"run": "fleet"}, "records lie outside of it"),
    ("ledger", {"run": "alias"}, "not a run in the folder"),
    ("ledger", {"run": "broken"}, "is not JSON"),
    ("explain_request", {"run": "capped", "request_id": "nobody"}, "the run has no request nobody"),
    ("explain_request", {"run": "capped", "request_id": "r00001", "token": -1}, "greater than or equal to 0"),
    ("replay", {"run": "capped", "changes": {"max_num_seq": 8}}, "max_num_seq"),
    ("replay", {"run": "capped", "changes": {"device_speed": list(range(1, 100))}}, "at most 50"),
    ("compare", {"a": "capped", "b": "capped", "margin": 7}, "less than or equal to 1"),
    ("kv_lens", {"run": "capped"}, "tells nothing of its cache"),
    ("query", {"run": "capped", "sql": "DROP TABLE requests"}, "give one SELECT"),
    ("query", {"run": "capped", "sql": "SELECT * FROM read_text('/etc/hostname')"}, "disabled by configuration"),
    ("watch_server", {"url": "http://127.0.0.1:9"}, "it may read none"),
    ("triage", {"text": "nothing of the kind"}, "no line of a known kind"),
    ("nothing", {}, "Unknown tool"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("place")
    folder = place / "runs"
    capped = synthetic_run(folder / "capped", plant="small_batch_cap", requests=60)
    synthetic_run(folder / "again", plant="small_batch_cap", requests=60, seed=1)
    run_of(folder / "cached", chains(3, count=60), events=False)
    secret = synthetic_run(place / "secret", requests=10)
    (folder / "alias").symlink_to(secret.path)
    for name in ("leaving", "fleet", "broken"):
        (folder / name).mkdir()
        (folder / name / "run.json").write_text((capped.path / "run.json").read_text())
    (folder / "leaving" / "requests.parquet").symlink_to(secret.path / "requests.parquet")
    meta = json.loads((capped.path / "run.json").read_text()) | {"servers": [{"name": "../../secret"}]}
    (folder / "fleet" / "run.json").write_text(json.dumps(meta))
    (folder / "broken" / "run.json").write_text("{")
    return folder


def talk(runs: Path, conversation):
    """What a conversation with the server returns."""
    command = mcp.StdioServerParameters(
        command=sys.executable, args=["-m", "sojourn", "mcp", "--runs", str(runs)], cwd=str(ROOT),
        env={"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])},
    )  # fmt: skip

    async def run():
        async with mcp.Client(command, read_timeout_seconds=60) as client:
            return await conversation(client)

    return asyncio.run(run())


def test_agent_gets_answers_with_evidence_and_sentences_for_wrong_questions(runs):
    async def conversation(client):
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == TOOLS and all(tool.annotations.read_only_hint for tool in tools.values())
        for name, arguments, says in WRONG:
            answer = await client.call_tool(name, arguments)
            assert answer.is_error and says in answer.content[0].text, (name, arguments, answer.content)
        asked = {
            "runs": ("list_runs", {}),
            "diagnosis": ("diagnose", {"run": "capped"}),
            "explanation": ("explain_request", {"run": "capped", "request_id": "r00009"}),
            "ledger": ("ledger", {"run": "capped", "klass": "chat"}),
            "replay": ("replay", {"run": "capped", "changes": {"max_num_seqs": [16]}}),
            "comparison": ("compare", {"a": "capped", "b": "again"}),
            "kv_lens": ("kv_lens", {"run": "cached"}),
            "triage": ("triage", {"text": TABLE}),
            "query": ("query", {"run": "capped", "sql": "SELECT count(*) FROM requests"}),
        }
        found = {}
        for name, (tool, arguments) in asked.items():
            answer = await client.call_tool(tool, arguments)
            assert not answer.is_error, answer.content
            found[name] = answer.structured_content
            assert found[name]["schema"] == f"sojourn.{name}/1"
        return found

    before = sorted(runs.rglob("*"))
    found = talk(runs, conversation)
    assert sorted(runs.rglob("*")) == before  # nothing is written
    assert {run["name"] for run in found["runs"]["runs"]} == {"capped", "again", "broken", "cached"}
    assert "secret" not in json.dumps(found)
    cause = found["diagnosis"]["findings"][0]
    assert cause["evidence"] and all(fact["source"] for fact in cause["evidence"]) and 0 < cause["confidence"] <= 1
    assert found["kv_lens"]["hit_rate"] < found["kv_lens"]["infinite_hit_rate"] and found["kv_lens"]["unknown"]
    assert found["explanation"]["evidence"] and found["query"]["rows"] == [[60]]
    assert found["comparison"]["verdict"] in ("no worse", "cannot tell")
    predicted, unchanged = found["replay"]["predictions"][0], found["replay"]["unchanged"]
    assert predicted["attainment"]["median"] > unchanged["attainment"]["median"]
