"""What a command line starts: which server, at which address, and what it takes to see inside it.

Flags and default ports are those of vLLM 0.32, SGLang 0.5.23 and llama.cpp's server.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sojourn.metrics.errors import InputError

SECRETS = re.compile(r"(?i)(key|token|secret|password)")
EVERY_ADDRESS = ("", "0.0.0.0", "::", "[::]")


@dataclass(frozen=True, slots=True)
class Kind:
    """A server that is known. `starts`: whether words, without flags' values, start it."""

    name: str
    title: str
    port: int
    starts: Callable[[Sequence[str]], bool]
    metrics_flag: str = ""  # without which it has no /metrics
    probe_flags: tuple[str, ...] = ()
    takes_probe: bool = False


def _runs(words: Sequence[str], program: str, *verb: str) -> bool:
    """Whether the program is among the words, with these right behind it."""
    return any(
        word.rsplit("/", 1)[-1] == program and tuple(words[place + 1 : place + 1 + len(verb)]) == verb
        for place, word in enumerate(words)
    )


KINDS = (
    Kind("vllm", "vLLM", 8000,
         lambda words: "vllm.entrypoints.openai.api_server" in words or _runs(words, "vllm", "serve"),
         probe_flags=("--scheduler-cls", "sojourn_probe.vllm.Scheduler", "--middleware",
                      "sojourn_probe.vllm.Middleware"), takes_probe=True),
    Kind("sglang", "SGLang", 30000,
         lambda words: "sglang.launch_server" in words or _runs(words, "sglang", "serve"),
         metrics_flag="--enable-metrics", takes_probe=True),
    Kind("llama.cpp", "llama.cpp", 8080, lambda words: _runs(words, "llama-server"), metrics_flag="--metrics"),
    Kind("sojourn", "Sojourn", 8000, lambda words: _runs(words, "sojourn", "serve")),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A command that starts a server. `url`: where its /metrics will be."""

    words: tuple[str, ...]
    kind: Kind | None
    url: str

    @property
    def title(self) -> str:
        return self.kind.title if self.kind else self.words[0].rsplit("/", 1)[-1]


def read_command(words: Sequence[str], url: str | None = None) -> ServerCommand:
    """`url`: the address, where the user names it. Raises InputError where neither he nor the command says it."""
    if not words:
        raise InputError("no command is given; write it behind --: sojourn record -- vllm serve MODEL")
    kind = next((each for each in KINDS if each.starts(words)), None)
    if url is None:
        if kind is None:
            known = ", ".join(each.title for each in KINDS)
            raise InputError(
                f"{words[0]} starts no server that is known here ({known}): name its address with --base-url"
            )
        url = _address(words, kind)
    return ServerCommand(tuple(words), kind, url)


def with_metrics(command: ServerCommand) -> ServerCommand:
    """The command, with the flag that a /metrics takes."""
    flag = command.kind.metrics_flag if command.kind else ""
    if not flag or flag in command.words:
        return command
    return replace(command, words=(*command.words, flag))


def with_probe(command: ServerCommand) -> ServerCommand:
    """The command, with the probe's flags. Raises InputError where the command has such a flag of its own."""
    flags = command.kind.probe_flags if command.kind else ()
    taken = [flag for flag in flags[::2] if any(word == flag or word.startswith(f"{flag}=") for word in command.words)]
    if "--scheduler-cls" in taken:
        raise InputError("the command names a scheduler of its own, which the probe would replace; add --no-probe")
    return replace(command, words=(*command.words, *flags))


def without_secrets(words: Sequence[str]) -> list[str]:
    """The words as they may be written down: values of keys and tokens are ***."""
    shown: list[str] = []
    hides_next = False
    for word in words:
        flag, equals, _ = word.partition("=")
        if hides_next and not word.startswith("-"):
            shown.append("***")  # a flag may take several keys
            continue
        if equals and (flag.startswith("-") or flag.isupper()) and _is_secret(flag):
            shown.append(f"{flag}=***")
        else:
            shown.append(word)
        hides_next = word.startswith("-") and not equals and _is_secret(word)
    return shown


def _is_secret(name: str) -> bool:
    """`--max-num-batched-tokens` and its like are numbers, `--tokenizer` is a path: no secrets."""
    return bool(SECRETS.search(name)) and not re.search(r"tokens|tokenizer|token-", name)


def _address(words: Sequence[str], kind: Kind) -> str:
    host, port = _value(words, "--host") or "", _value(words, "--port") or str(kind.port)
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"--port {port} is no port: name the address with --base-url")
    host = "127.0.0.1" if host in EVERY_ADDRESS else host
    return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{port}"


def _value(words: Sequence[str], flag: str) -> str | None:
    """The value of the last such flag, as argparse takes it."""
    found = None
    for place, word in enumerate(words):
        if word == flag and place + 1 < len(words):
            found = words[place + 1]
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found
