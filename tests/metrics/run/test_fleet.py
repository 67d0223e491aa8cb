"""A fleet is one run: a pooled one without steps, and one of each server with its own."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sojourn.diagnosis.diagnose import diagnose
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.ledger import closes
from sojourn.metrics.run.fleet import gather_servers, refuse_fleet, server_run_of, servers_of, siblings_of
from sojourn.metrics.run.routing import routing_remark
from tests.metrics.synthetic import synthetic_run
from tests.metrics.synthetic_fleet import ROUTER, synthetic_fleet

MS = 1_000_000


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    return synthetic_fleet(tmp_path_factory.mktemp("fleet") / "run", ["healthy", "overload"], requests=[60, 40])


def test_each_request_names_its_server_and_no_steps_are_mixed(fleet):
    requests, members = fleet.requests(), servers_of(fleet)
    assert requests.server.value_counts().to_dict() == {"server-0": 60, "server-1": 40}
    assert fleet.table("steps").empty and fleet.table("system").empty
    for member in members:
        own = member.requests()
        assert set(own.request_id) == set(requests.request_id[requests.server == member.name])
        assert {name for names in member.table("steps").request_ids for name in names} == set(own.request_id)
        assert member.meta()["server"] == member.name and "servers" not in member.meta()
        assert server_run_of(fleet, own.request_id.iloc[0]).path == member.path
        siblings = siblings_of(member, member.meta())
        assert {each.name for each in siblings} == {"server-0", "server-1"} - {member.name}
    assert siblings_of(fleet, fleet.meta()) == []


def test_the_way_through_a_router_is_an_account_of_its_own_and_closure_stays(tmp_path, fleet):
    direct = synthetic_fleet(tmp_path / "other", ["healthy", "overload"], requests=[60, 40], router=None).requests()
    far = synthetic_fleet(tmp_path / "far", ["healthy"], requests=20, router=ROUTER | {"same_host": False})
    routed, columns = fleet.requests(), ("ledger_client_network_ns", "ledger_request_routing_ns")
    assert (direct.ledger_request_routing_ns == 0).all() and (routed.ledger_request_routing_ns > 0).all()
    assert (direct[list(columns)].sum(axis=1) == routed[list(columns)].sum(axis=1)).all()
    assert (direct.unaccounted_ns == routed.unaccounted_ns).all()
    assert (far.requests().ledger_request_routing_ns == 0).all() and routing_remark(far.meta())
    assert not routing_remark(fleet.meta())
    latency = routed.last_byte_ns - routed.due_ns
    assert all(closes(int(left), int(whole)) for left, whole in zip(routed.unaccounted_ns, latency, strict=True))


def test_turns_of_one_front_delay_only_the_requests_of_its_server(tmp_path):
    fleet = synthetic_fleet(tmp_path / "run", ["healthy", "healthy"], requests=20)
    member = servers_of(fleet)[1]
    way_in = fleet.requests()
    way_in = way_in[way_in.server == "server-1"].iloc[0]
    system = pq.read_table(member.path / "system.parquet").to_pylist()
    system[0] |= {
        "loop_turn_begin_ns": [int(way_in.sent_ns)],
        "loop_turn_ns": [int(way_in.arrived_ns - way_in.sent_ns)],
    }
    pq.write_table(pa.Table.from_pylist(system, schema=pq.read_schema(member.path / "system.parquet")),
                   member.path / "system.parquet")  # fmt: skip
    waited = fleet.requests().set_index("request_id")
    assert waited.front_turns_ns[way_in.request_id] > 0
    assert waited.ledger_request_routing_ns[way_in.request_id] == 0
    assert (waited.front_turns_ns[waited.server == "server-0"] == 0).all()


def test_a_request_that_a_router_sent_twice_is_of_the_server_that_answered(tmp_path):
    fleet = synthetic_fleet(tmp_path / "run", ["healthy", "healthy"], requests=10)
    first, second = servers_of(fleet)
    tried = pq.read_table(first.path / "requests.parquet").to_pylist()
    late = pq.read_table(second.path / "requests.parquet").to_pylist()[0]
    tried[0] |= {"request_id": late["request_id"], "arrived_ns": late["arrived_ns"] - MS, "error": "it broke"}
    pq.write_table(pa.Table.from_pylist(tried, schema=pq.read_schema(first.path / "requests.parquet")),
                   first.path / "requests.parquet")  # fmt: skip
    gather_servers(fleet)
    row = fleet.requests().set_index("request_id").loc[late["request_id"]]
    assert row.server == "server-1" and row.finish_reason == late["finish_reason"]
    assert late["request_id"] not in set(first.table("client").request_id)


def test_what_needs_the_steps_of_one_server_names_the_runs_of_the_servers(fleet, tmp_path):
    with pytest.raises(RunDataError, match=r"a replay is of one server; name the run of one: .*server-0, .*server-1"):
        refuse_fleet(fleet, "a replay")
    refuse_fleet(synthetic_run(tmp_path / "one", requests=5), "a replay")


def test_a_server_of_a_fleet_is_diagnosed_like_a_run_of_its_own(fleet):
    states = [diagnose(member).state for member in servers_of(fleet)]
    assert states[0] != "overloaded" and states[1] == "overloaded"
