"""Load from the tasks of a locustfile: users in Python, timed and recorded as a replay is."""
