"""The error of the client's record: measured against a reference server, and looked up for the load of a run."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sojourn.loadgen.reference_server.instructions import ServedRequest
from sojourn.loadgen.schedule.shards import Shard
from sojourn.metrics.compute.roofline import device_name
from sojourn.metrics.errors import CalibrationError
from sojourn.metrics.machine.client_error import Error, Point, error_at_load, load_calibration, stream_load
from sojourn.metrics.machine.host import hardware, versions
from sojourn.metrics.records import ClientRecord

# All code that runs in the thread of the socket loop. Another version of it has another error, so its calibrations are
# of another client.
CLIENT_FILES = (
    "client/connection.py", "client/dispatcher.py", "client/event_log.py", "client/event_writer.py",
    "client/arrival_stamps.py", "client/outgoing.py", "client/pacing.py", "client/socket_loop.py", "locustfile.py",
    "prompts/conversation.py", "replies/answer_text.py", "replies/document.py", "replies/front.py", "replies/reply.py",
    "replies/sse.py", "schedule/request.py",
)  # fmt: skip
CLIENT_LIBRARIES = ("python", "gevent", "locust", "httptools")
NOTHING_STREAMED = (
    "not known: no reply had text in more than one read, and what `sojourn calibrate client` measures are streams"
)


def client_fingerprint() -> str:
    """Identifies the client of a calibration: its code and the libraries that it runs on."""
    installed = versions()
    digest = hashlib.sha256(repr([installed.get(name) for name in CLIENT_LIBRARIES]).encode())
    for name in CLIENT_FILES:
        digest.update((Path(__file__).parents[1] / name).read_bytes())
    return digest.hexdigest()[:16]


def compare(
    records: Iterable[ClientRecord], answers: Iterable[ServedRequest], window_ns: tuple[int, int], streams: int,
    tokens_per_s: float,
) -> Point:  # fmt: skip
    """The client's error over the server's writes in a window, [from, to). Raises CalibrationError for an empty one.

    A request that the server does not have, or has with other tokens, is a wrong count.
    """
    answers = {answer.request_id: answer for answer in answers}
    begin_ns, end_ns = window_ns
    stamp, first, gaps, send, late = [], [], [], [], []
    num_requests = wrong = 0
    for record in records:
        num_requests += 1
        if record.sent_ns is not None and begin_ns <= record.due_ns < end_ns:
            send.append(np.array([record.sent_ns - record.due_ns]))
        answer = answers.get(record.request_id)
        found = (record.status, record.chunk_tokens, record.output_tokens, record.prompt_tokens)
        if answer is None or found != ("ok", answer.tokens, sum(answer.tokens), answer.prompt_tokens):
            wrong += 1
            continue
        written = np.array(answer.write_ns)
        inside = (written >= begin_ns) & (written < end_ns)
        error = np.array(record.chunk_ns) - written
        stamp.append(error[inside])
        first.append(error[:1][inside[:1]])
        gaps.append(np.diff(error)[inside[1:]])
        late.append((written - np.array(answer.due_ns))[inside])
    num_tokens = sum(map(len, stamp))
    if not num_tokens:
        raise CalibrationError(
            f"nothing can be compared at {streams} streams of {tokens_per_s:g} tokens/s: {wrong} of {num_requests} "
            "requests failed or have other tokens than the server wrote"
        )
    return Point(
        streams=streams, tokens_per_s=tokens_per_s, requests=num_requests, tokens=num_tokens, wrong_counts=wrong,
        delivered=round(num_tokens / (streams * tokens_per_s * (end_ns - begin_ns) / 1e9), 4), stamp=_error(stamp),
        ttft=_error(first), itl=_error(gaps), send=_error(send),
        server_late_p99_ms=round(float(np.quantile(np.concatenate(late), 0.99)) / 1e6, 4),
    )  # fmt: skip


def _error(differences_ns: list[np.ndarray]) -> Error:
    all_ns = np.concatenate(differences_ns) if differences_ns else np.empty(0)
    if not len(all_ns):
        return Error(0.0, 0.0)
    return Error(round(float(all_ns.mean()) / 1e6, 4), round(float(np.quantile(np.abs(all_ns), 0.99)) / 1e6, 4))


def with_calibration(client_error: dict[str, Any], streams: np.ndarray, shards: Sequence[Shard]) -> dict[str, Any]:
    """A run's `client_error` with `calibration`: the error at its load, or `unknown` with the reason.

    `streams` [replies with text, 3]: ns of the first and of the last chunk, number of chunks. Several processes share
    the load, as far as each can have a core of its own.
    """
    num_streams, chunks_per_s = stream_load(*streams.T)
    processes = max(1, min(len(shards), hardware()["cores"]))
    try:
        if any(shard.clock_uncertainty_ms is not None for shard in shards):
            raise CalibrationError("not known: other hosts sent too, and what is kept here is of this one")
        if not num_streams:
            raise CalibrationError(NOTHING_STREAMED)
        calibration = load_calibration(device_name(), client_fingerprint())
        found = error_at_load(calibration, num_streams, chunks_per_s, processes)
    except CalibrationError as error:
        found = {"unknown": str(error)}
    return client_error | {"calibration": found}
