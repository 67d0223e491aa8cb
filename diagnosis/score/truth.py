"""The truth of a recorded run with a planted fault: `fault.json` beside `run.json`. No diagnosis reads it.

The program that plants the fault writes the file (`write_fault`), and the score reads it (`read_fault`). A case with
two faults has two truths, and a control has none.
"""

from pathlib import Path
from typing import Literal

import msgspec

from sojourn.diagnosis.verdict import Kind, State
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.run.directory import RunDirectory

FAULT_FILE = "fault.json"
Direction = Literal["larger", "smaller", "other"]  # other: a value without an order, such as a policy's name


class Remedy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A setting that mends the fault, and to which side of the planted value it has to go."""

    setting: str  # of EngineConfig
    direction: Direction = "other"


class Truth(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One planted fault. Each list holds what counts as right, the best answer first."""

    keys: list[str]  # keys of causes
    lifecycles: list[str]  # members of ledger.LIFECYCLES, or "client"
    kinds: list[Kind]
    remedies: list[Remedy] = []  # [] where no setting mends it: the remedy is then not scored


class FaultRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which case a run belongs to, and what a diagnosis of it should say."""

    case: str  # "kv-pool-quarter"; the same at each severity and repeat
    workload: str  # "chat", "documents", "sessions" …
    severity: int = 0  # 1 is the mildest; 0 for a control
    repeat: int = 0
    truths: list[Truth] = []  # [] for a control
    control: State | None = None  # the state that a control should have: healthy, or overloaded; None where it is none
    base: str | None = None  # the control case whose runs show the same workload without the fault
    plant: str = ""  # in words: what was changed

    @property
    def name(self) -> str:
        """`kv-pool-quarter/2#0`: case, severity and repeat."""
        return f"{self.case}/{self.severity}#{self.repeat}"


def write_fault(run: RunDirectory, record: FaultRecord) -> Path:
    return run.write_json(FAULT_FILE, msgspec.to_builtins(record))


def read_fault(path: Path) -> FaultRecord:
    """The record in the run directory `path`. Raises RunDataError where the file is absent or not such a record."""
    file = path / FAULT_FILE
    try:
        record = msgspec.json.decode(file.read_bytes(), type=FaultRecord)
    except OSError as error:
        raise RunDataError(f"{file} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise RunDataError(f"{file} is not the record of a planted fault: {error}") from None
    if (record.control is None) != bool(record.truths):
        raise RunDataError(f"{file}: a fault has `truths` and a control has `control`; give one of the two")
    return record
