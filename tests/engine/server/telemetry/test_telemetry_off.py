"""`telemetry=off`: the same answers, and nothing that tells of them; what needs records is refused."""

import httpx
import pytest
from pydantic import ValidationError

from sojourn.engine import LLM, SamplingParams
from sojourn.engine.config import EngineConfig, complaint
from sojourn.engine.llm import LLMError
from tests.engine.harness import generate
from tests.engine.server_process import post, serving
from tests.engine.simulated import Simulation
from tests.engine.telemetry.test_observer import ask


@pytest.mark.parametrize(
    "setting", [{"run_dir": "runs/a"}, {"objective_ttft_ms": 100}, {"objective_tpot_ms": 9}, {"objective_e2e_ms": 800}]
)
def test_what_is_made_from_records_is_refused_without_them(setting):
    EngineConfig(model="tiny-model", **setting)
    with pytest.raises(ValidationError) as refused:
        EngineConfig(model="tiny-model", telemetry="off", **setting)
    sentence = complaint(refused.value)
    assert sentence.startswith(f"{next(iter(setting))}=") and "telemetry=off" in sentence and "leave" in sentence


def test_nobody_can_wait_for_records_that_never_come():
    with pytest.raises(LLMError, match="telemetry=off leaves no records for on_steps"):
        LLM("tiny-model", telemetry="off", on_steps=print)


def test_without_telemetry_the_tokens_are_the_same_and_nothing_is_booked(checkpoints):
    prompts = [[5 + index] * (4 + 9 * index) for index in range(6)]
    settings = {"max_num_seqs": 3, "num_kv_blocks": 12, "max_model_len": 150, "max_num_batched_tokens": 24}
    told = {
        telemetry: generate(checkpoints["llama"], prompts, 20, telemetry=telemetry, **settings)
        for telemetry in ("full", "off")
    }
    assert told["off"][0] == told["full"][0]
    full, off = told["full"][1], told["off"][1]
    assert full.records and full.ledgers and not off.records and not off.ledgers
    for name, ended in off.ended.items():
        assert sum(ended.ledger) == 0 and not ended.waits and ended.computed_tokens == full.ended[name].computed_tokens


def test_an_offline_output_without_telemetry_has_no_ledger():
    with LLM("tiny-model", telemetry="off", threads=1, num_kv_blocks=64) as llm:
        (output,) = llm.generate("The queue", SamplingParams(max_tokens=4, temperature=0.0))
    assert output.token_ids and output.ledger_ms == {}


def test_a_simulated_day_without_telemetry_ends_as_one_with_it():
    told = {}
    for telemetry in ("full", "off"):
        simulation = Simulation(num_blocks=12, overlap=True, max_num_batched_tokens=8, knobs={"telemetry": telemetry})
        simulation.receive(*(ask(f"r{i}", [i] * (5 + 3 * i), 16 + i) for i in range(5)))
        simulation.drain()
        simulation.check_idle()
        told[telemetry] = simulation.published
    assert told["off"].tokens == told["full"].tokens and not told["off"].records
    assert any(ended.preemptions for ended in told["off"].ended.values())


def test_a_server_without_telemetry_answers_alike_and_its_metrics_claim_nothing(tmp_path, api_server):
    body = {"max_tokens": 8, "temperature": 0}
    with serving(tmp_path, "tiny-model", "--telemetry", "off", "--num-kv-blocks", "64") as server:
        said, expected = post(server, **body), post(api_server, **body)
        streamed = post(server, stream=True, **body).text
        page = httpx.get(f"{server.url}/metrics").text
        refused = [httpx.get(f"{server.url}/debug/{path}") for path in ("steps", "requests", "requests/some")]
        idle = [server.gauge("sojourn_request_running"), server.gauge("sojourn_memory_kv_usage_ratio")]
    assert said.status_code == 200 and streamed.endswith("data: [DONE]\n\n")
    answer, other = said.json(), expected.json()
    assert answer["choices"] == other["choices"] and answer["usage"] == other["usage"]
    assert "ledger" in other and "ledger" not in answer and "metrics" not in answer
    assert idle == [0.0, 0.0]
    assert [(answer.status_code, answer.json()["error"]["code"]) for answer in refused] == [(409, "telemetry_off")] * 3
    assert 'sojourn_telemetry_enabled_info{model_name="tiny-model",level="off"} 1' in page
    for family in ("request_finished_total", "compute_steps_total", "request_ledger_seconds_total"):
        values = [line.rsplit(" ", 1)[1] for line in page.splitlines() if line.startswith(f"sojourn_{family}{{")]
        assert all(float(value) == 0 for value in values), family
