"""Estimates of devices judged by public measurements of servers: `python -m bench.silicon`."""
