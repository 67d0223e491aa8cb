"""Which tool wrote a result file, and the file as runs."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from sojourn.interop.imported import aiperf, guidellm, inference_perf, vllm
from sojourn.interop.imported.foreign import WANTED, foreign, foreign_text, packed
from sojourn.interop.imported.result import Imported, checked
from sojourn.metrics.errors import InputError
from sojourn.metrics.records.tables import columns
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.segments import replace_table

LARGEST_FILE = 4 << 30  # bytes: it is read into memory
WHOLE = (vllm, guidellm, inference_perf)  # files that are one document
CLOSED_LOOP = {
    "loop": "closed", "rate_changes": False,
    "told": ["closed loop: a request was sent when another had ended, so a slow server was asked less; do not read "
             "these latencies as those of an open load"],
}  # fmt: skip
KNOWN = ", ".join(each.TOOL for each in (*WHOLE, aiperf))


def read_result(path: Path) -> list[Imported]:
    """The benchmarks of a result file. Raises InputError where it is of no known tool, damaged, or a summary only."""
    try:
        if path.is_dir():
            raise InputError(f"{path} is a folder; name the result file in it: {WANTED}")
        if path.stat().st_size > LARGEST_FILE:
            raise InputError(f"{path} is larger than 4 GiB; split it")
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if (what := packed(content)) is not None:
        raise InputError(f"{path} {what}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text, so it is no result file of {KNOWN}") from None
    documents = _documents(path, text)
    try:
        if all(map(aiperf.recognises, documents)):
            return [checked(each) for each in aiperf.read_lines(documents)]
        found = []
        for document in documents:
            reader = next((each for each in WHOLE if each.recognises(document)), None)
            if reader is None:
                raise InputError(f"{path} {foreign(document)}")
            found += [checked(each) for each in reader.read(document)]
        return found
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{path} has not the form that its tool writes ({error!r}); it is damaged") from None


def _documents(path: Path, text: str) -> list[Any]:
    """One document, or one a line."""
    if not text.strip():
        raise InputError(f"{path} is empty: did the tool end before it wrote its result?")
    try:
        return [json.loads(text)]
    except (json.JSONDecodeError, RecursionError) as error:
        whole = error
    found: list[Any] = []
    lines = [line for line in text.splitlines() if line.strip()]
    for line in lines:
        try:
            found.append(json.loads(line))
        except (json.JSONDecodeError, RecursionError) as error:
            if found and isinstance(found[0], dict):
                cut = " (it is the last: was the file cut off?)" if len(found) == len(lines) - 1 else ""
                raise InputError(f"{path}: line {len(found) + 1} is not JSON: {error}{cut}") from None
            raise InputError(f"{path} {foreign_text(text, whole)}") from None
    return found


def write_run(found: Imported, path: Path, source: str) -> RunDirectory:
    """A run directory with the requests as `client`. What the file lacks is null, and named in run.json as
    `imported.unseen`. Raises RunDataError where a run lives there already."""
    if found.refused is not None:
        raise InputError(f"{source}: {found.refused}")
    if not found.rows:
        raise InputError(f"{source} holds no request")
    anchor = {"monotonic_ns": 0, "unix_ns": 0} if found.is_unix_time else None  # the stamps are the wall clock's
    run = RunDirectory.create(path, {
        "scenario": {"name": found.name, "arrivals": found.arrivals, "target": {}},
        **({"arrivals": CLOSED_LOOP} if found.arrivals.get("process") == "concurrency" else {}),
        "seed": None,
        "engine": {"model": found.model, "base_url": found.base_url},
        "hardware": None,
        "versions": {found.tool: found.version},
        "wall_anchor": anchor,
        "objectives": found.objectives,
        "client_error": None,
        "valid": None,
        "imported": {"tool": found.tool, "version": found.version, "file": source, "unseen": found.unseen,
                     "notes": found.notes, "kept_share": found.kept_share},
    })  # fmt: skip
    table: pa.Table = columns("client", found.rows)
    replace_table(run.path / "client.parquet", table)
    return run
