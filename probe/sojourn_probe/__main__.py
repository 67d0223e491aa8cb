"""`sojourn-probe vllm`: a vLLM server with the probe in it. `sojourn-probe receive`: the end of a socket."""

import argparse
import os
import runpy
import socket
import sys
import threading
import time
from pathlib import Path

from sojourn_probe.records import SUFFIX
from sojourn_probe.writer import OBJECTIVES, OBJECTIVES_VARIABLE, VARIABLE, ProbeError, parse_address, write_all

SERVER = "vllm.entrypoints.openai.api_server"
AT_ONCE = 1 << 16


def main() -> None:
    parser = argparse.ArgumentParser(prog="sojourn-probe", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    serve = verbs.add_parser("vllm", help="start vLLM's OpenAI server and record it")
    serve.add_argument("--out", required=True, help="a folder, unix:/path or tcp:127.0.0.1:PORT")
    for name in OBJECTIVES:
        serve.add_argument(f"--{name.replace('_', '-')}", type=float, help="an objective for a diagnosis of the folder")
    serve.add_argument("arguments", nargs=argparse.REMAINDER, help="after --: the arguments of vLLM's server")
    receive = verbs.add_parser("receive", help="write the streams of a socket to a folder")
    receive.add_argument("--listen", required=True, help="unix:/path or tcp:127.0.0.1:PORT")
    receive.add_argument("--into", required=True, type=Path, help="the folder")
    chosen = parser.parse_args()
    if chosen.verb == "receive":
        try:
            receive_streams(chosen.listen, chosen.into)
        except (OSError, ProbeError) as error:
            parser.exit(1, f"sojourn-probe: {error}\n")
        except KeyboardInterrupt:
            pass
        return
    bounds = {name: value for name in OBJECTIVES if (value := getattr(chosen, name)) is not None}
    if any(not 0 < value < float("inf") for value in bounds.values()):
        parser.error("an objective is a number of milliseconds above 0, such as --ttft-ms 500")
    serve_vllm(chosen.out, [each for each in chosen.arguments if each != "--"], bounds)


def serve_vllm(out: str, arguments: list[str], bounds: dict[str, float]) -> None:
    """Runs vLLM's own server in this process, with the two flags that attach the probe. `bounds` in ms."""
    os.environ[OBJECTIVES_VARIABLE] = ",".join(f"{name}={value:g}" for name, value in bounds.items())
    os.environ[VARIABLE] = out if out.startswith(("unix:", "tcp:")) else os.path.abspath(out)
    attach = ["--scheduler-cls", "sojourn_probe.vllm.Scheduler", "--middleware", "sojourn_probe.vllm.Middleware"]
    sys.argv = [SERVER, *arguments, *attach]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def receive_streams(address: str, folder: Path) -> None:
    """Writes each connection to a file of its own, until it is interrupted. Raises OSError and ProbeError."""
    family, place = parse_address(address)
    folder.mkdir(parents=True, exist_ok=True)
    with listening(family, place) as listener:
        while True:
            connection, _ = listener.accept()
            target = folder / f"stream-{time.time_ns():020d}{SUFFIX}"
            threading.Thread(target=_keep, args=(connection, target), daemon=True).start()


def listening(family: int, place: str | tuple[str, int]) -> socket.socket:
    """A socket that listens there, also where a receiver ended just now or was killed. Raises OSError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if isinstance(place, str):
            _remove_dead(Path(place))
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _remove_dead(place: Path) -> None:
    """Removes the file of a socket where nobody listens any more; any other file stays, and `bind` refuses it."""
    if not place.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
        try:
            asked.connect(str(place))
        except ConnectionRefusedError:
            place.unlink()


def _keep(connection: socket.socket, target: Path) -> None:
    """Writes what comes, until its sender or the disk ends it: the sender then sees a closed socket."""
    try:
        with connection, target.open("xb", buffering=0) as file:
            while content := connection.recv(AT_ONCE):
                write_all(file, content)
    except OSError as error:
        print(f"sojourn-probe: {target} takes no more records ({error})", file=sys.stderr)


if __name__ == "__main__":
    main()
