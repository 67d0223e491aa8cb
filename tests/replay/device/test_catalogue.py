"""The catalogue of devices, and a user's file in front of it."""

import pytest

from sojourn.metrics.errors import InputError
from sojourn.replay.device.catalogue import catalogue, device_named, device_recorded_as


def test_every_figure_has_a_source():
    for name, device in catalogue().items():
        assert device.source, name
        assert (device.usd_per_hour is None) == (device.price_source is None), name
        assert name in (device_recorded_as(f"NVIDIA {title}") for title in device.recorded_as)


@pytest.mark.parametrize(
    ("recorded", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100_sxm"), ("NVIDIA H100 PCIe", "h100_pcie"), ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"), ("NVIDIA A100-SXM4-80GB", "a100_sxm"), ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200_sxm"),
        ("NVIDIA GH200 480GB", None), ("NVIDIA A3000", None), ("Tesla T4", None),
    ],
)  # fmt: skip
def test_a_driver_s_name_is_recognised_or_not_guessed(recorded, name):
    assert device_recorded_as(recorded) == name


def test_a_user_s_file_replaces_a_price_and_adds_a_device(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text(
        "[h100_sxm]\nusd_per_hour = 1.5\n[mine]\ntitle = 'Mine'\nmemory_gib = 10\nbandwidth_gbs = 100\nlink_gbs = 10\n"
        "flops = { bf16 = 50 }\n"
    )
    found = catalogue(own)
    assert found["h100_sxm"].usd_per_hour == 1.5 and found["h100_sxm"].price_source == str(own)
    assert found["h100_sxm"].memory_gib == 80
    assert device_named("mine", found).flops_of("fp8") == 50e12, "without products of fp8 weights are widened"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[mine]\ntitle = 'Mine'\n", "device 'mine'"),
        ("[h100_sxm]\nprice = 3\n", "price"),
        ("[h100_sxm]\nmemory_gib = 0\n", "above 0"),
        ("[h100_sxm\n", "cannot be read"),
        ("h100_sxm = 3\n", "is no device"),
    ],
)
def test_a_faulty_file_is_refused_with_its_fault(tmp_path, text, says):
    own = tmp_path / "own.toml"
    own.write_text(text)
    with pytest.raises(InputError, match=says):
        catalogue(own)


def test_an_unknown_device_is_refused_with_those_that_are_known():
    with pytest.raises(InputError, match=r"Did you mean h100_sxm\? Known are a100_sxm"):
        device_named("h100sxm")
