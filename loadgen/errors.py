"""The error of a scenario that cannot be used, and the guess for a name that is not known."""

import difflib

from sojourn.metrics.errors import InputError


class ScenarioError(InputError):
    """A scenario that cannot be used. `faults` has one sentence for each thing that is wrong."""

    def __init__(self, *faults: str):
        super().__init__("\n".join(faults))
        self.faults = list(faults)


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean …?`, or "" where no known name is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean `{close[0]}`?" if close else ""
