"""Read-only SQL over the tables of one run, bounded in rows, time and memory.

DuckDB sees only tables that were handed to it: files, URLs, extensions and Python's variables are switched off, and the
configuration is locked. One SELECT at a time. What a query may cost is bounded by the limits below.
"""

import re
import threading
from typing import Any

import duckdb
import pyarrow as pa

from sojourn.metrics.errors import InputError
from sojourn.metrics.records.tables import SCHEMAS
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.server_alone import requests_of
from sojourn.scripting.documents import QueryResult

MOST_ROWS = 1000
MOST_SECONDS = 20.0
MOST_MEMORY = "1GB"
MOST_CHARACTERS = 200_000  # of the answer, as text
LONGEST_QUERY = 20_000  # characters
TABLES = ("requests", "client", "steps", "system", "scrapes", "sensors", "kernels", "kv_events")
SETTINGS = {
    "enable_external_access": "false",
    "python_enable_replacements": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "memory_limit": f"'{MOST_MEMORY}'",
    "max_temp_directory_size": "'0B'",
    "threads": "2",
}


def query(run: RunDirectory, sql: str, most_rows: int = 100, most_seconds: float = MOST_SECONDS) -> QueryResult:
    """The rows of one SELECT over `requests` (client and server joined, with ttft_ms, tpot_ms, e2e_ms and the ledger),
    `client`, `steps`, `system`, `scrapes`, `sensors`, `kernels` and `kv_events`. Raises InputError with DuckDB's words
    for what it refuses."""
    if not 1 <= most_rows <= MOST_ROWS:
        raise InputError(f"most_rows is {most_rows}; give 1 to {MOST_ROWS}")
    if len(sql) > LONGEST_QUERY:
        raise InputError(f"the query has {len(sql):,} characters; at most {LONGEST_QUERY:,} are taken")
    with duckdb.connect(":memory:") as connection:
        _check(connection, sql)
        for table in TABLES:
            if re.search(rf"\b{table}\b", sql, re.IGNORECASE):
                connection.register(table, _table(run, table))
        for name, value in SETTINGS.items():
            connection.execute(f"SET {name} = {value}")
        connection.execute("SET lock_configuration = true")
        return _rows(connection, sql, most_rows, most_seconds)


def _check(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise InputError(f"the query is not SQL: {_first_line(error)}") from None
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise InputError(f"give one SELECT over {', '.join(TABLES)}; the tables can only be read")


def _table(run: RunDirectory, table: str) -> pa.Table:
    if table != "requests":
        return run.arrow(table) if table in SCHEMAS else SCHEMAS[table].empty_table()
    return pa.Table.from_pandas(requests_of(run, run.meta()), preserve_index=False)


def _rows(connection: duckdb.DuckDBPyConnection, sql: str, most_rows: int, most_seconds: float) -> QueryResult:
    timer = threading.Timer(most_seconds, connection.interrupt)
    timer.start()
    try:
        found = connection.execute(sql)
        columns = [column[0] for column in found.description]
        rows = found.fetchmany(most_rows + 1)
    except duckdb.InterruptException:
        raise InputError(f"the query was stopped after {most_seconds:g} s; ask for less") from None
    except duckdb.Error as error:
        raise InputError(f"the query failed: {_first_line(error)}") from None
    finally:
        timer.cancel()
    kept, size = [], 0
    for row in rows[:most_rows]:
        values = [_plain(value) for value in row]
        size += len(str(values))
        if size > MOST_CHARACTERS:
            break
        kept.append(values)
    return QueryResult(columns=columns, rows=kept, truncated=len(kept) < len(rows))


def _plain(value: Any) -> Any:
    """As JSON has it: lists and maps stay, and what JSON lacks becomes text."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
