"""Recorded traffic of many forms → rows: when requests came, how long they were, what they shared or said."""
