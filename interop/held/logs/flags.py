"""Command lines of servers: in a shell, in a compose file, in Kubernetes' args."""

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from sojourn.interop.held.given import Given
from sojourn.interop.held.held import Held, Server, Setting
from sojourn.interop.held.literals import found_in


class Command(NamedTuple):
    """How a server is started, and its short options."""

    server: Server
    pattern: re.Pattern[str]
    short: dict[str, str]


COMMANDS = (
    Command("vllm", re.compile(r"\bvllm serve\b|vllm\.entrypoints\.\S*api_server|vllm/vllm-\S+|vllm-openai\S*"),
            {"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size",
             "-q": "quantization", "-O": "optimization_level"}),
    Command("sglang", re.compile(r"sglang\.launch_server|\bsglang serve\b|lmsysorg/sglang\S*"),
            {"--tp": "tp_size", "--dp": "dp_size", "--ep": "ep_size", "--pp": "pp_size"}),
    Command("llama.cpp", re.compile(r"\bllama-server\b|llama\.cpp:\S*server\S*"),
            {"-c": "ctx_size", "-np": "parallel", "-ngl": "n_gpu_layers", "-b": "batch_size", "-ub": "ubatch_size",
             "-fa": "flash_attn", "-t": "threads", "-m": "model", "-ctk": "cache_type_k", "-ctv": "cache_type_v",
             "-sm": "split_mode", "-ts": "tensor_split", "-hf": "hf_repo", "-cb": "cont_batching"}),
    Command("tensorrt-llm", re.compile(r"\btrtllm-serve\b"), {}),
    Command("tgi", re.compile(r"\btext-generation-launcher\b|text-generation-inference:\S+"), {}),
)  # fmt: skip
OF_A_LOG = re.compile(r"\b(?:INFO|WARNING|ERROR|DEBUG)\b|\.py:\d+|Warning: |\d\d:\d\d:\d\d")
END = re.compile(r"^(?:[|;&]+|\d?>+.*|<)$")
ITEM = re.compile(r"^\s*-\s+(?P<item>.+?)\s*$")
SECRET = re.compile(r"key|token$|password|secret", re.IGNORECASE)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
WRITTEN = re.compile(r"(?:^|\s|\"|'|\[)(?:--[a-z][\w\-]+|-[a-z]{1,3}\b)")
FACTS = {
    ("enforce_eager", True): "no graph is used: each step launches its kernels one by one",
    ("disable_cuda_graph", True): "no graph is used: each step launches its kernels one by one",
    ("enable_prefix_caching", False): "the prefix cache is off: equal beginnings of prompts are computed again",
    ("disable_radix_cache", True): "the prefix cache is off: equal beginnings of prompts are computed again",
    ("disable_log_stats", True): "the log has no figures, and /metrics lacks most of them",
}  # fmt: skip
MISSING = "what happens under load: these are flags only; give the log or a page of /metrics, too"


def recognises(given: Given) -> bool:
    return any(True for _ in _commands(given.plain))


def read(given: Given) -> list[Held]:
    found = []
    for command, tokens in _commands(given.plain):
        settings = dict(_settings(tokens, command.short))
        notes = [f"{_flag(name, value)}: {words}" for (name, value), words in FACTS.items()
                 if settings.get(name) == value]  # fmt: skip
        found.append(Held(kind=f"flags of {command.server}", name=given.name, server=command.server, settings=settings,
                          notes=notes, missing=[MISSING]))  # fmt: skip
    return found


def _flag(name: str, value: Setting) -> str:
    return f"--{'no-' if value is False else ''}{name.replace('_', '-')}"


def _commands(text: str) -> Iterator[tuple[Command, list[str]]]:
    """Each command with the words behind it."""
    if not any(found_in(command.pattern, text) for command in COMMANDS):
        return
    lines = text.replace("\\\n", " ").split("\n")
    for place, line in enumerate(lines):
        if len(line) > 20_000 or line.lstrip().startswith("#") or OF_A_LOG.search(line):
            continue
        for command in COMMANDS:
            if (head := command.pattern.search(line)) is None:
                continue
            words = _words(line[head.end() :])
            if not any(word.startswith("-") for word in words):
                words = _listed(lines[place + 1 : place + 80]) if _is_list_ahead(line, head) else words
            if any(word.startswith("-") for word in words):
                yield command, words
            break


def _is_list_ahead(line: str, head: "re.Match[str]") -> bool:
    """An image, or a command in a list: its arguments stand in the lines below."""
    return "image:" in line or ITEM.match(line) is not None or line[: head.start()].rstrip().endswith(("[", '"', ":"))


def _listed(lines: list[str]) -> list[str]:
    """The items of the lists of `args:` or `command:` below, up to the next image."""
    words: list[str] = []
    is_inside = False
    for line in lines:
        if "image:" in line:
            break
        if re.match(r"\s*(?:- )?(?:args|command):", line):
            is_inside = True
            words += _words(line.partition(":")[2].strip().lstrip(">|").strip("[]").replace(",", " "))
        elif is_inside and (item := ITEM.match(line)) is not None:
            words += _words(item["item"].rstrip(","))
        elif is_inside and re.match(r"\s+--\S", line):
            words += _words(line)
        elif is_inside and line.strip() and not line.strip().startswith("#"):
            is_inside = False
    return words


def _words(text: str) -> list[str]:
    """As a shell splits them, up to a pipe or the next command."""
    try:
        parts = shlex.split(text, comments=True)
    except ValueError:
        parts = [part.strip("\"'") for part in text.split()]
    found: list[str] = []
    for part in parts:
        if END.match(part):
            break
        found.append(part.rstrip(";"))
        if part.endswith(";"):
            break
    return found


def _settings(words: list[str], short: dict[str, str]) -> Iterator[tuple[str, Setting]]:
    place = 0
    words = words[2:] if words[:2] == ["vllm", "serve"] else words
    if words and not words[0].startswith("-"):
        yield "model", words[0]
    while place < len(words):
        word, place = words[place], place + 1
        if not re.match(r"--?[A-Za-z]", word):
            continue
        option, sign, value = word.partition("=")
        if option not in short and not option.startswith("--"):
            continue
        if not sign and place < len(words) and (not words[place].startswith("-") or NUMBER.fullmatch(words[place])):
            sign, value, place = "=", words[place], place + 1
        name = short.get(option, option.lstrip("-").replace("-", "_"))
        if SECRET.search(name):
            continue
        if not sign and name.startswith("no_"):
            yield name.removeprefix("no_"), False
        else:
            yield name, _value(value) if sign else True


def _value(text: str) -> Setting:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
    return text
