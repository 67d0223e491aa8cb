"""Grammars that clients send, checked in a process of their own."""
