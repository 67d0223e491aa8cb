"""The official JavaScript clients of OpenAI and Anthropic, unmodified, against a running server.

npm install openai @anthropic-ai/sdk; SOJOURN_NODE_MODULES=.../node_modules pytest -m peer THIS_FILE
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

MODULES = os.environ.get("SOJOURN_NODE_MODULES")
SCRIPT = Path(__file__).parent / "official_clients.cjs"

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not MODULES or not shutil.which("node"), reason="needs node and SOJOURN_NODE_MODULES"),
]


def told(url: str, key: str = "unused") -> dict:
    done = subprocess.run(
        ["node", str(SCRIPT), url, key],
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
