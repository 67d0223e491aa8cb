"""Requests, their states and the scheduler. Pure bookkeeping; knows no torch."""
