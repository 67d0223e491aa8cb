"""Records of every step and request of a foreign server, as a stream that Sojourn reads."""

__version__ = "0.1.0"
