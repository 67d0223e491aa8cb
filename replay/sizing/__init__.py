"""A server that does not exist yet: how much of a load it serves, in which memory, and for how many dollars."""
