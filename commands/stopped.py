"""What a verb that Ctrl-C stops says of its records. Imports nothing: it is asked while the verbs are loaded."""

SENDING = ("load", "run", "demo", "bench-serve")  # verbs that a run comes from
NOTHING_KEPT = "stopped before a request was sent; nothing was recorded"
kept: list[object] = []  # run directories that a verb has named
