"""The manifests of `scale/` against the schemas of Kubernetes and of its extensions. They run on no cluster here.

SOJOURN_KUBERNETES_PYTHON names the python of an environment with kubernetes-validate 1.37.0. SOJOURN_NODE_MODULES names
a folder of npm with @kubernetes-models/gateway-api 2.0.0, @kubernetes-models/keda 2.0.0,
@kubernetes-models/prometheus-operator 6.0.0 and typescript 5. Their validators check values and required fields, and
their types the names of fields. InferencePool has no package: `tests/scale/test_manifests.py` checks its fields.
"""

import copy
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.scale.manifests import every_object

PYTHON = os.environ.get("SOJOURN_KUBERNETES_PYTHON")
MODULES = os.environ.get("SOJOURN_NODE_MODULES")
pytestmark = pytest.mark.peer
KUBERNETES = "1.37"
EXTENSIONS = {
    "gateway.networking.k8s.io/v1": "@kubernetes-models/gateway-api",
    "keda.sh/v1alpha1": "@kubernetes-models/keda",
    "monitoring.coreos.com/v1": "@kubernetes-models/prometheus-operator",
}
BY_TEST = "inference.networking.k8s.io/v1"
VALIDATE = f"""
import json, sys, kubernetes_validate
for line in sys.stdin:
    try:
        kubernetes_validate.validate(json.loads(line), "{KUBERNETES}", strict=True)
        print("fits")
    except Exception as fault:
        print(" ".join(str(fault).split())[:300])
"""
TSC = ["--noEmit", "--skipLibCheck", "--module", "nodenext", "--moduleResolution", "nodenext", "--target", "es2022"]


def of_kubernetes() -> list[dict]:
    return [item for item in every_object() if item["apiVersion"] not in {*EXTENSIONS, BY_TEST}]


def of_extensions() -> list[dict]:
    return [item for item in every_object() if item["apiVersion"] in EXTENSIONS]


def kubernetes_verdicts(items: list[dict]) -> list[str]:
    lines = "\n".join(json.dumps(item) for item in items)
    done = subprocess.run([PYTHON, "-c", VALIDATE], input=lines, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def extension_faults(items: list[dict], folder: Path) -> str:
    """What the validators and the types find, "" if nothing."""
    program = "".join(
        f"{{ const {{ {item['kind']}: Kind }} = await import("
        f"'{EXTENSIONS[item['apiVersion']]}/{item['apiVersion']}/{item['kind']}');\n"
        f"new Kind({json.dumps({'metadata': item['metadata'], 'spec': item['spec']})}).validate(); }}\n"
        for item in items
    )
    (folder / "node_modules").unlink(missing_ok=True)
    (folder / "node_modules").symlink_to(Path(MODULES).resolve())
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "check.ts").write_text(program)
    (folder / "check.mjs").write_text(program)
    commands = (["node", "check.mjs"], ["node_modules/.bin/tsc", *TSC, "check.ts"])
    done = [subprocess.run(each, cwd=folder, capture_output=True, text=True, check=False) for each in commands]
    return "".join(each.stdout + each.stderr for each in done if each.returncode)


def broken(item: dict, key: str) -> dict:
    wrong = copy.deepcopy(item)
    wrong["spec"][f"{key}X"] = wrong["spec"].pop(key)
    return wrong


@pytest.mark.skipif(PYTHON is None, reason="SOJOURN_KUBERNETES_PYTHON names no python with kubernetes-validate")
def test_objects_fit_the_strict_schemas_of_kubernetes():
    items = of_kubernetes()
    assert len(items) >= 20
    verdicts = dict(zip([f"{item['kind']} {item['metadata']['name']}" for item in items],
                        kubernetes_verdicts(items), strict=True))  # fmt: skip
    assert set(verdicts.values()) == {"fits"}, verdicts
    (wrong,) = kubernetes_verdicts([broken(items[0], next(iter(items[0]["spec"])))])
    assert wrong != "fits", "a field that does not exist passes"


@pytest.mark.skipif(MODULES is None, reason="SOJOURN_NODE_MODULES names no folder with @kubernetes-models")
def test_objects_fit_the_schemas_of_the_extensions(tmp_path):
    items = of_extensions()
    assert {item["kind"] for item in items} == {"Gateway", "HTTPRoute", "ScaledObject", "PodMonitor", "PrometheusRule"}
    assert extension_faults(items, tmp_path) == ""
    for item in items:
        assert set(item) == {"apiVersion", "kind", "metadata", "spec"}
        wrong = broken(item, next(iter(item["spec"])))
        assert extension_faults([wrong], tmp_path), f"a {item['kind']} with a wrong field passes"


def test_nothing_is_left_out():
    assert len(of_kubernetes()) + len(of_extensions()) + 2 == len(every_object()), "beside the two inference pools"
