"""Gauges show what is, and nothing where nobody knows."""

from random import Random

import msgspec
import pytest

from sojourn.interop.exported.prometheus import Exporter
from sojourn.interop.exported.prometheus_pool import Pool
from sojourn.interop.exported.vllm_names import EngineFacts
from sojourn.metrics.compute.weight_error import WeightError
from sojourn.metrics.steps import Steps
from tests.interop.exported.scraped_page import scraped, value
from tests.metrics.random_records import random_step


def test_gauges_follow_the_last_step_and_do_not_lie_when_the_engine_idles_or_dies():
    exporter = Exporter("tiny")
    unknown = scraped(exporter)
    assert not [name for name, _ in unknown if name.startswith("sojourn_memory_kv")]
    step = random_step(Random(1))
    exporter.observe_steps(Steps([step]))
    busy = scraped(exporter)
    assert value(busy, "request_running") == len(step.request_ids)
    assert value(busy, "request_waiting") == step.waiting
    pool = step.blocks_free + step.blocks_active + step.blocks_reusable
    assert sum(number for (name, _), number in busy.items() if name == "sojourn_memory_kv_blocks") == pool
    in_use = step.blocks_active / pool
    assert value(busy, "memory_kv_usage_ratio") == pytest.approx(in_use)
    exporter.gauges.observe_state(Pool(free=30, reusable=10))
    idle = scraped(exporter)
    assert value(idle, "request_running") == value(idle, "request_waiting") == 0
    assert value(idle, "memory_kv_usage_ratio") == 0
    assert value(idle, "memory_kv_blocks", state="reusable") == 10
    exporter.observe_steps(Steps([step]))
    exporter.observe_core_restart()
    assert not [name for name, _ in scraped(exporter) if name.startswith("sojourn_memory_kv")]
    assert value(scraped(exporter), "request_running") == 0


@pytest.mark.parametrize("level", ["full", "off"])
def test_page_says_which_telemetry_is_kept(level):
    assert value(scraped(Exporter("tiny", telemetry=level)), "telemetry_enabled_info", level=level) == 1


def test_measured_limits_are_there_once_somebody_measured_them():
    exporter = Exporter("tiny")
    assert not [name for name, _ in scraped(exporter) if "ceiling" in name or "roofline" in name]
    base = msgspec.structs.replace(random_step(Random(1)), kinds=["decode"], new_tokens=[1], request_ids=["a"])
    bound_by_bytes = base.with_columns(flops=10**6, bytes=3 * 10**7)
    bound_by_flops = base.with_columns(flops=10**9, bytes=3)
    exporter.observe_steps(Steps([bound_by_bytes]))  # before anything was known
    exporter.observe_ceilings({"float32": 2e11, "int8": 5e11}, 3e10, "float32")
    exporter.observe_steps(Steps([bound_by_bytes]))
    exporter.observe_steps(Steps([bound_by_flops]))
    samples = scraped(exporter)
    assert value(samples, "compute_roofline_seconds_total", composition="decode") == pytest.approx(0.001 + 0.005)
    assert value(samples, "compute_ceiling_flops_per_second", precision="int8") == 5e11
    assert value(samples, "compute_ceiling_bytes_per_second") == 3e10


def test_error_of_weights_is_told_where_it_was_measured():
    exporter = Exporter("tiny")
    exporter.gauges.observe_weight_error(None)
    assert not [name for name, _ in scraped(exporter) if "weight" in name]
    exporter.gauges.observe_weight_error(WeightError("self", 1023, 0.0125, -0.002, 0.97))
    samples = scraped(exporter)
    assert value(samples, "compute_weight_error_nats") == 0.0125
    assert value(samples, "compute_weight_greedy_agreement_ratio") == 0.97


def test_slots_are_those_of_blocks_in_use_once_the_size_of_a_block_is_known():
    exporter = Exporter("tiny")
    step = msgspec.structs.replace(random_step(Random(1)), blocks_active=7, slots_written=90)
    exporter.observe_steps(Steps([step]))
    assert not [name for name, _ in scraped(exporter) if name == "sojourn_memory_slots"]
    exporter.observe_ready(EngineFacts(100, 16, 512, 64, "float32", prefix_caching=True))
    exporter.observe_steps(Steps([step]))
    samples = scraped(exporter)
    assert value(samples, "memory_slots", state="allocated") == 7 * 16
    assert value(samples, "memory_slots", state="written") == 90
    exporter.observe_core_restart()
    assert not [name for name, _ in scraped(exporter) if name == "sojourn_memory_slots"]
