"""What is fuzzed: each target reads bytes as the named code would get them, and raises for a defect of ours.

A maker imports what it needs itself, so that only that code is instrumented.
"""

import contextlib
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sojourn.metrics.errors import SojournError

Target = Callable[[bytes], object]


class Defect(AssertionError):
    """A promise that an input broke."""


def pieces(text, step: int) -> list:
    return [text[at : at + step] for at in range(0, len(text), step)]


def temporary() -> Path:
    """A folder that one process uses for all its inputs."""
    folder = tempfile.TemporaryDirectory(prefix="sojourn-fuzz-")
    _folders.append(folder)
    return Path(folder.name)


_folders: list[tempfile.TemporaryDirectory] = []  # until the process ends


def body() -> Target:
    """Raw bytes as the body of every endpoint."""
    from bench.fuzz.scripted_front import ScriptedFront

    front = ScriptedFront()
    paths = endpoints()

    def target(data: bytes) -> None:
        path = paths[data[0] % len(paths)] if data else paths[0]
        check_answer(*front.call("POST", path, JSON, data[1:]))

    return target


def structured_body() -> Target:
    """JSON bodies by the fields of each endpoint, with hostile values."""
    from bench.fuzz.json_grammar import Source
    from bench.fuzz.json_grammar import body as grow
    from bench.fuzz.scripted_front import ScriptedFront
    from sojourn.engine.server.api_reference import BODIES

    front = ScriptedFront()
    kinds = {path.removeprefix("POST "): kind for path, kind in BODIES.items() if "/debug/" not in path}
    fields = {path: sorted({*kind.model_fields, *kind.unsupported}) for path, kind in kinds.items()}
    paths = [path for path in kinds if path in NEEDED]

    def target(data: bytes) -> None:
        source = Source(data)
        path = paths[source.byte() % len(paths)]
        check_answer(*front.call("POST", path, JSON, grow(source, NEEDED[path], fields[path])))

    return target


def head() -> Target:
    """Method, path and headers of any bytes that an HTTP parser lets through."""
    from bench.fuzz.scripted_front import ScriptedFront

    front = ScriptedFront()
    methods = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "BREW")
    paths = endpoints()
    content = b'{"model": "tiny-model", "prompt": "x", "max_tokens": 1}'

    def target(data: bytes) -> None:
        if len(data) < 3:
            return
        lines = data[2:].split(b"\n")
        path = paths[data[1] % len(paths)] if data[1] < 128 else "/" + lines[0].decode("latin-1")
        # An HTTP parser gives no control characters away.
        headers = [
            (HEADERS[line[0] % len(HEADERS)], bytes(c for c in line[1:] if c >= 32 and c != 127).strip())
            for line in lines[1:20] if line
        ]  # fmt: skip
        status, _ = front.call(methods[data[0] % len(methods)], path, headers, content)
        if status >= 500 and status != 503:
            raise Defect(f"{status} for {data!r}")

    return target


def tool_calls() -> Target:
    """The parsers of tool calls: the same result however the text is cut."""
    from sojourn.engine.token.tools.calls import FORMATS, ContentDelta, ToolCallParser

    formats = list(FORMATS.values())

    def read(form, parts: list[str]) -> tuple[str, list[list[str]]]:
        parser, content, calls = ToolCallParser(form, {"f", "get_weather", "a" * 64}), [], []
        for delta in [delta for part in parts for delta in parser.push(part)] + parser.finish():
            if isinstance(delta, ContentDelta):
                content.append(delta.text)
            elif delta.name is not None:
                calls.append([delta.name, delta.arguments])
            else:
                calls[delta.index][1] += delta.arguments
        return "".join(content), calls

    def target(data: bytes) -> None:
        if len(data) < 3:
            return
        form, text = formats[data[0] % len(formats)], data[2:].decode("utf-8", "replace")
        whole, cut = read(form, [text]), read(form, pieces(text, 1 + data[1] % 16))
        if whole != cut:
            raise Defect(f"{form.name}: {text!r} gives {whole} at once and {cut} in pieces")

    return target


def text_stream() -> Target:
    """Token ids → text with stop strings: what comes in pieces is what comes at once."""
    from sojourn.engine.config import model_folder
    from sojourn.engine.token.text.assembler import TextAssembler
    from sojourn.engine.token.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(model_folder("tiny-model"))

    def target(data: bytes) -> None:
        stop, _, rest = data.partition(b"\0")
        stops = [stop.decode("utf-8", "replace")] if stop else []
        text = TextAssembler(tokenizer.stream(), stops)
        shown = ""
        for low, high in zip(rest[::2], rest[1::2], strict=False):
            shown += text.push((low | high << 8) % tokenizer.vocab_size)
            if text.stop_string is not None:
                return
        shown += text.rest()
        if any(stop in shown for stop in stops):
            raise Defect(f"{stops} stands in {shown!r}")

    return target


def sse() -> Target:
    """The load generator's reader of replies: never raises, and cuts change nothing."""
    from sojourn.loadgen.replies.reply import ReplyReader, SseDecoder

    heads = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n", b"HTTP/1.1 429 No\r\n\r\n", b"",
    )  # fmt: skip

    def events(parts: list[bytes]) -> list[str]:
        decoder = SseDecoder()
        return [event for part in parts for event in decoder.feed(part)]

    def target(data: bytes) -> None:
        if len(data) < 3:
            return
        content, step = data[2:], 1 + data[1] % 16
        if events([content]) != events(pieces(content, step)):
            raise Defect(f"{content!r} gives other events in pieces of {step}")
        reader = ReplyReader()
        reader.feed(heads[data[0] % len(heads)], 1)
        for part in pieces(content, step):
            reader.feed(part, 2)
        reply = reader.end()
        reply.text.encode("utf-8", "surrogatepass")
        (reply.error or "").encode()
        _ = reply.chunk_tokens

    return target


def traceparent() -> Target:
    from sojourn.interop.exported.spans import parent_of

    return lambda data: parent_of(data.decode("latin-1"))


def template() -> Target:
    """A checkpoint's chat template, and messages for it."""
    from sojourn.engine.token.text.template import ChatTemplate, TemplateError

    folder = temporary()

    def target(data: bytes) -> None:
        source, _, content = data.decode("utf-8", "replace").partition("\0")
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
        try:
            made = ChatTemplate(folder)
            roles = ("user", "assistant")
            said = [{"role": roles[i % 2], "content": part} for i, part in enumerate(content.split("\n")[:20])]
            made.render(said, max_characters=100_000)
        except (SojournError, TemplateError):
            pass

    return target


def core_messages() -> Target:
    """Bytes on the sockets between front and core."""
    import msgspec

    from sojourn.engine import messages

    def target(data: bytes) -> None:
        for decode in (messages.decode_to_core, messages.decode_from_core):
            try:
                decode(data)
            except msgspec.DecodeError:
                continue

    return target


def run_directory(name: str, table: str) -> Target:
    """A file of a run's table, damaged."""
    from sojourn.metrics.run.directory import RunDirectory

    folder = temporary()
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)

    def target(data: bytes) -> None:
        file.write_bytes(data)
        with contextlib.suppress(SojournError):
            RunDirectory(folder).arrow(table)

    return target


def run_description() -> Target:
    from sojourn.metrics.run.directory import RunDirectory

    folder = temporary()

    def target(data: bytes) -> None:
        (folder / "run.json").write_bytes(data)
        with contextlib.suppress(SojournError):
            RunDirectory.open(folder).meta()

    return target


def scenario() -> Target:
    from sojourn.loadgen.scenario.scenario import load_scenario

    folder = temporary()

    def target(data: bytes) -> None:
        (folder / "s.yaml").write_bytes(data)
        with contextlib.suppress(SojournError):
            load_scenario(folder / "s.yaml")

    return target


def trace() -> Target:
    from sojourn.loadgen.traces.reader import read_trace

    folder = temporary()

    def target(data: bytes) -> None:
        file = folder / ("t.csv" if data[:1] < b"\x80" else "t.jsonl")
        file.write_bytes(data[1:])
        with contextlib.suppress(SojournError):
            read_trace(file)

    return target


def model_config() -> Target:
    """config.json of a checkpoint."""
    from sojourn.engine.token.checkpoint import read_config
    from sojourn.engine.token.models.registry import decoder_config

    folder = temporary()

    def target(data: bytes) -> None:
        (folder / "config.json").write_bytes(data)
        with contextlib.suppress(SojournError):
            decoder_config(read_config(folder))

    return target


def safetensors() -> Target:
    """The weights of a checkpoint."""
    from sojourn.engine.token.models.weights import iterate_weights, stored_dtype

    folder = temporary()

    def target(data: bytes) -> None:
        (folder / "model.safetensors").write_bytes(data)
        try:
            stored_dtype(folder)
            for _, tensor in iterate_weights(folder):
                tensor.sum()
        except SojournError:
            pass

    return target


HEADERS = (
    b"content-type", b"content-length", b"x-request-id", b"traceparent", b"authorization", b"accept", b"x-api-key",
    b"x-sojourn-tenant", b"x-sojourn-class", b"origin", b"host", b"content-encoding",
)  # fmt: skip
JSON = [(b"content-type", b"application/json")]
NEEDED = {
    "/v1/completions": {"model": '"tiny-model"', "prompt": '"x"', "max_tokens": "2"},
    "/v1/chat/completions": {
        "model": '"tiny-model"', "messages": '[{"role": "user", "content": "x"}]', "max_tokens": "2",
    },
    "/v1/responses": {"model": '"tiny-model"', "input": '"x"', "max_output_tokens": "2"},
    "/tokenize": {"prompt": '"x"'},
    "/detokenize": {"tokens": "[5]"},
}  # fmt: skip


def endpoints() -> list[str]:
    from sojourn.engine.server.app import ENDPOINTS

    return list(ENDPOINTS)


def check_answer(status: int, content: bytes) -> None:
    """Raises Defect for a fault of ours, and for an error that is not in the API's shape."""
    if status >= 500:
        raise Defect(f"{status}: {content[:500]!r}")
    if status != 200 and "error" not in json.loads(content):
        raise Defect(f"{status} without an error: {content[:500]!r}")


# Name → what makes it, and its weight: the share of the time that it gets.
TARGETS: dict[str, tuple[Callable[[], Target], int]] = {
    "structured_body": (structured_body, 4),
    "body": (body, 2),
    "head": (head, 2),
    "tool_calls": (tool_calls, 2),
    "text_stream": (text_stream, 1),
    "sse": (sse, 2),
    "traceparent": (traceparent, 1),
    "template": (template, 2),
    "core_messages": (core_messages, 1),
    "run_stream": (partial(run_directory, "kernels.parts/1.arrows", "kernels"), 1),
    "run_parquet": (partial(run_directory, "requests.parquet", "requests"), 1),
    "run_description": (run_description, 1),
    "scenario": (scenario, 1),
    "trace": (trace, 1),
    "model_config": (model_config, 1),
    "safetensors": (safetensors, 1),
}
