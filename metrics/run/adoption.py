"""What a server recorded while a client measured it, copied into the client's run directory."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from metrics.run.segments import read_segment, replace_table

# When a row of a server's table happened.
_MOMENT = {"requests": "arrived_ns", "steps": "begin_ns", "system": "ns", "kernels": "begin_ns"}
# The columns that are times of the server's clock; all others that end with _ns are durations.
_STAMPS = {
    "requests": (
        "arrived_ns", "encoded_ns", "queued_ns", "scheduled_ns", "first_written_ns", "written_ns", "finished_ns",
        "token_ns",
    ),
    "steps": ("begin_ns", "end_ns", "planned_ns", "device_end_ns"),
    "system": ("ns",),
    "kernels": ("begin_ns",),
}  # fmt: skip
ToClient = Callable[[np.ndarray], np.ndarray]  # times of a server's clock, int64 → those of the client's


def adopt(
    directory: Path, sources: dict[str, list[Path]], begin_ns: int, end_ns: int, to_client: ToClient | None = None
) -> int:
    """Copies what a server recorded in a span of the client's monotonic clock into another run directory; returns the
    rows. `to_client` where the server's clock was another one.

    `sources` are the files (`RunDirectory.sources`) of each of the tables `requests`, `steps`, `system` and `kernels`.
    """
    rows = 0
    for table, files in sources.items():
        for file in files:
            content = read_segment(file, table)
            for column in _STAMPS[table] if to_client is not None else ():
                place = content.column_names.index(column)
                content = content.set_column(place, content.field(place), _moved(content[column], to_client))
            moment = content[_MOMENT[table]]
            within = content.filter(pc.and_(pc.greater_equal(moment, begin_ns), pc.less_equal(moment, end_ns)))
            if within.num_rows:
                replace_table(directory / f"{table}.parts" / f"{file.stem}.parquet", within)
                rows += within.num_rows
    return rows


def _moved(column: pa.ChunkedArray, to_client: ToClient) -> pa.Array:
    """The same moments on the client's clock; nulls stay null."""
    whole = column.combine_chunks()
    whole = whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
    if pa.types.is_list(whole.type):
        moved = _moved(pa.chunked_array([whole.flatten()]), to_client)
        lengths = pc.fill_null(pc.list_value_length(whole), 0).to_numpy(zero_copy_only=False)
        offsets = pa.array(np.append(0, np.cumsum(lengths)).astype("int32"))
        return pa.ListArray.from_arrays(offsets, moved, type=whole.type, mask=whole.is_null())
    values = to_client(pc.fill_null(whole, 0).to_numpy(zero_copy_only=False))
    return pa.array(values, whole.type, mask=whole.is_null().to_numpy(zero_copy_only=False))
