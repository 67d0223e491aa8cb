"""How a load ended, as the exit code that scripts read: the same for every verb that sends one."""

NOT_VALID = 4
MOST_FAILED = 5

# For the help of each of these verbs.
EXIT_CODES = (
    "Exit code: 0 measured, whatever the diagnosis; 1 failure; 2 wrong use; 4 the run is not valid; "
    "5 most measured requests failed; 130 stopped."
)


def exit_code(valid: bool, served: int, failed: int = 0) -> int:
    """Of a run that was sent to its end. `served` and `failed` count the measured requests: most failed where more did
    than were served, or where none was served. A search, which drives the server beyond its capacity on purpose, gives
    no `failed`."""
    if not valid:
        return NOT_VALID
    return 0 if served and served >= failed else MOST_FAILED
