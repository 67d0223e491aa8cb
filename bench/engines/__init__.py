"""The engine beside its peers: whole workloads, offline and over HTTP."""
