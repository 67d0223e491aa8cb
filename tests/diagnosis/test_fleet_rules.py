"""Fleets as causes: a slow server, a choice of the router that is uneven, and a router that takes the time."""

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sojourn.diagnosis.causes.cache_blind_routing import CACHE_AWARE
from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.evidence import read_evidence
from sojourn.diagnosis.excess import excesses
from sojourn.diagnosis.proposals import proposals
from sojourn.diagnosis.server_proposals import server_proposals
from sojourn.diagnosis.statements.fleet import LOAD_AWARE
from sojourn.loadgen.fleet.routers import ROUTERS
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.fleet import gather_servers, servers_of
from tests.metrics.simulated_server import MS, Device
from tests.metrics.synthetic import PLANTS, Klass, synthetic_run
from tests.metrics.synthetic_fleet import ROUTER, synthetic_fleet

CAUSES = {"straggler", "replica_imbalance", "cache_blind_routing", "slow_router"}
CHAT = replace(PLANTS["healthy"], rate_rps=8.0)
SLOW = replace(CHAT, device=Device(slowdown=4.0, slow_from=0.0))


def named(run: RunDirectory) -> dict[str, object]:
    facts = read_evidence(run)
    found = {each.key: each for excess in excesses(facts) for each in proposals(facts, excess)}
    return {key: found[key] for key in CAUSES & found.keys()}


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_the_slow_server_is_named_whatever_its_number(tmp_path, slow):
    run = synthetic_fleet(tmp_path / "run", [SLOW if k == slow else CHAT for k in range(3)], requests=120)
    fleet = read_evidence(run).fleet()
    assert fleet.slowest.name == f"server-{slow}" and fleet.slowest.slowdown == pytest.approx(4.0, rel=0.25)
    others = [each.slowdown for each in fleet.replicas if each.name != f"server-{slow}"]
    assert all(each < 1.1 for each in others)
    assert f"server-{slow}" in named(run)["straggler"].cause
    assert diagnose(run).findings[0].key == "straggler"


def test_no_server_of_an_equal_fleet_is_named(tmp_path):
    run = synthetic_fleet(tmp_path / "run", [CHAT, CHAT], requests=120)
    found = diagnose(run)
    assert not named(run) and found.state == "healthy"
    steps = [each.reason for each in found.checks if each.symptom in ("low_device_utilisation", "vram_fills_quickly")]
    assert all("sojourn diagnose RUN/server-0" in reason for reason in steps) and len(steps) == 2
    assert not any("no step records" in warning for warning in found.warnings), "causes were asked of each server"
    fleet = read_evidence(run).fleet()
    assert fleet.slowest.slowdown == pytest.approx(1.0, abs=0.1) and fleet.imbalance < 1.2


def test_servers_that_are_equally_overloaded_or_slow_need_no_other_router(tmp_path):
    for name, plant in (("overload", PLANTS["overload"]), ("slow", SLOW)):
        assert not named(synthetic_fleet(tmp_path / name, [plant, plant], requests=120))


def test_requests_that_gather_on_one_server_are_the_routers_choice(tmp_path):
    crowded = replace(CHAT, rate_rps=45.0, settings=replace(CHAT.settings, max_num_seqs=8))
    quiet = replace(CHAT, rate_rps=4.0, settings=replace(CHAT.settings, max_num_seqs=8))
    run = synthetic_fleet(tmp_path / "run", [quiet, crowded], requests=[20, 200])
    fleet = read_evidence(run).fleet()
    assert fleet.busiest.name == "server-1" and fleet.present_beside_idle > 0.9 and fleet.work_imbalance > 1.5
    found = named(run)
    assert found.keys() == {"replica_imbalance"} and "power_of_two" in found["replica_imbalance"].change
    assert diagnose(run).findings[0].key == "replica_imbalance"
    for policy, flags in (("round_robin", "--policy least_requests"), ("least_requests", "--router vllm-router")):
        run.update_meta(router=ROUTER | {"name": "ray", "policy": policy})
        advised = named(RunDirectory.open(run.path))["replica_imbalance"]
        assert flags in advised.measurement and "power_of_two" not in advised.change


def test_policies_that_are_named_are_of_that_router():
    for policies in (LOAD_AWARE, CACHE_AWARE):
        assert all(set(named) <= set(ROUTERS[router].policies) for router, named in policies.items())


def test_time_in_the_router_is_the_routers(tmp_path):
    run = synthetic_fleet(tmp_path / "run", [CHAT, CHAT], requests=60)
    delayed_ns = 600 * MS
    for place in (run, *servers_of(run)):  # each request waits before it is sent on: the client's times are earlier
        rows = pq.read_table(place.path / "client.parquet").to_pylist()
        for row in rows:
            row["due_ns"] -= delayed_ns
            row["sent_ns"] -= delayed_ns
        schema = pq.read_schema(place.path / "client.parquet")
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), place.path / "client.parquet")
    run = RunDirectory.open(run.path)
    assert named(run).keys() == {"slow_router"}
    assert diagnose(run).findings[0].key == "slow_router"


def test_one_server_is_no_fleet(tmp_path):
    run = synthetic_fleet(tmp_path / "run", [SLOW], requests=60)
    assert read_evidence(run).fleet() is None and not named(run)


def test_a_cause_that_all_servers_have_is_the_fleets(tmp_path):
    alone = diagnose(synthetic_run(tmp_path / "one", plant="small_batch_cap")).findings[0]
    fleet = diagnose(synthetic_fleet(tmp_path / "fleet", ["small_batch_cap"] * 2, requests=200)).findings[0]
    assert alone.key == fleet.key == "batch_cap" and fleet.cause.startswith("on every server: ")
    assert fleet.explains_share == pytest.approx(alone.explains_share, abs=0.15)


def test_a_cause_of_one_server_claims_only_the_time_of_its_requests(tmp_path):
    run = synthetic_fleet(tmp_path / "run", ["small_batch_cap", "slow_network"], requests=120)
    facts = read_evidence(run)
    for excess in excesses(facts):
        for proposal in server_proposals(facts, excess):
            assert all(0 <= part <= 1 for part in proposal.claims.values())
            if proposal.key == "batch_cap":
                assert proposal.cause.startswith("on server-0: ")


def hashed(run: RunDirectory, moves: bool) -> RunDirectory:
    """The run with conversations of two turns. A second turn is on the server of the first, or on the other one."""
    tables = {member: pq.read_table(member.path / "requests.parquet") for member in servers_of(run)}
    rows = {member: table.to_pylist() for member, table in tables.items()}
    open_talks: dict[int, list[tuple[int, int]]] = {0: [], 1: []}  # by server: when a first turn ended, and its number
    order = sorted(((row["arrived_ns"], k, row) for k, own in enumerate(rows.values()) for row in own),
                   key=lambda each: each[0])  # fmt: skip
    for number, (arrived_ns, k, row) in enumerate(order):
        place = 1 - k if moves else k
        ended = [talk for talk in open_talks[place] if talk[0] < arrived_ns]
        talk, blocks = (ended[0][1], 20) if ended else (number, 16)
        if ended:
            open_talks[place].remove(ended[0])
        else:
            open_talks[k].append((row["finished_ns"], number))
        row["prompt_block_hashes"] = [1000 * talk + block for block in range(blocks)]
        row["output_block_hashes"], row["scheduled_ns"] = [], row["arrived_ns"]
        row["prefix_outcomes"] = [("hit", 0), ("miss_cold", 16 * blocks)]
    for member, table in tables.items():
        pq.write_table(pa.Table.from_pylist(rows[member], schema=table.schema), member.path / "requests.parquet")
    gather_servers(run)
    run.update_meta(engine=run.meta()["engine"] | {"block_size": 16})
    return RunDirectory.open(run.path)


def test_conversations_that_change_servers_lose_what_the_other_server_holds(tmp_path):
    prompts = replace(CHAT, rate_rps=0.6, klasses=(Klass(prompt_tokens=900),), device=Device(token_ns=MS // 2))
    moving = hashed(synthetic_fleet(tmp_path / "moving", [prompts, prompts], requests=40), moves=True)
    assert read_evidence(moving).fleet().pooled.fleet.lost_share > 0.3 and "cache_blind_routing" in named(moving)
    staying = hashed(synthetic_fleet(tmp_path / "staying", [prompts, prompts], requests=40), moves=False)
    assert read_evidence(staying).fleet().pooled.fleet.lost_tokens == 0 and "cache_blind_routing" not in named(staying)
