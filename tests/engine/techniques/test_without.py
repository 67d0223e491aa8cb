"""An installation without the folders of techniques: an engine that asks for none runs as ever, others are refused."""

import json
import subprocess
import sys

import pytest

from sojourn.engine.techniques import NAMES
from tests.engine.harness import generate

ASKING = {
    "lora": {"lora_runtime_loading": True, "lora_folder": "."},
    "tiers": {"kv_host_gib": 0.01},
    "handover": {"kv_role": "prefill"},
    "speculation": {"speculation": "ngram"},
    "group": {"tensor_parallel": 2},  # grammars are asked for by a request
}
PROMPT, OUTPUTS = [3, 4, 5, 6], 6
CODE = """
import json, sys
from importlib.abc import MetaPathFinder

class Without(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        above, _, technique = name.partition("sojourn.engine.techniques.")
        folder = technique.partition(".")[0]
        if not above and folder in {names!r}:
            raise ImportError(f"there is no {{name}}")

sys.meta_path.insert(0, Without())
import sojourn.engine.check, sojourn.engine.llm, sojourn.engine.server.serve
from sojourn.engine.config import EngineConfig
from sojourn.engine.core import build
from sojourn.engine.messages import Submit, Tokens
from sojourn.engine.sampling import Grammar, SamplingParams
from sojourn.metrics.errors import ModelError

def engine_of(**settings):
    published = []
    config = EngineConfig(model="tiny-model", threads=1, num_kv_blocks=256, max_model_len=512, **settings)
    return build(config, 0, published.append)[0], published

engine, published = engine_of()
greedy = dict(max_tokens={outputs}, temperature=0.0, ignore_eos=True)
engine.receive([
    Submit("r", {prompt!r}, SamplingParams(**greedy), encoded_ns=0),
    Submit("g", {prompt!r}, SamplingParams(max_tokens={outputs}, grammar=Grammar("regex", "a+")), encoded_ns=0),
], 0)
while engine.has_work:
    engine.receive([], engine.step())
engine.flush()
found = {{"tokens": [], "refused": {{}}}}
for message in published:
    if isinstance(message, Tokens):
        found["tokens"] += [output.token_id for output in message.outputs if output.request_id == "r"]
    else:
        for ended in getattr(message, "ended", ()):
            if ended.request_id == "g" and ended.error:
                found["refused"]["grammar"] = ended.error
for name, settings in {asking!r}.items():
    if name not in {names!r}:
        continue
    try:
        engine_of(**settings)
    except ModelError as error:
        found["refused"][name] = str(error)
print(json.dumps(found))
"""


ALONE = [pytest.param((name,), id=name, marks=pytest.mark.thorough) for name in NAMES]


@pytest.mark.parametrize("names", [pytest.param(NAMES, id="all"), *ALONE])
def test_engine_runs_without(names):
    expected, _ = generate("tiny-model", [PROMPT], OUTPUTS)
    code = CODE.format(names=names, prompt=PROMPT, outputs=OUTPUTS, asking=ASKING)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [found["tokens"]] == expected
    assert set(found["refused"]) == set(names)
    for name, sentence in found["refused"].items():
        lacking = "tiers" if name == "handover" and "tiers" in names else name  # which stands on tiers
        assert f"{lacking} is asked for, and this installation cannot load it" in sentence
