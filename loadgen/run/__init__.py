"""One experiment: server, load, run directory."""
