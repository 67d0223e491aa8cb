"""What was given, as text: unpacked, decoded, without colours; its lines without the prefixes of whoever carried them.

Nothing here raises on any bytes.
"""

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
import zipfile
import zlib
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, NamedTuple

LARGEST = 1 << 30  # bytes, after unpacking
MOST_LINES = 2_000_000
MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip
ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
MOMENT = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
# Each takes one prefix off, the outermost first. A group `at` is the moment that it states.
PREFIXES = tuple(map(re.compile, (
    rf"(?P<at>{MOMENT}) (?:stdout|stderr) [FP] ",  # CRI, as containerd writes /var/log/pods
    r"\[pod/[^\]]+\] ",  # kubectl logs --prefix
    r"[\w./-]+[-_]\d+ +\| ",  # docker compose logs
    rf"(?P<at>{MOMENT}) (?=\S)(?=(?:INFO|WARNING|ERROR|DEBUG|CRITICAL|\(|\[|[\w]+:|=|\x1b))",  # docker logs -t
    r"(?P<day>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) \S+ [\w@.\\/-]+(?:\[\d+\])?: ",  # journalctl
    rf"(?P<at>{MOMENT}) \S+ [\w@.\\/-]+\[\d+\]: ",  # journalctl -o short-iso
)))  # fmt: skip


class Line(NamedTuple):
    """A line of a log."""

    number: int  # counted from 1
    text: str  # without prefixes
    ns: int | None  # as the outermost prefix has it, since 1970; None where no prefix states a moment
    whole: str  # with the prefixes


class Given:
    """Owns the content. Each form of it is made when somebody asks for it, and once."""

    def __init__(self, content: bytes | str, name: str):
        self.name = name
        self.problem = ""  # why the content could not be unpacked
        self._content = content

    @cached_property
    def text(self) -> str:
        """Decoded, with \\n at line ends, without colours."""
        if isinstance(self._content, str):
            text = self._content
        else:
            content, self.problem = unpacked(self._content)
            text = decoded(content)
        text = text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")
        return ANSI.sub("", text) if "\x1b" in text else text

    @cached_property
    def lines(self) -> list[Line]:
        """As a log has them."""
        found, lines = [], self.text.split("\n", MOST_LINES)
        if len(lines) > MOST_LINES and lines[-1].strip():
            self.problem = self.problem or f"has more than {MOST_LINES:,} lines; only its beginning is read"
        for number, whole in enumerate(lines[:MOST_LINES], 1):
            if whole.strip():
                text, ns = without_prefixes(whole)
                found.append(Line(number, text, ns, whole))
        return found

    @cached_property
    def plain(self) -> str:
        """The text without the prefixes of its lines."""
        return "\n".join(line.text for line in self.lines)

    @cached_property
    def documents(self) -> list[Any]:
        """The JSON in it: one document, or one a line; [] where it is not JSON. A last line that was cut off is left
        out."""
        text = self.text.strip()
        if text[:1] not in ("{", "["):
            return []
        try:
            return [json.loads(text)]
        except (ValueError, RecursionError):
            pass
        found: list[Any] = []
        lines = [line for line in text.split("\n") if line.strip()]
        for number, line in enumerate(lines):
            try:
                found.append(json.loads(line))
            except (ValueError, RecursionError):
                return found if number == len(lines) - 1 else []
        return found

    @property
    def document(self) -> Any:
        """The first JSON document; None without one."""
        return next(iter(self.documents), None)


def unpacked(content: bytes) -> tuple[bytes, str]:
    """The content of a packed file, and why it is not all there ("" where it is). Of an archive the first file."""
    try:
        if content.startswith(b"\x1f\x8b"):
            return _bounded(gzip.GzipFile(fileobj=io.BytesIO(content)))
        if content.startswith(b"BZh"):
            return _bounded(bz2.BZ2File(io.BytesIO(content)))
        if content.startswith(b"\xfd7zXZ"):
            return _bounded(lzma.LZMAFile(io.BytesIO(content)))
        if content.startswith(b"PK\x03\x04"):
            return _first_of(content)
        if content.startswith(b"\x28\xb5\x2f\xfd"):
            return _zstd(content)
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, NotImplementedError,
            RuntimeError) as error:  # fmt: skip
        return b"", f"is packed, and cannot be unpacked ({error})"
    return content, ""


def _bounded(stream: Any) -> tuple[bytes, str]:
    parts, size, read = [], 0, getattr(stream, "read1", stream.read)  # read1 gives what there is before a cut
    try:
        while size < LARGEST and (part := read(1 << 16)):
            parts.append(part)
            size += len(part)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        return b"".join(parts), f"is packed, and was cut off ({error})"
    return b"".join(parts), "" if size < LARGEST else "is larger than 1 GiB unpacked; only its beginning is read"


def _first_of(content: bytes) -> tuple[bytes, str]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        files = [each for each in archive.namelist() if not each.endswith("/")]
        if len(files) != 1:
            return b"", f"is a zip archive of {len(files)} files; unpack it and name them"
        with archive.open(files[0]) as stream:
            return _bounded(stream)


def _zstd(content: bytes) -> tuple[bytes, str]:
    import pyarrow as pa

    try:
        with pa.CompressedInputStream(pa.BufferReader(content), "zstd") as stream:
            return _bounded(stream)
    except (pa.ArrowException, OSError) as error:
        return b"", f"is packed, and cannot be unpacked ({error})"


def decoded(content: bytes) -> str:
    """Text of UTF-8, -16 or -32; bytes that are none become U+FFFD."""
    for mark, encoding in MARKS:
        if content.startswith(mark):
            return content.decode(encoding, "replace")
    head = content[:2000]
    if len(head) > 3 and head[1::2].count(0) > 0.8 * len(head[1::2]):
        return content.decode("utf-16-le", "replace")  # what PowerShell writes, without its mark
    if len(head) > 3 and head[::2].count(0) > 0.8 * len(head[::2]):
        return content.decode("utf-16-be", "replace")
    return content.decode("utf-8", "replace")


def without_prefixes(line: str) -> tuple[str, int | None]:
    """The line, and the moment of its outermost prefix that states one with a date."""
    ns: int | None = None
    if line.startswith('{"log":'):
        line, ns = _docker_json(line)
    for prefix in PREFIXES:
        if (found := prefix.match(line)) is not None:
            stated = found.groupdict().get("at")
            ns = ns if ns is not None or stated is None else moment_ns(stated)
            line = line[found.end() :]
    return line, ns


def _docker_json(line: str) -> tuple[str, int | None]:
    """A line of docker's json-file driver."""
    try:
        entry = json.loads(line)
        return str(entry["log"]).rstrip("\n"), moment_ns(str(entry.get("time", "")))
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
        return line, None


def moment_ns(text: str) -> int | None:
    """Nanoseconds since 1970 of an ISO moment; without a zone it is read as UTC. None for what is none."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d+))?(Z|[+-]\d\d:?\d\d)?", text.strip())
    if found is None:
        return None
    day, clock, fraction, zone = found.groups()
    try:
        at = datetime.fromisoformat(f"{day}T{clock}{zone or '+00:00'}").astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    seconds = (at - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
    return int(seconds) * 10**9 + int((fraction or "0")[:9].ljust(9, "0"))
