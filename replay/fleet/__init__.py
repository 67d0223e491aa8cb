"""A large fleet behind one router, replayed with the traffic of a trace."""
