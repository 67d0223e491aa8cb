"""The manifests of `scale/` name only settings, routes, ports, labels and metrics that exist. Whether they fit the
schemas of Kubernetes and of its extensions is asked in `tests/peers/test_manifest_schemas.py`."""

import re

import pytest
import yaml

from sojourn.dashboards.views import metrics_of
from sojourn.engine.config import EngineConfig
from sojourn.engine.server.app import build_app
from sojourn.interop.exported.vllm_names import EngineFacts, vllm_metrics
from sojourn.metrics.catalog.catalog import METRIC_BY_NAME
from tests.scale.manifests import FOLDERS, containers, every_object, objects, pods, servers

SERVERS = [(folder, *server) for folder in FOLDERS for server in servers(folder)]
OF_A_FOLDER = pytest.mark.parametrize("folder", FOLDERS)
OF_A_SERVER = pytest.mark.parametrize(
    ("folder", "name", "template", "settings"), SERVERS, ids=[f"{folder}/{name}" for folder, name, *_ in SERVERS]
)


def selects(labels: dict[str, str], template: dict) -> bool:
    return labels.items() <= template["metadata"]["labels"].items()


@OF_A_SERVER
def test_settings_are_those_of_serve(folder, name, template, settings):
    known = {key: re.sub(r"\$\((\w+)\)", r"\1", value) for key, value in settings.items()}
    config = EngineConfig.model_validate(known)
    assert set(known) <= set(EngineConfig.model_fields) and config.host == "0.0.0.0"


@OF_A_SERVER
def test_an_expanded_variable_is_one_of_the_container(folder, name, template, settings):
    (container,) = (each for each in containers(template) if each.get("command") == ["sojourn"])
    used = {variable for value in settings.values() for variable in re.findall(r"\$\((\w+)\)", value)}
    assert used == {variable["name"] for variable in container.get("env", [])}


@OF_A_SERVER
def test_ports_are_those_that_the_server_opens(folder, name, template, settings):
    (container,) = (each for each in containers(template) if each.get("command") == ["sojourn"])
    addresses = [settings[key] for key in ("kv_events", "kv_events_replay") if key in settings]
    opened = {int(settings["port"]), *(int(address.rpartition(":")[2]) for address in addresses)}
    opened |= {int(settings[key]) for key in ("kv_transfer_port",) if key in settings}
    assert {port["containerPort"] for port in container["ports"]} == opened


@OF_A_SERVER
def test_probes_ask_routes_of_the_server(folder, name, template, settings):
    (container,) = (each for each in containers(template) if each.get("command") == ["sojourn"])
    names = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        request = container[probe]["httpGet"]
        assert request["port"] in names and request["path"] in routes()


def routes() -> set[str]:
    return {route.path for route in build_app(EngineConfig(model="tiny-model")).routes}


@OF_A_SERVER
def test_a_pod_lives_until_its_server_has_drained(folder, name, template, settings):
    (container,) = (each for each in containers(template) if each.get("command") == ["sojourn"])
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert template["spec"]["terminationGracePeriodSeconds"] >= before + int(settings["drain_seconds"]) + 10


@OF_A_SERVER
def test_a_folder_that_is_read_is_mounted(folder, name, template, settings):
    (container,) = (each for each in containers(template) if each.get("command") == ["sojourn"])
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounted) == {volume["name"] for volume in template["spec"]["volumes"]}
    for key in ("model", "api_keys"):
        assert key not in settings or settings[key].startswith(tuple(f"{path}/" for path in mounted.values()))


@OF_A_FOLDER
def test_selectors_find_pods_and_their_ports(folder):
    templates = [template for _, template in pods(folder)]
    for item in objects(folder):
        kind, spec = item["kind"], item.get("spec", {})
        if kind in ("Deployment", "StatefulSet"):
            assert selects(spec["selector"]["matchLabels"], spec["template"])
        elif kind in ("Service", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "InferencePool"):
            selector = spec["podSelector"] if kind == "NetworkPolicy" else spec["selector"]
            found = [each for each in templates if selects(selector.get("matchLabels", selector), each)]
            assert found, f"{kind} {item['metadata']['name']} selects no pod"
            for port in wanted_ports(kind, spec):
                assert port in {key for each in found for key in ports_of(each)}, f"{kind} names no port {port}"


def wanted_ports(kind: str, spec: dict) -> list[str | int]:
    if kind == "NetworkPolicy":
        return [port["port"] for rule in spec["ingress"] for port in rule.get("ports", [])]
    if kind == "Service":
        return [port["targetPort"] for port in spec["ports"]]
    if kind == "PodMonitor":
        assert {endpoint["path"] for endpoint in spec["podMetricsEndpoints"]} <= routes()
        return [endpoint["port"] for endpoint in spec["podMetricsEndpoints"]]
    return [port["number"] for port in spec["targetPorts"]] if kind == "InferencePool" else []


def ports_of(template: dict) -> set[str | int]:
    ports = [port for each in containers(template) for port in each["ports"]]
    return {port["name"] for port in ports} | {port["containerPort"] for port in ports}


@OF_A_FOLDER
def test_objects_refer_to_objects_of_their_folder(folder):
    named = {(item["kind"], item["metadata"]["name"]) for item in objects(folder)}
    for item in objects(folder):
        kind, spec = item["kind"], item.get("spec", {})
        if kind == "ScaledObject":
            assert ("Deployment", spec["scaleTargetRef"]["name"]) in named
        elif kind == "HTTPRoute":
            backends = [backend for rule in spec["rules"] for backend in rule["backendRefs"]]
            assert {(backend["kind"], backend["name"]) for backend in backends} <= named
            assert {("Gateway", parent["name"]) for parent in spec["parentRefs"]} <= named
        elif kind == "InferencePool":
            assert ("Service", spec["endpointPickerRef"]["name"]) in named
        elif kind == "StatefulSet":
            assert ("Service", spec["serviceName"]) in named
    assert len(named) == len(objects(folder))


def test_autoscaling_asks_for_metrics_that_exist():
    (scaled,) = (item for item in objects("scale/kubernetes") if item["kind"] == "ScaledObject")
    for trigger in scaled["spec"]["triggers"]:
        asked = metrics_of(trigger["metadata"]["query"])  # raises KeyError for a metric that the catalogue lacks
        labels = set(re.findall(r"(\w+)=", trigger["metadata"]["query"]))
        assert asked and labels <= {"job", *(label for metric in asked for label in metric.labels)}


PICKERS = pytest.mark.parametrize("folder", FOLDERS[1:])


def picker(folder: str) -> dict:
    (made,) = (item for item in objects(folder) if item["kind"] == "ConfigMap")
    return yaml.safe_load(made["data"]["config.yaml"])


@PICKERS
def test_the_picker_reads_metrics_that_the_servers_have(folder):
    (extractor,) = (each for each in picker(folder)["plugins"] if each["type"] == "core-metrics-extractor")
    (engine,) = extractor["parameters"]["engineConfigs"]
    specs = [value for key, value in engine.items() if key.endswith("Spec")]
    of_vllm = {metric.name for metric in vllm_metrics(EngineFacts(1, 16, 2048, 1, "auto", True))}
    of_vllm |= {"vllm:cache_config_info", "vllm:lora_requests_info"}
    assert len(specs) == 5 and set(specs) <= set(METRIC_BY_NAME) | of_vllm
    for _, template, settings in servers(folder):
        assert template["metadata"]["labels"]["llm-d.ai/engine-type"] == engine["name"]
        assert settings["compat"] == "vllm"


@PICKERS
def test_a_profile_uses_plugins_that_are_declared(folder):
    config = picker(folder)
    declared = {plugin["type"] for plugin in config["plugins"]}
    used = {each["pluginRef"] for profile in config["schedulingProfiles"] for each in profile["plugins"]}
    for source in config["dataLayer"]["sources"]:
        used |= {source["pluginRef"], *(each["pluginRef"] for each in source["extractors"])}
    assert used <= declared


def test_the_picker_subscribes_where_the_servers_publish():
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in picker(FOLDERS[1])["plugins"]}
    index = plugins["precise-prefix-cache-producer"]
    ((_, _, settings),) = servers(FOLDERS[1])
    found = index["kvEventsConfig"]["podDiscoveryConfig"]
    assert settings["kv_events"].endswith(f":{found['socketPort']}")
    assert settings["kv_events_replay"].endswith(f":{found['replaySocketPort']}")
    assert settings["kv_events_topic"].startswith(index["kvEventsConfig"]["topicFilter"])
    assert int(settings["block_size"]) == index["tokenProcessorConfig"]["blockSize"]
    assert plugins["token-producer"]["modelName"] == settings["served_model_name"]
    assert {"/v1/completions/render", "/v1/chat/completions/render"} <= routes()


def test_decode_servers_know_each_prefill_server_by_name():
    folder = "scale/llm-d/prefill-decode"
    (prefill,) = (item for item in objects(folder) if item["kind"] == "StatefulSet")
    settings = {name: settings for name, _, settings in servers(folder)}
    domain = settings["prefill"]["kv_transfer_host"].removeprefix("$(POD_NAME).")
    assert domain == prefill["spec"]["serviceName"]
    names = [f"{prefill['metadata']['name']}-{number}.{domain}" for number in range(prefill["spec"]["replicas"])]
    assert settings["decode"]["kv_peers"].split(",") == names
    sidecar, _ = containers(dict(pods(folder))["decode"])
    assert f"--vllm-port={settings['decode']['port']}" in sidecar["args"]


# InferencePool v1 as its API reference has it: field → whether it is required, and the type or the fields below it.
# No package index has this schema.
PORT = {"number": (True, int)}
INFERENCE_POOL = {
    "selector": (True, {"matchLabels": (True, dict)}),
    "targetPorts": (True, [PORT]),
    "appProtocol": (False, str),
    "endpointPickerRef": (True, {
        "group": (False, str), "kind": (False, str), "name": (True, str), "port": (False, PORT),
        "failureMode": (False, str),
    }),
}  # fmt: skip


def unfit(value: object, shape: object, place: str) -> list[str]:
    if isinstance(shape, type):
        return [] if isinstance(value, shape) else [f"{place} is no {shape.__name__}"]
    if isinstance(shape, list):
        inner = shape[0]
        return [fault for number, each in enumerate(value) for fault in unfit(each, inner, f"{place}[{number}]")]
    missing = [f"{place}.{key} is missing" for key, (required, _) in shape.items() if required and key not in value]
    unknown = [f"{place}.{key} is no field" for key in value if key not in shape]
    below = [fault for key in value if key in shape for fault in unfit(value[key], shape[key][1], f"{place}.{key}")]
    return missing + unknown + below


def test_inference_pools_have_the_fields_of_version_1():
    pools = [item for item in every_object() if item["kind"] == "InferencePool"]
    assert len(pools) == 2
    for pool in pools:
        assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
        assert unfit(pool["spec"], INFERENCE_POOL, "spec") == []
        assert pool["spec"]["endpointPickerRef"]["failureMode"] in ("FailOpen", "FailClose")
    assert unfit({"selector": {}, "port": 1}, INFERENCE_POOL, "spec") == [
        "spec.targetPorts is missing", "spec.endpointPickerRef is missing", "spec.port is no field",
        "spec.selector.matchLabels is missing",
    ]  # fmt: skip
