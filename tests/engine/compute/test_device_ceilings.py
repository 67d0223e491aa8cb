"""The calibration of a device."""

import torch

from sojourn.engine.compute import device_ceilings
from sojourn.engine.techniques.group.link_ceilings import Plan, links
from sojourn.metrics.compute.link import LINK_COLLECTIVES, POINT_TO_POINT


def test_calibration_measures_every_precision_and_row_count(monkeypatch):
    small = {"CELL_SECONDS": 0.002, "CPU_INNER": 64, "ROTATED_BYTES": 1 << 16, "STREAM_BYTES": 1 << 20}
    for name, value in small.items():
        monkeypatch.setattr(device_ceilings, name, value)
    threads = torch.get_num_threads()
    ceilings = device_ceilings.calibrate("cpu", threads=1)
    assert torch.get_num_threads() == threads and ceilings.threads == 1
    assert "float32" in ceilings.precisions and ceilings.bandwidth > 0 and ceilings.launch_ns is None
    for precision in ceilings.precisions:
        rates = {gemm.rows: gemm.flops_per_s for gemm in ceilings.gemm if gemm.precision == precision}
        assert tuple(rates) == device_ceilings.CPU_ROWS and all(rate > 0 for rate in rates.values())


def test_links_are_fitted_to_what_exchanges_between_two_ranks_take():
    plan = Plan(sizes=(1 << 10, 1 << 14, 1 << 18), repeats=5, size_seconds=0.01, work_ns=(50_000,))
    found = {link.collective: link for link in links(torch.device("cpu"), 1, plan)}
    assert tuple(found) == LINK_COLLECTIVES
    for link in found.values():
        assert link.transport == "gloo" and link.ranks == 2
        times = [time.ns for time in link.times]
        assert times == sorted(times) and 0 <= link.latency_ns <= times[-1] and link.bytes_per_s > 0
    assert found[POINT_TO_POINT].wait_share == 0
