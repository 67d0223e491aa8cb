"""Every alert fires on the fault that it is named for, and stays silent without."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from dashboards.build import GENERATED, contents
from dashboards.rules import rules
from tests.dashboards.lint import expressions
from tests.dashboards.prometheus_server import as_grafana_asks

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(not shutil.which("promtool"), reason="needs Debian's prometheus"),
]

ALERTS = {rule["alert"]: rule for rule in rules()["groups"][1]["rules"]}
JUDGED = "sojourn_request_objective_total"
FINISHED = 'sojourn_request_finished_total{outcome="stop"}'
REJECTED = 'sojourn_request_rejected_total{reason="queue_full"}'
KV_USAGE = "sojourn_memory_kv_usage_ratio"
SLOWER = 'sojourn_compute_residual_seconds_total{direction="slower"}'
FASTER = 'sojourn_compute_residual_seconds_total{direction="faster"}'
PREDICTED = "sojourn_compute_predicted_seconds_total"
STOLEN = "sojourn_compute_steal_ratio"
UNCLOSED = "sojourn_request_unclosed_total"
PREEMPTED = "sojourn_memory_preemptions_total"
EVICTED = 'sojourn_memory_prefix_outcome_tokens_total{outcome="miss_evicted"}'
HIT = 'sojourn_memory_prefix_outcome_tokens_total{outcome="hit"}'
COLD = 'sojourn_memory_prefix_outcome_tokens_total{outcome="miss_cold"}'
RECOMPUTED = 'sojourn_token_scheduled_tokens_total{kind="recompute"}'
PREFILLED = 'sojourn_token_scheduled_tokens_total{kind="prefill"}'
TRACES_DROPPED = 'sojourn_telemetry_trace_exports_total{outcome="dropped"}'
TRACES_SENT = 'sojourn_telemetry_trace_exports_total{outcome="exported"}'
RESTARTS = "sojourn_telemetry_core_restarts_total"
DROPPED, FAILED = "sojourn_telemetry_dropped_records_total", "sojourn_telemetry_failed_records_total"
MET = f'{JUDGED}{{objective="all_objectives",outcome="met"}}'
MISSED = f'{JUDGED}{{objective="all_objectives",outcome="missed"}}'
COMPUTED = 'sojourn_token_scheduled_tokens_total{kind="decode",instance="%s"}'
WAITING = 'sojourn_request_waiting{instance="%s"}'
UP = 'up{job="sojourn",instance="a"}'

# Alert → (series with the fault, series without), a sample a minute, in promtool's notation: start+growth x times.
CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "SojournDown": ({UP: "0x20"}, {UP: "1x20"}),
    "SojournCoreRestarted": ({RESTARTS: "0x15 1x5"}, {RESTARTS: "1x20"}),
    "SojournGoodputLow": ({MET: "0+80x20", MISSED: "0+20x20"}, {MET: "0+95x20", MISSED: "0+5x20"}),
    "SojournRejecting": ({REJECTED: "0+2x20", FINISHED: "0+10x20"}, {REJECTED: "0+1x20", FINISHED: "0+100x20"}),
    "SojournBlockedByMemory": (
        {KV_USAGE: "0.99x20", 'sojourn_request_refusals_total{reason="kv_blocks"}': "0+5x20"},
        {KV_USAGE: "0.99x20", 'sojourn_request_refusals_total{reason="batch_cap"}': "0+5x20"},
    ),
    "SojournPreempting": ({PREEMPTED: "0+2x20", FINISHED: "0+10x20"}, {PREEMPTED: "0x20", FINISHED: "0+10x20"}),
    "SojournEvictedMisses": (
        {EVICTED: "0+30x20", HIT: "0+60x20", COLD: "0+10x20"},
        {EVICTED: "0+10x20", HIT: "0+60x20", COLD: "0+30x20"},
    ),
    "SojournRecomputing": (
        {RECOMPUTED: "0+20x20", PREFILLED: "0+80x20"},
        {RECOMPUTED: "0+5x20", PREFILLED: "0+95x20"},
    ),
    "SojournTracesLost": (
        {TRACES_DROPPED: "0+1x20", TRACES_SENT: "0+9x20"},
        {TRACES_DROPPED: "4x20", TRACES_SENT: "0+9x20"},
    ),
    "SojournStepsSlow": (
        {SLOWER: "0+15x20", FASTER: "0+1x20", PREDICTED: "0+30x20"},
        {SLOWER: "0+15x20", FASTER: "0+14x20", PREDICTED: "0+30x20"},  # noise: as fast as predicted in all
    ),
    "SojournCpuStolen": ({STOLEN: "0.08x20"}, {STOLEN: "0.02x20"}),
    "SojournFleetUneven": (
        {COMPUTED % "a": "0+90x20", COMPUTED % "b": "0+10x20", WAITING % "a": "7x20", WAITING % "b": "0x20"},
        {COMPUTED % "a": "0+90x20", COMPUTED % "b": "0+10x20", WAITING % "a": "0x20", WAITING % "b": "0x20"},
    ),
    "SojournLedgerOpen": ({UNCLOSED: "0+1x20", FINISHED: "0+10x20"}, {UNCLOSED: "0x20", FINISHED: "0+10x20"}),
    "SojournRecordsLost": ({DROPPED: "0x15 9x5", FAILED: "0x20"}, {DROPPED: "9x20", FAILED: "3x20"}),
}


@pytest.mark.parametrize("arguments", [("rules", "rules.yaml"), ("config", "prometheus.yaml")])
def test_promtool_finds_no_fault_in(arguments):
    done = subprocess.run(["promtool", "check", *arguments], cwd=GENERATED, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_its_cases():
    assert set(CASES) == set(ALERTS)


@pytest.mark.parametrize("alert", CASES)
def test_alert_fires_on_its_fault_and_stays_silent_without(alert, tmp_path):
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules()))
    faulty, healthy = CASES[alert]
    assert fired(tmp_path, alert, faulty)
    assert not fired(tmp_path, alert, healthy)


def test_imbalance_is_the_busiest_server_over_the_mean_and_hits_are_of_each_server(tmp_path):
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules()))
    lookups = 'sojourn_memory_prefix_tokens_total{result="%s",instance="%s"}'
    series = {COMPUTED % "a": "0+90x20", COMPUTED % "b": "0+30x20", lookups % ("hit", "a"): "0+60x20",
              lookups % ("miss", "a"): "0+60x20", lookups % ("hit", "b"): "0x20",
              lookups % ("miss", "b"): "0+60x20"}  # fmt: skip
    board = json.loads(contents()["sojourn-fleet.json"])
    uneven = next(expr for title, expr in expressions(board) if title == "Most over mean")
    hits = next(expr for title, expr in expressions(board) if title == "Prefix hits, by server")
    expected = {
        "model_name:sojourn_token_imbalance:ratio_rate5m": {"": 1.5},
        "instance:sojourn_memory_prefix_hit:ratio_rate5m": {"a": 0.5, "b": 0},
        as_grafana_asks(uneven, "5m"): {"": 1.5},
        as_grafana_asks(hits, "5m"): {"a": 0.5, "b": 0},
    }
    case = {
        "rule_files": ["rules.yaml"], "evaluation_interval": "15s",
        "tests": [{
            "interval": "1m",
            "input_series": [{"series": with_model(name), "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {"expr": f"sum by (instance) ({expr})", "eval_time": "18m",
                 "exp_samples": [{"labels": f'{{instance="{name}"}}' if name else "{}", "value": value}
                                 for name, value in values.items()]}
                for expr, values in expected.items()
            ],
        }],
    }  # fmt: skip
    (tmp_path / "case.yaml").write_text(yaml.safe_dump(case))
    command = ["promtool", "test", "rules", "case.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def fired(folder: Path, alert: str, series: dict[str, str]) -> bool:
    """Whether the alert is active after 18 minutes. promtool, told to expect none, prints those that there are."""
    case = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": with_model(name), "values": values} for name, values in series.items()],
                "alert_rule_test": [{"eval_time": "18m", "alertname": alert, "exp_alerts": []}],
            }
        ],
    }
    (folder / "case.yaml").write_text(yaml.safe_dump(case))
    done = subprocess.run(
        ["promtool", "test", "rules", "case.yaml"], cwd=folder, capture_output=True, text=True, check=False
    )
    output = done.stdout + done.stderr
    active = re.search(rf'alertname="{alert}".*severity="{ALERTS[alert]["labels"]["severity"]}"', output)
    assert (done.returncode == 1) == bool(active), output
    return bool(active)


def with_model(series: str) -> str:
    """The series as a scrape would label it."""
    name, _, labels = series.removesuffix("}").partition("{")
    return f'{name}{{{labels + "," if labels else ""}model_name="tiny"}}'
