"""The roofline of measured ceilings, and where ceilings are stored."""

import msgspec
import pytest

from sojourn.metrics.compute.roofline import Ceilings, Gemm, load_ceilings, store_ceilings
from sojourn.metrics.errors import CalibrationError

RATES = [Gemm("float32", 1, 1e9), Gemm("float32", 64, 8e9)]
CEILINGS = Ceilings("a device", 2, "2026-11-21", {}, 2e9, 1e9, 64, RATES)


def test_the_roofline_takes_the_larger_of_arithmetic_and_memory():
    assert CEILINGS.ridge("float32") == 4.0
    assert CEILINGS.roofline_ns(8e6, 0, "float32") == pytest.approx(1e6)
    assert CEILINGS.roofline_ns(0, 4e6, "float32") == pytest.approx(2e6)
    assert CEILINGS.mfu(4e6, 1e6, "float32") == pytest.approx(0.5) and CEILINGS.mbu(1e6, 1e6) == pytest.approx(0.5)
    with pytest.raises(CalibrationError, match=r"int8.*float32.*calibrate device"):
        CEILINGS.peak_flops("int8")


def test_ceilings_are_found_where_they_were_stored(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(CalibrationError, match="run sojourn calibrate device"):
        load_ceilings("a device")
    path = store_ceilings(CEILINGS)
    assert path.is_relative_to(tmp_path) and load_ceilings("a device") == CEILINGS
    assert msgspec.json.decode(path.read_bytes(), type=Ceilings) == CEILINGS
    path.write_text("{}")
    with pytest.raises(CalibrationError, match="cannot be read"):
        load_ceilings("a device")
