"""What `sojourn server dashboards up` starts and ends: Prometheus and Grafana in Docker, or Prometheus and the app."""

import contextlib
import dataclasses
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sojourn.commands.cli import out, working
from sojourn.dashboards.alerts import AlertOptions
from sojourn.dashboards.build import build_dashboards
from sojourn.dashboards.stack import Stack
from sojourn.interop.sources.registry import SOURCES
from sojourn.live.watch.fetch import fetch
from sojourn.loadgen.target.processes import free_port, start, stop, tail
from sojourn.metrics.errors import ServerError, SojournError

GRAFANA_PORT, APP_PORT = 3000, 8501
START_SECONDS, PULL_SECONDS = 60, 600
WATCH_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Places:
    """What was asked for. `docker` None: where it runs. `port`: of Grafana or of the app, None for its usual one."""

    stack: Stack
    target_share: float
    objectives: dict[str, float]
    docker: bool | None
    port: int | None
    data: Path | None
    runs: Path

    def options(self, app_port: int, dashboard_url: str) -> AlertOptions:
        return AlertOptions(self.target_share, self.objectives, f"http://127.0.0.1:{app_port}", dashboard_url)


def run_stack(places: Places) -> None:
    """Starts it, and returns after Ctrl-C or raises ServerError when a part ends by itself. All parts end with it."""
    in_docker = docker_runs() if places.docker is None else places.docker
    port = places.port or (GRAFANA_PORT if in_docker else APP_PORT)
    check_port(places.stack.prometheus_port, "--prometheus-port")
    check_port(port, "--port")
    if in_docker and not docker_runs():
        raise SojournError("Docker does not run here, or lacks `docker compose`; without --docker no Docker is needed")
    if not in_docker and shutil.which("prometheus") is None:
        raise SojournError(
            "neither Docker with compose nor a program prometheus is here; install one: apt install prometheus"
        )
    for target in places.stack.targets:
        out.print(told_of(target), markup=False, soft_wrap=True)
    with folder(places.data) as place, contextlib.ExitStack() as parts, contextlib.suppress(KeyboardInterrupt):
        children = in_compose(parts, places, place, port) if in_docker else beside_the_app(parts, places, place, port)
        while True:
            for name, child in children.items():
                if child.poll() is not None:
                    raise ServerError(f"{name} ended with exit code {child.returncode}; its last lines:\n"
                                      f"{tail(place / f'{name}.log')}")  # fmt: skip
            time.sleep(WATCH_SECONDS)


def docker_runs() -> bool:
    """Whether compose is installed and its daemon answers."""
    if shutil.which("docker") is None:
        return False
    asked = (["docker", "compose", "version"], ["docker", "info"])
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return all(
            subprocess.run(each, capture_output=True, timeout=20, check=False, stdin=subprocess.DEVNULL).returncode == 0
            for each in asked
        )
    return False


def check_port(port: int, option: str) -> None:
    """Raises ServerError where something listens already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ServerError(f"port {port} of 127.0.0.1 cannot be used ({error.strerror}); choose another with "
                              f"{option}") from None  # fmt: skip


def told_of(target: str) -> str:
    """What answers there now, as a sentence. Prometheus goes on asking where nothing does."""
    try:
        status, page = fetch(f"http://{target}/metrics", timeout_s=5.0)
    except ServerError:
        return f"! {target} does not answer; its panels fill once a server listens there"
    if status != 200:
        return f"! {target} answers /metrics with HTTP {status}; SGLang needs --enable-metrics"
    lines = page.decode("utf-8", "replace").splitlines()
    source = next((each for each in SOURCES if any(line.startswith(each.prefix) for line in lines)), None)
    if source is None:
        return f"! {target} has no metric of {', '.join(each.title for each in SOURCES)}: its panels stay empty"
    return f"{target} is a server of {source.title}"


@contextlib.contextmanager
def folder(data: Path | None) -> Iterator[Path]:
    """The named folder, or a temporary one that goes when all has ended."""
    if data is not None:
        data.mkdir(parents=True, exist_ok=True)
        yield data.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="sojourn-dashboards-") as name:
        yield Path(name)


def beside_the_app(parts: contextlib.ExitStack, places: Places, place: Path, port: int) -> dict[str, subprocess.Popen]:
    from sojourn.ui.launch import app_command

    stack = dataclasses.replace(places.stack, host_network=True, watch_port=free_port())  # no bridge is between
    options = places.options(port, f"http://127.0.0.1:{port}/dashboards?board={{board}}&")
    build_dashboards(place, options, stack)
    base = f"http://127.0.0.1:{stack.prometheus_port}"
    prometheus = start(
        ["prometheus", f"--config.file={place}/prometheus.yaml", f"--storage.tsdb.path={place}/history",
         f"--web.listen-address=127.0.0.1:{stack.prometheus_port}", "--log.level=warn"],
        place / "prometheus.log",
    )  # fmt: skip
    parts.callback(stop, prometheus)
    app = start(app_command(places.runs, None, port, prometheus=base, boards=place), place / "app.log")
    parts.callback(stop, app)
    wait(f"{base}/-/ready", "prometheus", prometheus, place, START_SECONDS)
    watch = start(watch_command(places, base, stack.watch_port), place / "watch.log")
    parts.callback(stop, watch)
    children = {"prometheus": prometheus, "app": app, "watch": watch}
    wait(f"http://127.0.0.1:{port}/_stcore/health", "app", app, place, START_SECONDS)
    out.print(f"dashboards  http://127.0.0.1:{port}/dashboards", soft_wrap=True)
    out.print(f"Prometheus  {base} (alerts: {base}/alerts)", soft_wrap=True)
    out.print("Ctrl-C ends them")
    return children


def watch_command(places: Places, base: str, port: int) -> list[str]:
    """A watch of all that the Prometheus scrapes; its findings become annotations."""
    slo = " ".join(f"{name.removesuffix('_ms')}:{bound:g}" for name, bound in places.objectives.items())
    options = ["--prometheus", base, "--metrics-port", str(port), *(["--slo", slo] if slo else [])]
    return [sys.executable, "-m", "sojourn", "watch", *options]


def in_compose(parts: contextlib.ExitStack, places: Places, place: Path, port: int) -> dict[str, subprocess.Popen]:
    stack = dataclasses.replace(places.stack, grafana_port=port)
    if stack.host_network:  # else its container does not see a watch on 127.0.0.1
        stack = dataclasses.replace(stack, watch_port=free_port())
    let_containers_read(
        place, build_dashboards(place, places.options(APP_PORT, f"http://127.0.0.1:{port}/d/{{board}}?"), stack)
    )
    compose = ["docker", "compose", "-f", str(place / "compose.yaml"), "-p", "sojourn-dashboards"]
    down = [*compose, "down", *(["--volumes"] if places.data is None else [])]
    parts.callback(subprocess.run, down, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    child = start([*compose, "up"], place / "compose.log")
    parts.callback(stop, child)
    wait(f"http://127.0.0.1:{port}/api/health", "compose", child, place, PULL_SECONDS)
    base = f"http://127.0.0.1:{stack.prometheus_port}"
    children = {"compose": child}
    if stack.watch_port:
        children["watch"] = start(watch_command(places, base, stack.watch_port), place / "watch.log")
        parts.callback(stop, children["watch"])
    out.print(f"Grafana     http://127.0.0.1:{port}", soft_wrap=True)
    out.print(f"Prometheus  {base}", soft_wrap=True)
    out.print("Ctrl-C ends them")
    return children


def let_containers_read(place: Path, files: Sequence[Path]) -> None:
    """A container reads them as a user of its own: a temporary folder, and files after umask 077, are ours alone."""
    place.chmod(place.stat().st_mode | 0o055)
    for file in files:
        file.chmod(0o644)


def wait(url: str, name: str, child: subprocess.Popen, place: Path, seconds: float) -> None:
    """Returns once it answers. Raises ServerError if the process ends first, or takes too long."""
    deadline = time.monotonic() + seconds
    with working(f"waiting for {name}"):
        while time.monotonic() < deadline:
            if child.poll() is not None:
                raise ServerError(f"{name} ended with exit code {child.returncode} before it was ready; its last lines:"
                                  f"\n{tail(place / f'{name}.log')}")  # fmt: skip
            with contextlib.suppress(ServerError):
                if fetch(url, timeout_s=2.0)[0] == 200:
                    return
            time.sleep(0.2)
    raise ServerError(f"{name} did not answer at {url} within {seconds:.0f} s; its last lines:\n"
                      f"{tail(place / f'{name}.log')}")  # fmt: skip
