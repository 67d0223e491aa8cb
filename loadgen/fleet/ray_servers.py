"""The servers that replicas of Ray Serve have started: they come and go, and `scale/ray_app.py` writes down which."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

UNSEEN = -1000  # no exit code: whoever owned the process was killed, too
SERVERS_FILE = "servers.jsonl"  # as scale/ray_app.py names it


@dataclass(slots=True)
class ServerOfReplica:
    """A process that another one owns, with the part of `subprocess.Popen` that a fleet reads."""

    number: int
    port: int
    pid: int
    returncode: int | None = None
    is_known_to_have_ended: bool = False

    def poll(self) -> int | None:
        """Its exit code, or UNSEEN where nobody saw it; None while it runs."""
        if self.returncode is None and (self.is_known_to_have_ended or not _exists(self.pid)):
            self.returncode = UNSEEN
        return self.returncode


def servers_of_replicas(folder: Path, known: dict[int, ServerOfReplica]) -> bool:
    """Brings `known`, by number, up to date. A server is in it once it was ready. Whether all that were asked for at
    first get requests."""
    is_running = False
    try:
        text = (folder / SERVERS_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    for line in text[: text.rfind("\n") + 1].splitlines():  # the last one may be half written
        said: dict[str, Any] = json.loads(line)
        if said["state"] == "running":
            is_running = True
            continue
        number = int(said["number"])
        if said["state"] == "ready" and number not in known:
            known[number] = ServerOfReplica(number, int(said["port"]), int(said["pid"]))
        elif said["state"] == "ended" and number in known:
            known[number].returncode = said["exit_code"]
            known[number].is_known_to_have_ended = True
    return is_running


def _exists(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
