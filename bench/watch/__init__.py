"""How soon a watch names planted faults, and how long it stays silent on a healthy server."""
