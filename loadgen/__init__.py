"""Load: schedules, open-loop replay on Locust, timing of every chunk. Imports no engine and no torch."""
