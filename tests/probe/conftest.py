"""The probe is a distribution of its own: its folder is put on the path for these tests."""

import sys
from pathlib import Path

PROBE = str(Path(__file__).parents[2] / "probe")
if PROBE not in sys.path:
    sys.path.append(PROBE)
