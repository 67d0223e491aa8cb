"""The calibration of a device."""

import torch

from engine.compute import device_ceilings


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
