"""Which tool wrote a result file, and the file as runs."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from metrics.errors import InputError
from metrics.imported import aiperf, guidellm, inference_perf, vllm
from metrics.imported.result import Imported
from metrics.records.tables import columns
from metrics.run.directory import RunDirectory
from metrics.run.segments import replace_table

LARGEST_FILE = 4 << 30  # bytes: it is read into memory
WHOLE = (vllm, guidellm, inference_perf)  # files that are one document
KNOWN = ", ".join(each.TOOL for each in (*WHOLE, aiperf))


def read_result(path: Path) -> list[Imported]:
    """The benchmarks of a result file. Raises InputError where it is of no known tool, damaged, or a summary only."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise InputError(f"{path} is larger than 4 GiB; split it")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text, so it is no result file of {KNOWN}") from None
    documents = _documents(path, text)
    try:
        if all(map(aiperf.recognises, documents)):
            return aiperf.read_lines(documents)
        found = []
        for document in documents:
            reader = next((each for each in WHOLE if each.recognises(document)), None)
            if reader is None:
                raise InputError(f"{path} is no result file that is known here: {KNOWN}")
            found += reader.read(document)
        return found
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{path} has not the form that its tool writes ({error!r}); it is damaged") from None


def _documents(path: Path, text: str) -> list[Any]:
    """One document, or one a line."""
    try:
        return [json.loads(text)]
    except (json.JSONDecodeError, RecursionError):
        pass
    try:
        found = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not found:
        raise InputError(f"{path} is empty")
    return found


def write_run(found: Imported, path: Path, source: str) -> RunDirectory:
    """A run directory with the requests as `client`. What the file lacks is null, and named in run.json as
    `imported.unseen`. Raises RunDataError where a run lives there already."""
    if not found.rows:
        raise InputError(f"{source} holds no request")
    anchor = {"monotonic_ns": 0, "unix_ns": 0} if found.is_unix_time else None  # the stamps are the wall clock's
    run = RunDirectory.create(path, {
        "scenario": {"name": found.name, "arrivals": found.arrivals, "target": {}},
        "seed": None,
        "engine": {"model": found.model, "base_url": found.base_url},
        "hardware": None,
        "versions": {found.tool: found.version},
        "wall_anchor": anchor,
        "objectives": found.objectives,
        "client_error": None,
        "valid": None,
        "imported": {"tool": found.tool, "version": found.version, "file": source, "unseen": found.unseen},
    })  # fmt: skip
    table: pa.Table = columns("client", found.rows)
    replace_table(run.path / "client.parquet", table)
    return run
