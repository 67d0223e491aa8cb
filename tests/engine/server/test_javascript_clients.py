"""The official JavaScript clients of OpenAI and Anthropic, unmodified, against a running server.

npm install openai @anthropic-ai/sdk; SOJOURN_NODE_MODULES=.../node_modules pytest -m peer THIS_FILE
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.engine.server.gateway.access.test_keys import write_keys
from tests.engine.server_process import serving

MODULES = os.environ.get("SOJOURN_NODE_MODULES")
SCRIPT = Path(__file__).parent / "official_clients.cjs"

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not MODULES or not shutil.which("node"), reason="needs node and SOJOURN_NODE_MODULES"),
]


def told(url: str, key: str = "unused", part: str = "") -> dict:
    done = subprocess.run(
        ["node", str(SCRIPT), url, key, part],
        env=os.environ | {"NODE_PATH": MODULES},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_both_clients_work_and_know_the_errors(api_server):
    answers = told(api_server.url)
    chat, messages = answers["openai"], answers["anthropic"]
    assert chat["whole"] == chat["streamed"] == chat["response"] == messages["whole"] == messages["streamed"] != ""
    assert messages["texts"] == messages["whole"] and chat["tokens"][0] == chat["tokens"][1]
    assert chat["called"] == "time" and messages["used"] == ["tool_use", "time", "tool_use"]
    assert messages["counted"] == messages["given"]
    assert answers["failures"] == {
        "openai": ["NotFoundError", 404, "model_not_found"],
        "anthropic": ["NotFoundError", 404, "not_found_error"],
    }


def test_both_clients_work_with_a_key_and_have_their_error_without(tmp_path):
    keys = write_keys(tmp_path / "keys.yaml", acme="api", scraper="metrics")
    with serving(tmp_path, "tiny-model", "--max-model-len", "512", "--api-keys", str(tmp_path / "keys.yaml")) as server:
        assert told(server.url, keys["acme"])["openai"]["whole"]
        for key, name, status, kind in (
            ("sk-wrong", "AuthenticationError", 401, "authentication_error"),
            (keys["scraper"], "PermissionDeniedError", 403, "permission_error"),
        ):
            failures = told(server.url, key, "failures")["failures"]
            assert failures["openai"][:2] == [name, status] and failures["anthropic"] == [name, status, kind]
