"""The readers of benchmark summaries."""

from sojourn.interop.held.held import Reader

SUMMARY_READERS: tuple[Reader, ...] = ()
