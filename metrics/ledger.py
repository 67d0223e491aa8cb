"""The accounts that a request's time is booked to.

Every nanosecond between the moment when a client meant to send a request and the moment when it read the last byte
belongs to exactly one account, and an account belongs to one lifecycle. Each account is booked from two clock readings
of its own; what no account explains is shown as `unaccounted`, never spread over the others.

`python -m sojourn.metrics.ledger` prints the table of docs/life_of_a_request.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

LIFECYCLES = ("token", "compute", "memory", "request")
# Told apart also by the colour-blind (Okabe and Ito); the same in the app, the report and the dashboards.
COLOURS = {"token": "#E69F00", "compute": "#0072B2", "memory": "#009E73", "request": "#CC79A7", "client": "#8C8C8C"}


class Account(IntEnum):
    """Position of an account in a ledger (`list[int]`, nanoseconds). New accounts stand at the end."""

    CLIENT_LAG = 0
    CLIENT_NETWORK = 1
    TOKEN_ENCODE = 2
    REQUEST_ADMISSION = 3
    REQUEST_QUEUE = 4
    MEMORY_BLOCKED = 5
    COMPUTE_PREFILL = 6
    REQUEST_INTERFERENCE = 7
    MEMORY_PREEMPTED = 8
    MEMORY_RECOMPUTE = 9
    COMPUTE_DECODE = 10
    COMPUTE_HOST = 11
    TOKEN_SAMPLE = 12
    TOKEN_DECODE = 13
    REQUEST_STREAM = 14
    REQUEST_LOST = 15
    REQUEST_QUOTA = 16
    REQUEST_MODERATION = 17
    COMPUTE_DRAFT = 18
    MEMORY_ADAPTER_LOAD = 19
    MEMORY_LOAD = 20
    MEMORY_STORE = 21
    REQUEST_COLD_START = 22
    COMPUTE_COMMUNICATION = 23
    COMPUTE_BUBBLE = 24
    MEMORY_TRANSFER = 25
    REQUEST_ROUTING = 26
    REQUEST_REMOTE_PREFILL = 27
    COMPUTE_STALL = 28


@dataclass(frozen=True, slots=True)
class AccountInfo:
    """What an account is called, who owns it and when time goes there."""

    account: Account
    lifecycle: str  # one of LIFECYCLES, or "client"
    noun: str
    booked_when: str

    @property
    def name(self) -> str:
        return f"{self.lifecycle}.{self.noun}"

    @property
    def column(self) -> str:
        """Suffix of its columns: `ledger_<column>` up to the last byte, `ttft_<column>` up to the first text."""
        return f"{self.lifecycle}_{self.noun}_ns"


ACCOUNTS: tuple[AccountInfo, ...] = (
    AccountInfo(Account.CLIENT_LAG, "client", "lag", "intended send → actual send: the load generator's own lateness"),
    AccountInfo(
        Account.CLIENT_NETWORK, "client", "network", "sent → in the server's socket, and written → read by the client"
    ),
    AccountInfo(Account.TOKEN_ENCODE, "token", "encode", "parse, chat template, tokenize"),
    AccountInfo(
        Account.REQUEST_ADMISSION,
        "request",
        "admission",
        "in the socket while the front's event loop is busy; hand-over to the core's loop, between two steps",
    ),
    AccountInfo(
        Account.REQUEST_QUEUE,
        "request",
        "queue",
        "waiting for a batch slot, the token budget, its first choice (n above 1) or a grammar",
    ),
    AccountInfo(Account.MEMORY_BLOCKED, "memory", "blocked", "waiting for KV blocks"),
    AccountInfo(Account.COMPUTE_PREFILL, "compute", "prefill", "the request's own prompt work"),
    AccountInfo(
        Account.REQUEST_INTERFERENCE, "request", "interference", "prompt work of other requests in the same steps"
    ),
    AccountInfo(Account.MEMORY_PREEMPTED, "memory", "preempted", "preempted → scheduled again"),
    AccountInfo(Account.MEMORY_RECOMPUTE, "memory", "recompute", "computing again KV that was there before"),
    AccountInfo(Account.COMPUTE_DECODE, "compute", "decode", "the request's own decode work"),
    AccountInfo(
        Account.COMPUTE_HOST,
        "compute",
        "host",
        "schedule, prepare, launch, commit: host time that the device does not hide",
    ),
    AccountInfo(Account.TOKEN_SAMPLE, "token", "sample", "logits → id: penalties, truncation, draw"),
    AccountInfo(Account.TOKEN_DECODE, "token", "decode", "ids → text"),
    AccountInfo(
        Account.REQUEST_STREAM, "request", "stream", "hand-over to the front, and text ready → written to the socket"
    ),
    AccountInfo(Account.REQUEST_LOST, "request", "lost", "in a core that died"),
    AccountInfo(Account.REQUEST_QUOTA, "request", "quota", "waiting until the tenant's limits have room"),
    AccountInfo(Account.REQUEST_MODERATION, "request", "moderation", "checking the input or output against policies"),
    AccountInfo(Account.COMPUTE_DRAFT, "compute", "draft", "proposing tokens that the next step verifies"),
    AccountInfo(Account.MEMORY_ADAPTER_LOAD, "memory", "adapter_load", "reading its LoRA adapter into host memory"),
    AccountInfo(
        Account.MEMORY_LOAD,
        "memory",
        "load",
        "waiting until KV of a slower tier is read; copies from host memory in a step",
    ),
    AccountInfo(Account.MEMORY_STORE, "memory", "store", "copies of KV to a slower tier in a step"),
    AccountInfo(Account.REQUEST_COLD_START, "request", "cold_start", "waiting until its model is loaded or woken"),
    AccountInfo(
        Account.COMPUTE_COMMUNICATION,
        "compute",
        "communication",
        "exchanges between the ranks of a parallel group that no computation hides",
    ),
    AccountInfo(Account.COMPUTE_BUBBLE, "compute", "bubble", "the first pipeline stage waits for those behind it"),
    AccountInfo(
        Account.MEMORY_TRANSFER,
        "memory",
        "transfer",
        "waiting for KV from a prefill server; on that server, until it is stored for the decode server",
    ),
    AccountInfo(
        Account.REQUEST_ROUTING,
        "request",
        "routing",
        "sent to a router → in the server's socket; only of several servers on one host",
    ),
    AccountInfo(
        Account.REQUEST_REMOTE_PREFILL,
        "request",
        "remote_prefill",
        "waiting until a prefill server has computed the prompt, where both got the call at once",
    ),
    AccountInfo(
        Account.COMPUTE_STALL,
        "compute",
        "stall",
        "beyond the bound of the step model: the engine stood still; records show it",
    ),
)
ACCOUNT_BY_NAME = {info.name: info for info in ACCOUNTS}
CLIENT_ACCOUNTS = tuple(info for info in ACCOUNTS if info.lifecycle == "client")
SERVER_ACCOUNTS = tuple(info for info in ACCOUNTS if info.lifecycle != "client")
TEXT_ACCOUNTS = ("token.encode", "token.decode")  # of the front, beside the steps

# Parts of a step that each of its requests pays in full.
STEP_PARTS = (
    Account.TOKEN_SAMPLE, Account.COMPUTE_DRAFT, Account.MEMORY_LOAD, Account.MEMORY_STORE,
    Account.COMPUTE_COMMUNICATION, Account.COMPUTE_BUBBLE,
)  # fmt: skip
# The accounts of the core's decode clock, in its order: all requests that decode in a step pay the same.
CLOCKED = (Account.REQUEST_INTERFERENCE, Account.COMPUTE_DECODE, Account.COMPUTE_HOST, *STEP_PARTS)

# Of a request in a step, by the kind of its work.
OWN_WORK = {
    "prefill": Account.COMPUTE_PREFILL, "recompute": Account.MEMORY_RECOMPUTE, "decode": Account.COMPUTE_DECODE,
    "verify": Account.COMPUTE_DECODE,
}  # fmt: skip
_WAITS = {"kv_blocks": Account.MEMORY_BLOCKED, "kv_transfer": Account.MEMORY_TRANSFER}

UNACCOUNTED = "unaccounted"
CLOSURE_SHARE = 0.01  # of a request's latency, what may stay unaccounted
CLOSURE_NS = 1_000_000  # that may stay unaccounted at most, of any latency


def new_ledger() -> list[int]:
    """An empty ledger: nanoseconds by `Account`."""
    return [0] * len(ACCOUNTS)


def wait_account(reason: str, preempted: bool = False) -> Account:
    """Of a request without a place, by the reason for which the head of the queue waits."""
    return Account.MEMORY_PREEMPTED if preempted else _WAITS.get(reason, Account.REQUEST_QUEUE)


def ledger_at(base: Sequence[int], clock_ns: Sequence[int]) -> list[int]:
    """The ledger at a moment of the decode clock; `base` is the ledger without the clock."""
    ledger = list(base)
    book(ledger, CLOCKED, clock_ns)
    return ledger


def book(ledger: list[int], accounts: Sequence[Account], ns: Sequence[int]) -> None:
    """Adds nanoseconds to each of the accounts."""
    for account, part_ns in zip(accounts, ns, strict=True):
        ledger[account] += part_ns


def closes(unaccounted_ns: int, latency_ns: int) -> bool:
    """Whether what is left over is within the bound that closure promises: 1% of the latency, and 1 ms."""
    return abs(unaccounted_ns) <= min(CLOSURE_SHARE * latency_ns, CLOSURE_NS)


def account_table() -> str:
    """Markdown, by lifecycle."""
    ordered = sorted(ACCOUNTS, key=lambda info: ("client", *LIFECYCLES).index(info.lifecycle))
    lines = [f"| `{info.name}` | {info.booked_when} |" for info in ordered]
    return "\n".join(["| account | time goes there |", "|---|---|", *lines])


if __name__ == "__main__":
    print(account_table())
