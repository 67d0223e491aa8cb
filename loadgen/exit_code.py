"""How a load ended, as the exit code that scripts read: the same for every verb that sends one."""

NOT_VALID = 4
NOTHING_SERVED = 5

# For the help of each of these verbs.
EXIT_CODES = (
    "Exit code: 0 measured, whatever the diagnosis; 1 failure; 2 wrong use; 4 the run is not valid; "
    "5 no measured request was served; 130 stopped."
)


def exit_code(valid: bool, served: int) -> int:
    """Of a run that was sent to its end; `served` counts the measured requests."""
    return NOT_VALID if not valid else 0 if served else NOTHING_SERVED
