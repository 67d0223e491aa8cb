"""Every alert fires on the fault that it is named for, and stays silent without."""

import json
import re
import subprocess
from pathlib import Path
from urllib.parse import parse_qs, parse_qsl, urlsplit

import pytest
import yaml

from sojourn.dashboards.alerts import AlertOptions
from sojourn.dashboards.build import GENERATED, contents
from sojourn.dashboards.document import render_markdown
from sojourn.dashboards.events import EVENTS
from sojourn.dashboards.rules import rules
from sojourn.dashboards.rules_of_ours import BUDGET, BURN_RATE, BURN_WINDOWS
from sojourn.diagnosis.symptom_tree.complaints import BY_SYMPTOM
from tests.dashboards.lint import expressions
from tests.dashboards.prometheus_server import as_grafana_asks

pytestmark = [
    pytest.mark.prometheus,
]

DOCS = Path(__file__).parents[2] / "docs"
OPTIONS = AlertOptions(objectives={"ttft_ms": 500.0, "tpot_ms": 50.0})
ALERTS = {rule["alert"]: rule for rule in rules(OPTIONS)["groups"][2]["rules"]}
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
POD = 'job="pods",instance="a"'
UP = f"up{{{POD}}}"
HERE = f"sojourn_request_running{{{POD}}}"
VLLM_HERE = f'vllm:num_requests_running{{{POD},engine="0"}}'
VLLM_KV = f'vllm:kv_cache_usage_perc{{{POD},engine="0"}}'
VLLM_WAITING = f'vllm:num_requests_waiting{{{POD},engine="0"}}'
OLDEST = f"sojourn_request_oldest_wait_seconds{{{POD}}}"
COMPUTING = f'sojourn_token_scheduled_tokens_total{{{POD},kind="decode"}}'
RETRACTED = f'sglang:num_retracted_requests_total{{{POD},tp_rank="0",pp_rank="0"}}'
SGLANG_ENDED = f'sglang:num_requests_total{{{POD},engine_type="unified"}}'
# Half of the requests of a foreign server stay below 0.4 s and 0.04 s, the others below the given bounds.
TTFT, TPOT = "vllm:time_to_first_token_seconds", "vllm:request_time_per_output_token_seconds"


def histogram(family: str, quick: float, rest: float, growth: tuple[int, int]) -> dict[str, str]:
    """Series of a histogram with two bounds that grow by (below the first, in all) each minute, for hours."""
    below, total = growth
    return {
        f'{family}_bucket{{{POD},engine="0",le="{quick}"}}': f"0+{below}x400",
        f'{family}_bucket{{{POD},engine="0",le="{rest}"}}': f"0+{total}x400",
        f'{family}_bucket{{{POD},engine="0",le="+Inf"}}': f"0+{total}x400",
        VLLM_HERE: "1x400",
    }


# Alert → (series with the fault, series without), a sample a minute, in promtool's notation: start+growth x times.
CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "SojournTargetDown": ({UP: "1x12 0x8", HERE: "1x12"}, {UP: "1x20", HERE: "1x20"}),
    "SojournModelVanished": ({HERE: "1x5 stale"}, {HERE: "1x20"}),
    "SojournNoServer": ({UP: "1x20"}, {UP: "1x20", VLLM_HERE: "0x20"}),
    # 30 % missed since the start; or long ago, and no longer; or a few of very few.
    "SojournGoodputBurnsFast": (
        {MET: "0+70x400", MISSED: "0+30x400"},
        {MET: "0+100x400", MISSED: "0+30x320 9600x80"},
    ),
    "SojournGoodputBurnsSlow": ({MET: "0+90x400", MISSED: "0+10x400"}, {MET: "0+97x400", MISSED: "0+3x400"}),
    "SojournForeignTtftBurnsFast": (histogram(TTFT, 0.4, 5, (80, 100)), histogram(TTFT, 0.4, 5, (99, 100))),
    "SojournForeignTtftBurnsSlow": (histogram(TTFT, 0.4, 5, (92, 100)), histogram(TTFT, 0.4, 5, (99, 100))),
    "SojournForeignTpotBurnsFast": (histogram(TPOT, 0.04, 1, (80, 100)), histogram(TPOT, 0.04, 1, (99, 100))),
    "SojournForeignTpotBurnsSlow": (histogram(TPOT, 0.04, 1, (92, 100)), histogram(TPOT, 0.04, 1, (99, 100))),
    "SojournKvFull": (
        {VLLM_HERE: "4x20", VLLM_KV: "0.99x20", VLLM_WAITING: "3x20"},
        {VLLM_HERE: "4x20", VLLM_KV: "0.99x20", VLLM_WAITING: "0x20"},
    ),
    # A hang: the oldest request ages and no token is computed. Overload: it ages, and tokens come.
    "SojournStuck": (
        {OLDEST: "0+60x20", COMPUTING: "0+500x5 2500x15", HERE: "1x20"},
        {OLDEST: "0+60x20", COMPUTING: "0+500x20", HERE: "1x20"},
    ),
    "SojournEngineStuck": (
        {
            VLLM_HERE: "4x20",
            f'vllm:prompt_tokens_total{{{POD},engine="0"}}': "900x20",
            f'vllm:generation_tokens_total{{{POD},engine="0"}}': "900x20",
            f'vllm:inter_token_latency_seconds_count{{{POD},engine="0"}}': "900x20",
        },
        {
            VLLM_HERE: "4x20",
            f'vllm:prompt_tokens_total{{{POD},engine="0"}}': "900x20",
            f'vllm:generation_tokens_total{{{POD},engine="0"}}': "0+60x20",
            f'vllm:inter_token_latency_seconds_count{{{POD},engine="0"}}': "0+60x20",
        },
    ),
    # Engine 1 of two stands still; or both work, or engine 1 has no request.
    "SojournOneEngineStuck": (
        {
            **{f'vllm:num_requests_running{{{POD},engine="{engine}"}}': "4x20" for engine in "01"},
            **{f'vllm:{kind}_tokens_total{{{POD},engine="0"}}': "0+60x20" for kind in ("prompt", "generation")},
            **{f'vllm:{kind}_tokens_total{{{POD},engine="1"}}': "900x20" for kind in ("prompt", "generation")},
        },
        {
            f'vllm:num_requests_running{{{POD},engine="0"}}': "4x20",
            f'vllm:num_requests_running{{{POD},engine="1"}}': "0x20",
            **{f'vllm:{kind}_tokens_total{{{POD},engine="0"}}': "0+60x20" for kind in ("prompt", "generation")},
            **{f'vllm:{kind}_tokens_total{{{POD},engine="1"}}': "900x20" for kind in ("prompt", "generation")},
            **{f'sglang:num_running_reqs{{{POD},dp_rank="{rank}"}}': "4x20" for rank in "01"},
            **{f'sglang:realtime_tokens_total{{{POD},dp_rank="{rank}",mode="decode"}}': "0+60x20" for rank in "01"},
        },
    ),
    "SojournCoreRestarted": ({RESTARTS: "0x15 1x5"}, {RESTARTS: "1x20"}),
    "SojournRejecting": ({REJECTED: "0+2x20", FINISHED: "0+10x20"}, {REJECTED: "0+1x20", FINISHED: "0+100x20"}),
    "SojournBlockedByMemory": (
        {KV_USAGE: "0.99x20", 'sojourn_request_refusals_total{reason="kv_blocks"}': "0+5x20"},
        {KV_USAGE: "0.99x20", 'sojourn_request_refusals_total{reason="batch_cap"}': "0+5x20"},
    ),
    "SojournPreempting": (
        {RETRACTED: "0+2x20", SGLANG_ENDED: "0+10x20"},
        {PREEMPTED: "0x20", FINISHED: "0+10x20"},
    ),
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


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_opens_a_page_of_the_app_or_the_docs_and_a_dashboard(alert):
    told = ALERTS[alert]["annotations"]
    heading = told["documentation"].rpartition("#")[2]
    assert f"\n## {alert}\n" in render_markdown() and heading == alert.lower()
    page = urlsplit(told["runbook_url"])
    if page.path == "/symptoms":
        assert parse_qs(page.query)["symptom"][0] in BY_SYMPTOM
    else:
        assert told["runbook_url"] == told["documentation"]
    board, _, variables = told["dashboard_url"].rpartition("/")[2].partition("?")
    assert f"{board}.json" in contents()
    assert {name for name, _ in parse_qsl(variables)} <= {"var-job", "var-model_name", "var-instance"}


def test_page_of_alerts_is_that_of_the_rules():
    assert (DOCS / "alerts.md").read_text(encoding="utf-8") == render_markdown(), (
        "run `python -m sojourn.dashboards.document > docs/alerts.md`"
    )


def test_no_rule_names_a_job():
    assert not [rule for group in rules()["groups"] for rule in group["rules"] if re.search(r"job[=!]", rule["expr"])]


@pytest.mark.parametrize("share", [0.9, 1.0])
def test_share_that_leaves_no_budget_or_no_alert_is_refused(share):
    with pytest.raises(ValueError, match=r"give one from 0\.94"):
        AlertOptions(target_share=share)


def test_a_few_late_requests_of_very_few_wake_nobody(tmp_path):
    few = {MET: "0x200 1x200", MISSED: "0x200 1x200"}
    assert not fired(tmp_path, "SojournGoodputBurnsFast", few)


@pytest.mark.parametrize("alert", CASES)
def test_alert_fires_on_its_fault_and_stays_silent_without(alert, tmp_path):
    faulty, healthy = CASES[alert]
    assert fired(tmp_path, alert, faulty)
    assert not fired(tmp_path, alert, healthy)


def test_imbalance_is_the_busiest_server_over_the_mean_and_hits_are_of_each_server(tmp_path):
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules(OPTIONS)))
    lookups = 'sojourn_memory_prefix_tokens_total{result="%s",instance="%s"}'
    series = {COMPUTED % "a": "0+90x20", COMPUTED % "b": "0+30x20", lookups % ("hit", "a"): "0+60x20",
              lookups % ("miss", "a"): "0+60x20", lookups % ("hit", "b"): "0x20",
              lookups % ("miss", "b"): "0+60x20"}  # fmt: skip
    board = json.loads(contents()["sojourn-fleet.json"])
    uneven = next(expr for title, expr in expressions(board) if title == "Imbalance: maximum over mean")
    hits = next(expr for title, expr in expressions(board) if title == "Prefix hit rate, by server")
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


def test_burn_rate_and_budget_are_of_the_share_that_may_miss(tmp_path):
    """4 % of the requests miss: the burn rate is their ratio to the share that may, in each window."""
    board = json.loads(contents(OPTIONS)["sojourn-saturation.json"])
    left = next(expr for title, expr in expressions(board) if title == "Error budget left")
    burnt = 0.04 / (1 - OPTIONS.target_share)
    expected = {
        **{BURN_RATE.format(window=window): burnt for window in BURN_WINDOWS},
        BUDGET: 1 - OPTIONS.target_share,
        as_grafana_asks(left.replace("$__range", "6h")): 1 - burnt,
    }  # fmt: skip
    needed = [rule for rule in rules(OPTIONS)["groups"][1]["rules"] if re.search("missed|budget", rule["record"])]
    document = {"groups": [{"name": "needed", "interval": "1m", "rules": needed}]}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(document))
    series = {MET.replace("{", '{klass="all",'): "0+96x400", MISSED.replace("{", '{klass="all",'): "0+4x400"}
    tests = [
        {"expr": f"round(max({expr}), 0.0001)", "eval_time": "390m",
         "exp_samples": [{"labels": "{}", "value": round(value, 4)}]}
        for expr, value in expected.items()
    ]  # fmt: skip
    promtool(
        tmp_path, {f'{name[:-1]},instance="a"}}': values for name, values in series.items()}, tests, ["rules.yaml"]
    )


BEFORE = f'{{{POD},engine="sojourn"}}'
HAPPENED = {  # series in which it happens in minute 10, and those in which nothing does
    "Restarts": ({f"llm:token_generated_tokens_total{BEFORE}": "0+60x9 0+60x10"},
                 {f"llm:token_generated_tokens_total{BEFORE}": "0+60x20"}),
    "Core restarts": ({f"{RESTARTS}{{{POD}}}": "0x9 1x10"}, {f"{RESTARTS}{{{POD}}}": "1x20"}),
    "Deploys": ({f"llm:request_running{BEFORE}": "_x10 1x10"}, {f"llm:request_running{BEFORE}": "1x20"}),
    "Versions": ({f'sojourn_telemetry_build_info{{{POD},version="2"}}': "_x10 1x10"},
                 {f'sojourn_telemetry_build_info{{{POD},version="1"}}': "1x20"}),
    "Findings": ({f'sojourn_watch_finding{{{POD},title="a",object="b",finding="c",series="d"}}': "_x10 0.8x10"},
                 {f"sojourn_watch_state{{{POD}}}": "1x20"}),
    "Alerts": ({f'ALERTS{{{POD},alertname="SojournStuck",alertstate="firing"}}': "_x10 1x10"},
               {f'ALERTS{{{POD},alertname="SojournStuck",alertstate="pending"}}': "1x20"}),
}  # fmt: skip


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_an_annotation_marks_what_happens_and_nothing_else(event, tmp_path):
    for number, series in enumerate(HAPPENED[event.name]):
        expr = f"count({as_grafana_asks(event.expr).replace('[1m]', '[2m]')})"  # a sample a minute
        found = [] if number else [{"labels": "{}", "value": 1}]
        promtool(tmp_path, series, [{"expr": expr, "eval_time": "10m", "exp_samples": found}])


def promtool(folder: Path, series: dict[str, str], tests: list[dict], files: list[str] = ()) -> None:
    """Asserts what each expression finds at a time, with a sample a minute."""
    inputs = [{"series": with_model(name), "values": values} for name, values in series.items()]
    case = {"rule_files": [*files], "evaluation_interval": "1m",
            "tests": [{"interval": "1m", "input_series": inputs, "promql_expr_test": tests}]}  # fmt: skip
    (folder / "case.yaml").write_text(yaml.safe_dump(case))
    command = ["promtool", "test", "rules", "case.yaml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_names_rows_and_panels_that_are_there(alert):
    texts = [json.loads(text) for name, text in contents().items() if name.endswith(".json")]
    titles = {panel["title"] for board in texts for panel in board["panels"]}
    described = ALERTS[alert]["annotations"]["description"]
    named = re.findall(r"(?:Row|Panel|sojourn-request,) `([^`]+)`", described)
    assert {*named} <= titles and (named or "Row `" not in described)


def fired(folder: Path, alert: str, series: dict[str, str]) -> bool:
    """Whether the alert is active after 18 minutes, or after 6.5 hours where its windows are long.

    promtool, told to expect none, prints those that there are.
    """
    (folder / "rules.yaml").write_text(yaml.safe_dump(needed_by(ALERTS[alert], "1m" if "Burns" in alert else "15s")))
    case = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m" if "Burns" in alert else "15s",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": with_model(name), "values": values} for name, values in series.items()],
                "alert_rule_test": [
                    {"eval_time": "390m" if "Burns" in alert else "18m", "alertname": alert, "exp_alerts": []}
                ],
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


def needed_by(alert: dict, interval: str) -> dict:
    """A rules file of this alert and of what it needs: all of them would take promtool minutes."""
    recording = [rule for group in rules(OPTIONS)["groups"] for rule in group["rules"] if "record" in rule]
    needed, words = [], alert["expr"]
    for rule in reversed(recording):  # what a rule reads is recorded before it
        if re.search(rf"(?<![\w:]){re.escape(rule['record'])}(?![\w:])", words):
            needed.insert(0, rule)
            words += " " + rule["expr"]
    return {"groups": [{"name": "needed", "interval": interval, "rules": [*needed, alert]}]}


def with_model(series: str) -> str:
    """The series as a scrape would label it."""
    name, _, labels = series.removesuffix("}").partition("{")
    job = "" if "job=" in labels else ',job="pods"'
    return f'{name}{{{labels + "," if labels else ""}model_name="tiny"{job}}}'
