"""A delay of known length is booked where it was planted, and nowhere else: each place beside a control without it.

Sleeps end late on a busy machine, so a plant is as long as the clock saw it; and each run is made
three times, because a machine that takes the server off its core between two readings spoils one of them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from gevent.monkey import get_original

from sojourn.loadgen.client.connection import Connection
from sojourn.loadgen.client.outgoing import Outgoing
from sojourn.loadgen.client.socket_loop import SocketLoop
from sojourn.metrics.ledger import ACCOUNTS, SERVER_ACCOUNTS, closes
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.join import adopt
from tests.engine.server.planted import Plants, planted_server
from tests.engine.server_process import Running, wait_for
from tests.engine.sockets import LARGE_ANSWER, call
from tests.loadgen.scenarios import replay, scenario

pytestmark = pytest.mark.slow  # half a minute of sleeps; what is booked at all is in test_closure.py
REPEATS = 3
TOLERANCE = 0.05  # of the planted length


@dataclass(frozen=True)
class Plant:
    """A place, the delay of each call there, and the accounts that it belongs to."""

    place: str
    seconds: float
    accounts: tuple[str, ...]
    stage: str | None  # of the steps, if it is the core's
    body: dict

    @property
    def name(self) -> str:
        return self.place + ("-streamed" if self.body.get("stream") else "")


STREAMED, WHOLE = {"stream": True}, {"stream": False}
PLANTS = [
    Plant("encode", 0.3, ("token.encode",), None, WHOLE | {"max_tokens": 2}),
    Plant("schedule", 0.08, ("compute.host",), "schedule", STREAMED | {"max_tokens": 4}),
    Plant("forward", 0.08, ("compute.prefill", "compute.decode"), "wait", STREAMED | {"max_tokens": 4}),
    Plant("sample", 0.08, ("token.sample",), "sample", STREAMED | {"max_tokens": 4}),
    # The core goes on meanwhile: what its next tokens take, a few milliseconds, hides behind these two.
    Plant("decode", 0.2, ("token.decode",), None, STREAMED | {"max_tokens": 3}),
    Plant("write", 0.3, ("request.stream",), None, STREAMED | {"max_tokens": 1}),  # more may share a write
    Plant("write", 0.3, ("request.stream",), None, WHOLE | {"max_tokens": 2}),
]


def ask(server: Running, name: str, body: dict) -> None:
    asked = {"model": "planted", "prompt": "The function returns", "temperature": 0.8, "seed": 1, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=asked | body, headers={"x-request-id": name}, timeout=30)
    assert answer.status_code == 200, answer.text


def run_all(server: Running, plants: Plants) -> dict[str, list[int]]:
    """Asks once without and once with each delay, REPEATS times; name → what was slept, in nanoseconds."""
    slept: dict[str, list[int]] = {plant.name: [] for plant in PLANTS}
    ask(server, "warm-up", {"max_tokens": 4})
    for repeat in range(REPEATS):
        for plant in PLANTS:
            ask(server, f"{plant.name}-control-{repeat}", plant.body)
            before_ns = plants.slept_ns(plant.place)
            with plants.planted(plant.place, plant.seconds):
                ask(server, f"{plant.name}-planted-{repeat}", plant.body)
            slept[plant.name].append(plants.slept_ns(plant.place) - before_ns)
    return slept


@dataclass(frozen=True)
class SlowReader:
    """A client that read nothing for a while, and one that was served meanwhile."""

    began_again_ns: int
    last_byte_ns: int
    others: int


def read_slowly(server: Running, pause_s: float) -> SlowReader:
    """Reads nothing until all has been computed, and a while more."""
    with call(server, "slow-reader", LARGE_ANSWER | {"model": "planted"}, small=True) as connection:
        assert connection.recv(1)
        ask(server, "beside-slow-reader-0", STREAMED | {"max_tokens": 20})
        wait_for(lambda: server.gauge("sojourn_request_running") == 0)
        end, others = time.monotonic() + pause_s, 1
        while time.monotonic() < end:
            ask(server, f"beside-slow-reader-{others}", STREAMED | {"max_tokens": 20})
            others += 1
            time.sleep(0.2)
        began_again_ns = last_ns = time.monotonic_ns()
        while connection.recv(65_536):
            last_ns = time.monotonic_ns()
    return SlowReader(began_again_ns, last_ns, others)


@dataclass(frozen=True)
class Recorded:
    """What the server wrote down of all this."""

    slept_ns: dict[str, list[int]]
    slow_reader: SlowReader
    run: RunDirectory
    folder: Path

    def row(self, name: str):
        requests = self.run.table("requests")
        (row,) = requests[requests.request_id == name].itertuples()
        return row

    def stage_ns(self, row, stage: str) -> int:
        steps = self.run.table("steps")
        own = steps[steps.step.between(row.first_step, row.last_step)]
        return int(own[f"stage_{stage}_ns"].sum())


LATE_S, SLOW_READ_S = 0.3, 0.3


_sleep = get_original("time", "sleep")  # of the loop's own thread, whatever gevent has replaced


def begin_late(loop: SocketLoop, outgoing: Outgoing) -> None:
    _sleep(LATE_S)
    _start_request(loop, outgoing)


def receive_late(connection: Connection) -> tuple[bytes, list]:
    """Reads what has come a while ago, from a kernel that stamps nothing: its stamp would be right all the same."""
    _sleep(SLOW_READ_S)
    return _receive(connection)[0], []


_start_request, _receive = SocketLoop._start_request, Connection.receive


def replay_planted(server: Running, folder: Path) -> None:
    """The load generator, as it is, dispatching late and reading slowly."""
    for name in ("control", "late", "slow-read"):
        with pytest.MonkeyPatch.context() as patch:
            if name == "late":
                patch.setattr(SocketLoop, "_start_request", begin_late)
            elif name == "slow-read":
                patch.setattr(Connection, "receive", receive_late)
            chosen = scenario(
                {"process": "times", "times_s": [0, 0.5]}, [{"klass": name, "prompt_tokens": 8, "output_tokens": 4}],
                name=name, target={"stream": False}, objectives=[{"e2e_ms": 500, "source": "made up"}],
            )  # fmt: skip
            replay(chosen, server.url, folder / name, "planted", name)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Recorded:
    return record(tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="module")
def overlapped(tmp_path_factory) -> Recorded:
    return record(tmp_path_factory.mktemp("overlapped"), "--overlap", "on")


def record(folder: Path, *options: str) -> Recorded:
    named = ("--served-model-name", "planted", "--run-dir", str(folder / "run"))
    with planted_server(folder, *named, *options) as (server, plants):
        slept_ns = run_all(server, plants)
        slow_reader = read_slowly(server, 1.0)
        replay_planted(server, folder)
    return Recorded(slept_ns, slow_reader, RunDirectory(folder / "run"), folder)


def check(recorded: Recorded, plant: Plant, *, overlap: bool = False) -> None:
    """Noise only adds: an account moved by the least that it has with the plant, less the least that it has without.

    Where steps overlap the host hides behind a device that is slower now: others may shrink, and a stage is the host's.
    """
    slept = recorded.slept_ns[plant.name]
    controls, planted = (
        [recorded.row(f"{plant.name}-{kind}-{repeat}") for repeat in range(REPEATS)] for kind in ("control", "planted")
    )
    assert min(slept) >= 200e6, "a plant that is too short to be seen"
    bound_ns, found = TOLERANCE * min(slept), {}
    for info in SERVER_ACCOUNTS:
        column = f"ledger_{info.column}"
        if info.name not in plant.accounts:
            more_ns = min(getattr(row, column) for row in planted) - min(getattr(row, column) for row in controls)
            if more_ns > bound_ns or (more_ns < -bound_ns and not overlap):
                found[info.name] = f"{more_ns / 1e6:.1f} ms"

    def compare(name: str, spent: Callable[[Any], int]) -> None:
        """What the plant added, beside what was slept in that very run."""
        usual_ns = min(map(spent, controls))
        off_ns = min((spent(row) - usual_ns - ns for row, ns in zip(planted, slept, strict=True)), key=abs)
        if abs(off_ns) > bound_ns:
            found[name] = f"{off_ns / 1e6:.1f} ms beside {[round(ns / 1e6, 1) for ns in slept]}"

    columns = [f"ledger_{info.column}" for info in SERVER_ACCOUNTS if info.name in plant.accounts]
    compare("its own", lambda row: sum(getattr(row, column) for column in columns))
    if plant.stage is not None and not overlap:
        compare(f"stage {plant.stage}", lambda row: recorded.stage_ns(row, plant.stage))
    assert not found


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_planted_delay_is_booked_where_it_was_planted_and_nowhere_else(recorded, plant):
    check(recorded, plant)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant", [plant for plant in PLANTS if plant.place != "schedule"], ids=lambda plant: plant.name
)  # a slow scheduler hides behind the device, as it should
def test_a_planted_delay_is_booked_where_it_was_planted_where_steps_overlap(overlapped, plant):
    check(overlapped, plant, overlap=True)


@pytest.mark.parametrize("plant", [PLANTS[0], PLANTS[2], PLANTS[4], PLANTS[5]], ids=lambda plant: plant.name)
def test_the_ledger_to_the_first_text_has_the_share_that_came_before_it(recorded, plant):
    """The tokenizer's delay is all before the first text; of the others' calls one is."""
    shares = {"encode": 1, "forward": 4, "decode": 3, "write": 2}  # a text, and what sums the call up
    columns = [f"ttft_{info.column}" for info in SERVER_ACCOUNTS if info.name in plant.accounts]

    def least_ns(kind: str) -> int:
        rows = [recorded.row(f"{plant.name}-{kind}-{repeat}") for repeat in range(REPEATS)]
        return min(sum(getattr(row, column) for column in columns) for row in rows)

    share = (least_ns("planted") - least_ns("control")) / min(recorded.slept_ns[plant.name])
    assert share * shares[plant.place] == pytest.approx(1, abs=0.15)  # a quarter of the plant, on a busy machine


def test_a_slow_reader_pays_for_itself_and_nobody_beside_it_does(recorded):
    slow, row = recorded.slow_reader, recorded.row("slow-reader")
    waited_ns = slow.began_again_ns - row.token_ns[-1]  # all was ready, and the client did not read
    assert waited_ns > 5e8, "the pause was over before the tokens were"
    assert row.ledger_request_stream_ns >= (1 - TOLERANCE) * waited_ns
    # ... until the last piece found room: what the kernel holds by then is no more the server's.
    assert row.ledger_request_stream_ns <= (1 + TOLERANCE) * (slow.last_byte_ns - row.token_ns[-1])
    latency_ns = row.written_ns - row.arrived_ns
    left_ns = latency_ns - sum(getattr(row, f"ledger_{info.column}") for info in SERVER_ACCOUNTS)
    assert closes(left_ns, latency_ns)
    beside = [recorded.row(f"beside-slow-reader-{index}").ledger_request_stream_ns for index in range(slow.others)]
    assert len(beside) >= 2 and sorted(beside)[len(beside) // 2] < TOLERANCE * waited_ns


def joined(recorded: Recorded, name: str):
    """The requests of a replay, as client and server saw them."""
    folder = recorded.folder / name
    sources = {table: recorded.run.sources(table) for table in ("requests", "steps")}
    if not (folder / "requests.parts").exists():
        adopt(folder, sources, 0, time.monotonic_ns())
    return RunDirectory(folder).requests()


@pytest.mark.parametrize(
    ("name", "account", "planted_s"), [("late", "client_lag", LATE_S), ("slow-read", "client_network", SLOW_READ_S)]
)
def test_a_delay_of_the_client_is_booked_to_the_client(recorded, name, account, planted_s):
    control, planted = joined(recorded, "control"), joined(recorded, name)
    assert (planted.status == "ok").all() and len(planted) == 2
    for row in planted.itertuples():
        assert closes(row.unaccounted_ns, row.last_byte_ns - row.due_ns)
    more_ms = {
        info.column: (planted[f"ledger_{info.column}"].min() - control[f"ledger_{info.column}"].min()) / 1e6
        for info in ACCOUNTS
    }
    own_ms = more_ms.pop(f"{account}_ns")
    assert own_ms == pytest.approx(planted_s * 1e3, rel=TOLERANCE)
    assert all(abs(other) < TOLERANCE * planted_s * 1e3 for other in more_ms.values()), more_ms
