"""A run as a fixed list of audits, which a program can hold: each passes, fails, or cannot be measured."""
