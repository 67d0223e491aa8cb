"""`sojourn server dashboards up`: its files for each kind of network, what it refuses, and that its processes end
with it."""

import json
import signal
import socket
import stat
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

from sojourn.commands.dashboards_up import let_containers_read
from sojourn.dashboards.build import build_dashboards, contents
from sojourn.dashboards.stack import HOST, Stack, checked_target
from tests.dashboards.prometheus_server import ask, free_port

ROOT = Path(__file__).parents[2]


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "sojourn", "server", "dashboards", "up", *options]


def test_on_linux_containers_share_this_machines_network_and_listen_to_it_alone():
    stack = Stack(("127.0.0.1:8001", "10.0.0.7:8000"), prometheus_port=9191, grafana_port=3131)
    files = stack.files()
    (scraped,) = files["prometheus.yaml"]["scrape_configs"]
    assert scraped["static_configs"][0]["targets"] == ["127.0.0.1:8001", "10.0.0.7:8000"]
    prometheus, grafana = files["compose.yaml"]["services"].values()
    assert prometheus["network_mode"] == grafana["network_mode"] == "host"
    assert "--web.listen-address=127.0.0.1:9191" in prometheus["command"]
    assert grafana["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert grafana["environment"]["GF_SERVER_HTTP_PORT"] == "3131"
    assert files["datasource.yaml"]["datasources"][0]["url"] == "http://127.0.0.1:9191"


def test_the_series_of_a_watch_keep_the_labels_of_the_servers_that_it_watches():
    own = Stack(watch_port=9105).files()["prometheus.yaml"]["scrape_configs"][1]
    assert own["honor_labels"] is True and own["static_configs"][0]["targets"] == ["127.0.0.1:9105"]


def test_behind_a_bridge_this_machine_has_another_name_and_other_hosts_keep_theirs():
    files = Stack(("127.0.0.1:8001", "localhost:8002", "10.0.0.7:8000"), host_network=False).files()
    (scraped,) = files["prometheus.yaml"]["scrape_configs"]
    assert scraped["static_configs"][0]["targets"] == [f"{HOST}:8001", f"{HOST}:8002", "10.0.0.7:8000"]
    for service in files["compose.yaml"]["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_rules_are_evaluated_as_often_as_targets_are_scraped():
    told = yaml.safe_load(contents()["prometheus.yaml"])["global"]
    assert told["scrape_interval"] == told["evaluation_interval"]


@pytest.mark.parametrize("text", ["127.0.0.1", "http://host:8000/metrics", "host:port", "host:0", ":8000"])
def test_target_that_is_no_host_and_port_is_refused(text):
    with pytest.raises(ValueError, match="give the address of a server"):
        checked_target(text)


def test_address_of_a_server_is_a_target():
    assert checked_target("http://127.0.0.1:8000/") == checked_target("127.0.0.1:8000") == "127.0.0.1:8000"


def test_user_of_a_container_reads_the_temporary_folder(tmp_path):
    place = tmp_path / "place"
    place.mkdir(mode=0o700)
    files = build_dashboards(place)
    for file in files:
        file.chmod(0o600)  # as after umask 077
    let_containers_read(place, files)
    assert place.stat().st_mode & 0o777 == 0o755
    assert {file.stat().st_mode & 0o777 for file in files} == {0o644}


@pytest.mark.server
def test_taken_port_is_a_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            command("--no-docker", "--prometheus-port", port), cwd=ROOT, capture_output=True, text=True, check=False
        )
    assert done.returncode != 0 and f"port {port} of 127.0.0.1 cannot be used" in done.stderr
    assert "--prometheus-port" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.server
def test_without_docker_and_prometheus_it_says_what_to_install(tmp_path):
    done = subprocess.run(command(), cwd=ROOT, capture_output=True, text=True, check=False, env={"PATH": str(tmp_path)})
    assert done.returncode != 0 and "apt install prometheus" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.server
@pytest.mark.prometheus
def test_prometheus_and_the_app_start_and_end_together(tmp_path):
    ports = free_port(), free_port()
    process = subprocess.Popen(
        command("--no-docker", "--prometheus-port", str(ports[0]), "--port", str(ports[1]), "--data", str(tmp_path),
                "--target", f"127.0.0.1:{free_port()}"),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output = ""
        while "Ctrl-C" not in output:
            line = process.stdout.readline()
            assert line, output
            output += line
        assert "does not answer; its panels fill once" in output and f":{ports[1]}/dashboards" in output
        assert ask(f"http://127.0.0.1:{ports[0]}", "vector(1)")
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/api/v1/rules") as answer:
            groups = json.load(answer)["data"]["groups"]
        assert {group["name"] for group in groups} == {"sojourn-neutral", "sojourn-recording", "sojourn-alerts"}
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.server
def test_docker_is_used_where_it_runs_and_taken_down_at_the_end(tmp_path):
    """A scripted `docker` stands in for the program: it records its calls, and answers as Grafana where it is `up`."""
    calls, data, port = tmp_path / "calls", tmp_path / "data", free_port()
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(
        f"""#!{sys.executable}
import http.server, sys
open({str(calls)!r}, "a").write(" ".join(sys.argv[1:]) + chr(10))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *_): pass
if sys.argv[-1] == "up":
    http.server.HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""
    )
    docker.chmod(docker.stat().st_mode | stat.S_IEXEC)
    process = subprocess.Popen(
        command("--prometheus-port", str(free_port()), "--port", str(port), "--data", str(data)),
        cwd=ROOT, stdout=subprocess.PIPE, text=True, env={"PATH": str(docker.parent)},
    )  # fmt: skip
    try:
        output = ""
        while "Ctrl-C" not in output:
            line = process.stdout.readline()
            assert line, output
            output += line
        assert f"Grafana     http://127.0.0.1:{port}" in output
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    asked = calls.read_text().splitlines()
    compose = f"compose -f {data}/compose.yaml -p sojourn-dashboards"
    assert asked[:2] == ["compose version", "info"] and asked[-2:] == [f"{compose} up", f"{compose} down"]
    assert (data / "sojourn-saturation.json").exists()
