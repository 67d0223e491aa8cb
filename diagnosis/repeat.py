"""The command that makes a measurement: the recorded run once more, with one thing changed. Carried out as it is
printed, it answers the question that it is printed for; where no command does, there is none."""

import shlex
from collections.abc import Mapping
from itertools import pairwise
from urllib.parse import urlsplit

from sojourn.diagnosis.evidence import Client
from sojourn.metrics.prediction import settings_text, shown_setting
from sojourn.metrics.run.directory import section

START = "start the server"  # begins the words that say what a command needs first
RECORDS = "runs/server"  # where the printed commands have a server record
PROBES = {"vllm": "vllm", "sglang": "sglang"}  # source of a server → its name for `sojourn-probe`
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def rerun(facts: Client, *, rate_rps: float | None = None, **settings: object) -> str:
    """The line that repeats this run with other engine settings, or at another rate of requests; "" where no command
    can.

    It is the command in `run.json`, so that every other setting and the seed stay what they were.
    """
    arguments = _recorded(facts)
    if not arguments or (settings and arguments[1:2] != ["run"]):
        return ""
    if rate_rps is not None:
        stated = section(section(facts.meta, "scenario"), "arrivals").get("rate_rps")
        if not stated or not facts.offered_rps > 0:
            return ""  # its arrivals have no rate that an option changes
        rate = float(stated) * rate_rps / facts.offered_rps  # of sessions, where each arrival is one
        arguments = [*_without(arguments, "--rate"), "--rate", f"{rate:.3g}"]
    for name, value in settings.items():
        arguments = _without(arguments, "--set", f"{name}=")
        arguments += ["--set", shown_setting(name, value)]
    return shlex.join(arguments)


def with_settings(facts: Client, measurement: str, settings: Mapping[str, object]) -> tuple[str, str]:
    """The measurement with other settings of the engine, and its command. A server that runs already is started again
    by whoever started it: the words say with what, and the command sends the load."""
    arguments = _recorded(facts)
    if not settings or not arguments or arguments[1:2] == ["run"]:
        return measurement, rerun(facts, **settings)
    recorded = [word for option, word in pairwise(arguments) if option == "--server-run"]
    if len(recorded) > 1:
        return measurement, ""
    changed = settings_text(dict(settings))
    start, again = f"{measurement}: {START} again with {changed}", _without(arguments, "--server-run")
    if recorded:
        new = f"{recorded[0]}-2"
        start, again = f"{start} and records in {new}", [*again, "--server-run", new]
    return f"{start}, and repeat the load", shlex.join(again)


def with_records(facts: Client) -> tuple[str, str]:
    """The measurement that repeats a run, this time with the server's records of each request and step, and its
    command. Where the server has to be started in another way, or is on another host, the words say it."""
    arguments, same = _recorded(facts), "the same scenario with the server's records of each step"
    if arguments[1:2] == ["run"]:
        return same, rerun(facts, telemetry="full")
    start, url = _start(facts), str(section(facts.meta, "engine").get("base_url") or "")
    host = urlsplit(url).hostname
    if facts.measured_by == "server":
        words = f"its records of each step: {start}, and watch it with `--server-run {RECORDS}`"
        return words, shlex.join(["sojourn", "watch", url, "--server-run", RECORDS]) if host in LOOPBACK else ""
    if arguments[1:2] != ["load"]:
        return f"{same}, by `sojourn run`, or by `sojourn load --server-run DIR`", ""
    if host not in LOOPBACK:
        where = f"on {host or 'its host'}"
        return f"{same}: {start} {where}, repeat the load, copy that folder here, and `sojourn join` the two", ""
    words = f"{same}: {start}, and repeat the load with `--server-run {RECORDS}`"
    return words, shlex.join([*_without(arguments, "--server-run"), "--server-run", RECORDS])


def _start(facts: Client) -> str:
    source = getattr(getattr(facts, "server", None), "source", None)
    served = section(section(facts.meta, "engine"), "served")
    if source == "sojourn" or served.get("owned_by") == "sojourn":
        return f"{START} with `--run-dir {RECORDS}`"
    if (name := PROBES.get(str(source or served.get("owned_by")))) is not None:
        return f"{START} as `sojourn-probe {name} --out {RECORDS} -- …`"
    return f"{START} with `--run-dir {RECORDS}` (vLLM, SGLang: under `sojourn-probe --out {RECORDS}`)"


def _recorded(facts: Client) -> list[str]:
    """The words of the command in `run.json`; [] where no command of ours sent the load."""
    if facts.measured_by == "server" or facts.meta.get("imported"):
        return []
    command = facts.meta.get("command", ["sojourn", "run", facts.scenario])
    return [str(word) for word in command or ()]


def _without(arguments: list[str], option: str, start: str = "") -> list[str]:
    """Without an option and its value, where the value begins so."""
    dropped = {
        place + step
        for place, word in enumerate(arguments[:-1])
        if word == option and arguments[place + 1].startswith(start)
        for step in (0, 1)
    }
    return [word for place, word in enumerate(arguments) if place not in dropped]
