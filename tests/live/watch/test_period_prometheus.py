"""Two periods of a real Prometheus, filled with the scrapes of a scripted server: what compare says of them."""

import json
import subprocess
import time
from collections import defaultdict
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from sojourn.commands.program import app
from sojourn.interop.sources.vllm import VLLM
from sojourn.live.watch.prometheus import is_prometheus
from sojourn.metrics.errors import InputError, ServerError
from tests.dashboards.prometheus_server import DEADLINE_S, free_port
from tests.metrics.any_page import Life, rows

pytestmark = [pytest.mark.prometheus, pytest.mark.server]

FAST, SLOW = Life(2, 0, 2.0, 0.1, 1.0), Life(4, 20, 2.0, 6.0, 8.0)
PART_S, EVERY_S = 1200, 15  # each part of a life; between two scrapes
GROW = ("_total", "_sum", "_count", "_bucket")


def life_of(begin: int, cache: bool, parts: list[Life]) -> dict[str, list[str]]:
    """Lines by family: the scrapes of one process, which lives the parts one after the other."""
    found = defaultdict(list)
    for at in range(0, PART_S * len(parts), EVERY_S):
        page: dict[tuple, float] = {("process_start_time_seconds", ()): begin}
        page["vllm:cache_config_info", (("enable_prefix_caching", str(cache)),)] = 1
        page["vllm:request_success_total", (("finished_reason", "stop"),)] = parts[0].ended_rps * at
        for number, part in enumerate(parts[: at // PART_S + 1]):
            for row in rows(VLLM, 0, min(PART_S, at - number * PART_S), part):
                key = row["name"], tuple(row["labels"])
                page[key] = row["value"] + (page.get(key, 0) if row["name"].endswith(GROW) else 0)
        for (name, labels), value in page.items():
            found[name].append((labels, value, begin + at))
    return found


@contextmanager
def holding(folder, lives: dict[tuple[str, str], list[dict]]):
    """A Prometheus whose store has these lives of each job and instance."""
    families = defaultdict(list)
    for (job, instance), pieces in lives.items():
        for piece in pieces:
            for name, samples in piece.items():
                for labels, value, at in samples:
                    text = ",".join(f'{key}="{each}"' for key, each in (*labels, ("job", job), ("instance", instance)))
                    families[name].append(f"{name}{{{text}}} {value} {at}\n")
    text = "".join(f"# TYPE {name} unknown\n{''.join(lines)}" for name, lines in families.items())
    (folder / "scrapes").write_text(f"{text}# EOF\n")
    subprocess.run(["promtool", "tsdb", "create-blocks-from", "openmetrics", "scrapes", "data"], cwd=folder, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    (folder / "prometheus.yaml").write_text("scrape_configs: []\n")
    base = f"http://127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        ["prometheus", "--config.file=prometheus.yaml", "--storage.tsdb.path=data", "--log.level=warn",
         f"--web.listen-address={base.removeprefix('http://')}"], stderr=(folder / "log").open("w"), cwd=folder,
    )  # fmt: skip
    try:
        give_up = time.monotonic() + DEADLINE_S
        while not _answers(base):
            assert process.poll() is None and time.monotonic() < give_up, (folder / "log").read_text()
            time.sleep(0.1)
        yield base
    finally:
        process.terminate()
        process.wait(10)


def _answers(base: str) -> bool:
    try:
        return is_prometheus(base)
    except ServerError:
        return False


def test_each_period_is_its_own_and_what_changed_is_named(tmp_path):
    """A process that is fast, slow and fast again, and one after it without a prefix cache, which is slow."""
    begin = int(time.time()) // EVERY_S * EVERY_S - 5 * PART_S
    first, second = life_of(begin, True, [FAST, SLOW, FAST]), life_of(begin + 3 * PART_S, False, [SLOW])
    lives = {("vllm", "gpu1:8000"): [first, second], ("other", "gpu2:8000"): [life_of(begin, True, [FAST])]}

    def period(*parts: float) -> str:
        return "..".join(f"{begin + part * PART_S:.0f}" for part in parts)

    with holding(tmp_path, lives) as base:

        def compared(*words: str):
            return CliRunner().invoke(app, ["compare", "--prometheus", base, *words])

        gpu1 = ("--select", 'job="vllm"')
        same = compared(*gpu1, "--before", period(0.1, 0.9), "--after", period(2.1, 2.9), "--json")
        slower = compared("--before", period(2.1, 2.9), "--after", period(3.1, 3.9), "--json")
        mixed = compared("--before", period(2.1, 3.9), "--after", period(3.1, 3.9))
        moment = compared("--before", period(2.1, 3.9))
        refused = [compared("--before", each, "--after", period(2.1, 2.9)) for each in
                   (period(0.1, 0.9), period(4.2, 4.4), f"{period(2.5)}..{begin + 5 * PART_S // 2 + 10}")]  # fmt: skip

    found = json.loads(same.output)
    assert (found["verdict"], found["notes"]) == ("no clear change", []), found
    means = {each["name"]: (each["before"], each["after"]) for each in found["figures"] if each["statistic"] == "mean"}
    assert means["ttft_ms"] == pytest.approx((100, 100)) and means["e2e_ms"] == pytest.approx((1000, 1000))
    assert means["running"] == pytest.approx((2, 2)) and means["waiting"] == (0, 0)

    found = json.loads(slower.output)
    assert found["verdict"] == "worse" and slower.exit_code == 1
    assert [(each["name"], each["before"], each["after"]) for each in found["settings"]] == [
        ("enable_prefix_caching", True, False)]  # fmt: skip
    means = {each["name"]: each["after"] for each in found["figures"] if each["statistic"] == "mean"}
    assert means["ttft_ms"] == pytest.approx(6000) and means["e2e_ms"] == pytest.approx(8000)
    assert means["waiting"] == pytest.approx(20)

    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(begin + 3 * PART_S))
    said = f"the server restarted at {clock} UTC: enable_prefix_caching True → False"
    assert f"within A, {said}" in " ".join(mixed.output.split())
    assert said in " ".join(moment.output.split()) and moment.exit_code == 1
    begins, ends = (time.strftime("%H:%M:%S", time.gmtime(begin + 3 * PART_S + off * EVERY_S)) for off in (-2, 2))
    changed = moment.output.rpartition("changed ")[2].split()
    assert begins <= changed[1] <= ends, moment.output

    assert all(isinstance(each.exception, InputError) for each in refused)
    several, none, one = (str(each.exception) for each in refused)
    assert "--select" in several and "holds no metric" in none and "too little" in one
