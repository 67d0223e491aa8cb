"""LoRA adapters over HTTP: named as a model, listed, loaded and unloaded."""

import json
import shutil

import httpx
import pytest

from tests.engine.adapters import write_adapter
from tests.engine.server_process import serving, wait_for

pytestmark = pytest.mark.server
ASK = {"prompt": "The queue of a server", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    from sojourn.engine.config import model_folder

    base = model_folder("tiny-model")
    for index, name in enumerate(("fixed", "below/late")):
        write_adapter(base, root / name, index, target_modules=["q_proj", "down_proj"])
    shutil.copytree(root / "below/late", root / "outside")
    (root / "below/link").symlink_to(root / "outside")
    shutil.copytree(root / "below/late", root / "below/wide")
    config = json.loads((root / "below/wide/adapter_config.json").read_text())
    (root / "below/wide/adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with serving(
        root, "tiny-model", "--max-model-len", "256", "--lora", f"fixed={root / 'fixed'}",
        "--lora-runtime-loading", "--lora-folder", str(root / "below"), "--compat", "vllm",
        "--run-dir", str(root / "run"),
    ) as running:  # fmt: skip
        yield running


def text_of(server, model: str = "tiny-model") -> str:
    response = httpx.post(f"{server.url}/v1/completions", json=ASK | {"model": model})
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    return response.json()["choices"][0]["text"]


def load(server, name: str, path: str, **more):
    return httpx.post(f"{server.url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path} | more)


def unload(server, name: str):
    return httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": name})


def test_the_model_of_a_request_names_an_adapter(server):
    base = text_of(server)
    assert text_of(server, "fixed") != base
    cards = {card["id"]: card for card in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert cards["fixed"]["parent"] == "tiny-model" and "parent" not in cards["tiny-model"]
    assert "lora_adapters" not in cards["tiny-model"]["engine"], "no path of the operator is shown"


def test_an_adapter_comes_and_goes_at_run_time(server):
    fixed, base = text_of(server, "fixed"), text_of(server)
    answer = load(server, "late", "late")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'late' added successfully.")
    assert text_of(server, "late") not in (fixed, base)
    again = load(server, "late", "late")
    assert again.status_code == 400 and again.json()["error"]["code"] == "adapter_loaded"
    assert load(server, "late", "late", load_inplace=True).status_code == 200
    assert unload(server, "late").text == "Success: LoRA adapter 'late' removed successfully."
    gone = httpx.post(f"{server.url}/v1/completions", json=ASK | {"model": "late"})
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "model_not_found"
    assert unload(server, "late").status_code == 404


@pytest.mark.parametrize("path", ["../outside", "link", "..", ".", "nothing", "/etc", "a\0b", "x" * 5000])
def test_paths_outside_of_the_folder_are_refused(server, path):
    answer = load(server, "evil", path)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "lora_path", answer.text


def test_an_adapter_that_cannot_be_served_gets_a_sentence_without_the_operators_paths(server):
    answer = load(server, "wide", "wide")
    assert answer.status_code == 400 and "DoRA" in answer.json()["error"]["message"]
    assert str(server.url) and "/below/" not in answer.json()["error"]["message"]


def test_metrics_and_records_name_adapters(server):
    text_of(server, "fixed")
    page = httpx.get(f"{server.url}/metrics").text
    info = next(line for line in page.splitlines() if line.startswith("vllm:lora_requests_info{"))
    assert 'max_lora="8"' in info and 'running_lora_adapters=""' in info
    url = f"{server.url}/debug/requests"
    wait_for(lambda: '"adapter":"fixed"' in httpx.get(url).text.replace(" ", ""))
