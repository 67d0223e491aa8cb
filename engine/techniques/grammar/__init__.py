"""Grammars that constrain an output: compiled by llguidance, applied as masks."""
