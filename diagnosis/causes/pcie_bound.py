"""The device waits for its PCIe link: KV cache or weights that lie in the host's memory, or a link of few lanes."""

from collections.abc import Iterator

from sojourn.diagnosis.cause import Cause, Client, Evidence, Excess, Means, Proposal, Rule, evidence
from sojourn.diagnosis.excess import SERVED
from sojourn.diagnosis.proposal import Gain
from sojourn.diagnosis.sensor_facts import DeviceFacts
from sojourn.diagnosis.statements import sensors
from sojourn.diagnosis.statements.excess import missing_share
from sojourn.diagnosis.symptom_tree.reading import Reading

USUAL_LANES = 16
LINK = f"{sensors.SOURCE}: pcie_rx, pcie_tx, pcie_generation, pcie_lanes"


def read_sensors(facts: Means | Client, excess: Excess) -> Proposal | None:
    """Much goes over the link, and little works meanwhile."""
    device = sensors.held_up(facts, "pcie")
    if device is None or excess.objective == SERVED:
        return None
    rate, works = device.pcie_rate or 0.0, device.mean("sm_activity", "engine_activity", "gpu_utilisation") or 0.0
    return Proposal(
        cause=f"{device.device} waits for PCIe: {rate / 1e9:.1f} GB/s go over its link, and its cores work "
        f"{works:.0%} of the time in which requests are in flight",
        evidence=[
            evidence(f"{_of_link(device)}, over {device.readings} readings with requests in flight", rate, "bytes/s",
                     LINK, weight=2),
            evidence(sensors.figures(device), works, "share", f"{sensors.SOURCE}: sm_activity, gpu_utilisation"),
            *_narrow(device),
            *sensors.whose_devices(facts),
        ],
        measurement="the same load without offload of KV cache or weights (--kv-transfer-config, --cpu-offload-gb), "
        "with the link's use in view",
        settings={},
        if_cause=f"little goes over the link, the cores work more, and {missing_share(excess)} falls",
        if_rival="as little works with an idle link",
        change="less offload: a smaller model or KV cache in the device; or a link with all its lanes",
        explained=sensors.part_lost(facts, excess, 1 - works),
        gain=Gain(f"at most {1 - works:.0%} of the time of its steps", basis="the time in which its cores do not work"),
    )  # fmt: skip


def _of_link(device: DeviceFacts) -> str:
    rate, link = device.pcie_rate or 0.0, device.pcie_link
    if link is None:
        return f"{rate / 1e9:.1f} GB/s go over a link whose width no sensor shows"
    return f"{rate / 1e9:.1f} of the {link / 1e9:.1f} GB/s of its link are used"


def _narrow(device: DeviceFacts) -> Iterator[Evidence]:
    lanes = device.highest.get("pcie_lanes")
    if lanes and lanes < USUAL_LANES:
        yield evidence(f"the link has {lanes:.0f} lanes, where servers have {USUAL_LANES}", lanes, "lanes", LINK)


def show_link(facts: Client) -> Reading | None:
    seen = [each for each in sensors.devices_of(facts) if each.pcie_rate is not None and each.readings]
    busiest = max(seen, key=sensors.link_use, default=None)
    if busiest is None:
        return None
    share = sensors.link_use(busiest)
    return Reading(f"{busiest.device}: {_of_link(busiest)}", share < sensors.LINK, LINK, min(1.0, share))


CAUSE = Cause(
    key="pcie_bound",
    lifecycles=("compute", "memory"),
    object="PCIe link of the device",
    kind="fault",
    rival="a host that holds the device up, with an idle link",
    rival_key="slow_host",
    asks="Does the device wait for PCIe?",
    measurement="the bytes per second of its link: `nvidia-smi dmon -s t`, a DCGM exporter, or `--sensors nvml`",
    figures=(show_link,),
    missing="sensors of the device (`--sensors`)",
    lacks="sensors of the device (`--sensors`)",
    complaints={"low_device_utilisation": 9},
    reads={Means: Rule(read_sensors, refuted_by=(sensors.IDLE_LINK,)), Client: Rule(read_sensors)},
)
