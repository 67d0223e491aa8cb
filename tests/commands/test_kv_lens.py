"""`sojourn kv-lens`: of a run and of a live server, as a page and as a document, and what it refuses."""

import json

import sojourn
from sojourn.scripting.documents import json_schema
from tests.commands.program import run_program
from tests.live.kv_lens.publisher import Publisher, batch, removed, stored
from tests.live.kv_lens.recorded_runs import run_of
from tests.metrics.memory.simulated_cache import chains


def test_a_run_is_a_report_and_a_document(tmp_path):
    run_of(tmp_path / "run", chains(5, count=200), events=True)
    shown = run_program("kv-lens", str(tmp_path / "run"))
    assert shown.returncode == 0 and "What another size would hit" in shown.stdout
    assert "what twice the memory is worth in goodput" in " ".join(shown.stdout.split()), "it has no steps to replay"
    found = json.loads(run_program("kv-lens", str(tmp_path / "run"), "--json", "--no-goodput").stdout)
    assert set(found) == set(json_schema("kv_lens")["$defs"]["KvLens"]["properties"])
    lens = sojourn.open(tmp_path / "run").kv_lens()
    assert (lens.headline, lens.hit_rate) == (found["headline"], found["hit_rate"])
    assert found["headline"] in " ".join(shown.stdout.replace("│", " ").split())


def test_a_live_server_is_read_for_a_while(tmp_path):
    with Publisher() as publisher:
        publisher.publish(batch(stored([1, 2])))
        publisher.publish(batch(removed([2]), stored([3])))
        publisher.publish(batch(removed([1]), stored([2])))
        done = run_program(
            "kv-lens", publisher.events, "--replay", publisher.replay, "--once", "--for", "2", "--json",
            "--output", str(tmp_path / "run"),
        )  # fmt: skip
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["source"] == "events" and found["pools"][0]["stored_again"] == 1
    assert found["headline"].startswith("1 of 4 stored blocks (25.0%) had been evicted before.")
    again = run_program("kv-lens", str(tmp_path / "run"))
    assert "1 of 4 stored blocks" in again.stdout and "hits are not in KV events" in " ".join(again.stdout.split())


def test_wrong_use_is_a_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    for arguments, code, sentence in (
        (("kv-lens", "runs/a", "tcp://127.0.0.1:1"), 2, "cannot be mixed"),
        (("kv-lens", "runs/a", "runs/b"), 2, "give one"),
        (("kv-lens", "runs/a", "--once"), 2, "--once is for live servers"),
        (("kv-lens", "tcp://127.0.0.1:1", "--json"), 2, "--json takes --once"),
        (("kv-lens", "tcp://127.0.0.1:1", "--once", "--no-goodput"), 2, "--no-goodput is for a run"),
        (("kv-lens", "tcp://127.0.0.1:1", "--once", "--replay", "a", "--replay", "b"), 2, "2 --replay are given"),
        (("kv-lens", "tcp://127.0.0.1:1", "--once"), 1, "no server publishes KV events"),
        (("kv-lens", "udp://127.0.0.1:1", "--once"), 2, "no address of KV events"),
        (("kv-lens", "http://127.0.0.1:1", "--once"), 1, "no server answers"),
        (("kv-lens", str(tmp_path / "empty")), 1, "no run.json"),
    ):
        done = run_program(*arguments)
        assert done.returncode == code and sentence in done.stderr, (arguments, done.stderr)
