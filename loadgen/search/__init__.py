"""Searches over rates: bisection, points, frontier."""
