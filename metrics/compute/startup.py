"""Where the time of a core's start goes: each nanosecond from the front's wish until it read Ready, in one phase."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

# Phase → when its time passes. They exclude each other, and stand in the order of a start.
PHASES = {
    "process": "the system starts the process, until its first line of ours",
    "imports": "torch, and with it all that computes",
    "sockets": "the front binds its sockets, hands over the settings, and the core connects",
    "kernels": "C++ kernels are built or loaded, and backends chosen",
    "memory_plan": "config.json and the headers of the weights are checked, and the memory is planned",
    "reference": "predictions of the reference weights (weights_reference)",
    "read_page_cache": "weights that the page cache of the system held are read",
    "read_disk": "weights that it did not hold are read",
    "conversion": "weights are cast, packed or quantised, and copied to the device",
    "memory_probe": "the largest steps are computed, to measure their memory (CUDA)",
    "capture": "CUDA graphs are captured",
    "warm_up": "steps are computed to learn their duration",
    "group": "the first rank of a parallel group waits for the other ones: they start, meet, plan and load",
    "setup": "tokenizer, tables, sampler, drafter, KV pool and scheduler are made",
    "ready": "Ready travels to the front, and waits until its event loop reads it",
}
TIERS = ("page_cache", "disk")
WHILE_SPARE = ("process", "imports")  # phases that a spare core has behind it


class Startup(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a core. Times are of the monotonic clock, which the processes of a machine share."""

    begin_ns: int  # the front wanted a core
    end_ns: int
    phases_ns: dict[str, int]  # by PHASES, without those that took nothing
    read_bytes: dict[str, int]  # of weights, by TIERS
    spared_ns: dict[str, int] = {}  # by WHILE_SPARE: what the process had done before it was wanted

    @property
    def total_ns(self) -> int:
        return self.end_ns - self.begin_ns

    @property
    def unaccounted_ns(self) -> int:
        return self.total_ns - sum(self.phases_ns.values())

    @property
    def weight_bytes(self) -> int:
        return sum(self.read_bytes.values())

    def bytes_per_second(self, tier: str) -> float | None:
        """None where nothing was read from it."""
        took_ns = self.phases_ns.get(f"read_{tier}", 0)
        return self.read_bytes.get(tier, 0) / took_ns * 1e9 if took_ns and self.read_bytes.get(tier) else None

    def until(self, now_ns: int) -> "Startup":
        """With the time from the core's last reading until the front's as phase `ready`."""
        ready_ns = self.phases_ns.get("ready", 0) + now_ns - self.end_ns
        return msgspec.structs.replace(self, end_ns=now_ns, phases_ns=self.phases_ns | {"ready": ready_ns})

    def sentence(self) -> str:
        """On one line: the sum, the phases by length, and the speed of reading."""
        longest = sorted(self.phases_ns.items(), key=lambda item: -item[1])
        parts = [f"{name.replace('_', ' ')} {ns / 1e9:.2f} s" for name, ns in longest if ns >= SHOWN_NS]
        rest_ns = self.total_ns - sum(ns for _, ns in longest if ns >= SHOWN_NS)
        parts += [f"all else {rest_ns / 1e9:.2f} s"] if parts else []
        whole = f"start-up: {self.total_ns / 1e9:.2f} s" + (f" ({', '.join(parts)})" if parts else "")
        read = [
            f"{self.read_bytes[tier] / MIB:,.0f} MiB of weights from the {tier.replace('_', ' ')} at {rate / MIB:,.0f} "
            "MiB/s"
            for tier in TIERS
            if (rate := self.bytes_per_second(tier)) is not None
        ]
        spared = sum(self.spared_ns.values())
        read += [f"a spare process spared {spared / 1e9:.2f} s"] if spared else []
        return "; ".join([whole, *read])


SHOWN_NS = 10_000_000
MIB = 1 << 20


class StartupClock:
    """Books the time of a start. At each moment exactly one phase goes on, so nothing is left over."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns):
        self._clock_ns = clock_ns
        self._begin_ns = self._since_ns = clock_ns()
        self._phase = "setup"
        self._phases_ns: dict[str, int] = {}
        self._read_bytes: dict[str, int] = {}
        self._spared_ns: dict[str, int] = {}

    @classmethod
    def of_process(
        cls,
        wanted_ns: int,
        spawned_ns: int,
        first_line_ns: int,
        imported_ns: int,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> "StartupClock":
        """Of a process that was spawned, ran its first line, and had its imports at these moments. What it did before
        it was wanted, as a spare, is no time of this start."""
        startup = cls(clock_ns)
        startup._begin_ns = wanted_ns
        spans = {"process": (min(spawned_ns, wanted_ns), first_line_ns), "imports": (first_line_ns, imported_ns)}
        for phase, (begin_ns, end_ns) in spans.items():
            own_ns = max(0, end_ns - max(begin_ns, wanted_ns))
            startup._phases_ns[phase] = own_ns
            startup._spared_ns[phase] = end_ns - begin_ns - own_ns
        startup._since_ns, startup._phase = max(imported_ns, wanted_ns), "sockets"
        return startup

    def enter(self, phase: str) -> None:
        """From now on this phase goes on."""
        now_ns = self._clock_ns()
        self._phases_ns[self._phase] = self._phases_ns.get(self._phase, 0) + now_ns - self._since_ns
        self._phase, self._since_ns = phase, now_ns

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """This phase, and then again the one before."""
        before = self._phase
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    @contextmanager
    def reading(self, tier: str, num_bytes: int) -> Iterator[None]:
        """Weights of so many bytes are read from one of TIERS."""
        with self.phase(f"read_{tier}"):
            yield
        self._read_bytes[tier] = self._read_bytes.get(tier, 0) + num_bytes

    def startup(self) -> Startup:
        """All until now."""
        self.enter(self._phase)
        phases_ns = {phase: self._phases_ns[phase] for phase in PHASES if self._phases_ns.get(phase)}
        spared_ns = {phase: ns for phase, ns in self._spared_ns.items() if ns}
        return Startup(
            begin_ns=self._begin_ns, end_ns=self._since_ns, phases_ns=phases_ns, read_bytes=dict(self._read_bytes),
            spared_ns=spared_ns,
        )  # fmt: skip


def startups_of(meta: Mapping[str, Any]) -> list[Startup]:
    """The starts that run.json tells; none where it is of another version."""
    try:
        return msgspec.convert(meta.get("startups") or [], list[Startup])
    except msgspec.ValidationError:
        return []
