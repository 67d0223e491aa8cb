"""Everything between HTTP and the core process: its client, calls and their sequences."""
