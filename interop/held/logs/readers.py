"""The readers of logs, pages, flags and sensors' texts."""

from sojourn.interop.held.held import Reader

LOG_READERS: tuple[Reader, ...] = ()
