"""Prompts and keys: they stand in no log, no record, no metric and no debug page."""

import argparse
import re
from pathlib import Path

import httpx

from bench.torture.promises import Outcome, main
from bench.torture.server import serving, temporary_folder
from sojourn.metrics.records.tables import SCHEMAS
from sojourn.metrics.run.directory import RunDirectory

PROMPT = "xyzzy-prompt-7f3a"
KEY = "sk-plugh-key-91c2"
OUTSIDE = {"key": KEY, "prompt": PROMPT}


def maltreat(url: str) -> int:
    """Calls with the secrets in every place that a client can put them. Returns how many were answered."""
    text = f"{PROMPT} the function"
    bodies = {
        "/v1/completions": [
            {"prompt": text, "max_tokens": 4}, {"prompt": text, "max_tokens": 4, "stream": True},
            {"prompt": text, "stop": [PROMPT], "max_tokens": 4}, {"prompt": text, "bad_words": [PROMPT]},
            {"prompt": text, "max_tokens": -1}, {"prompt": {PROMPT: 1}}, {"prompt": text * 5000},
            {"prompt": text, PROMPT: 1}, {"prompt": text, "temperature": PROMPT},
            {"prompt": text, "guided_regex": f"({PROMPT}"}, {"prompt": text, "model": PROMPT},
        ],
        "/v1/chat/completions": [
            {"messages": [{"role": "user", "content": text}], "max_tokens": 4},
            {"messages": [{"role": PROMPT, "content": text}]},
            {"messages": [{"role": "user", "content": text}], "tools": [{"type": PROMPT}]},
        ],
        "/v1/responses": [{"input": text, "max_output_tokens": 4}],
        "/tokenize": [{"prompt": text}],
    }  # fmt: skip
    answered = 0
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=30) as client:
        for path, each in bodies.items():
            for body in each:
                client.post(path, json={"model": "tiny-model"} | body)
                answered += 1
        client.post(
            "/v1/completions", content=f'{{"prompt": "{PROMPT}'.encode(), headers={"content-type": "application/json"}
        )
        client.get(f"/v1/{PROMPT}")
        client.get("/v1/models", headers={"traceparent": PROMPT, "x-request-id": f"{PROMPT} {PROMPT}"})
    return answered


def found_in(text: str) -> str:
    """Names of the secrets that a text holds."""
    return ", ".join(name for name, secret in OUTSIDE.items() if secret in text)


def pages(url: str) -> dict[str, str]:
    """What the server shows about calls, by path."""
    with httpx.Client(base_url=url, timeout=30) as client:
        document = client.get("/openapi.json")
        debug = document.json()["paths"] if document.status_code == 200 else {}
        paths = ["/metrics", "/v1/models", "/health", "/ready", "/debug/requests"]
        paths += [path for path in debug if path.startswith("/debug") and "{" not in path]
        return {path: client.get(path).text for path in paths}


def records(folder: Path) -> dict[str, str]:
    """The content of all files of a run, decoded where Arrow reads them."""
    texts = {}
    run = RunDirectory(folder)
    for table in SCHEMAS:
        texts[f"table {table}"] = str(run.arrow(table).to_pylist())
    for file in folder.rglob("*"):
        if file.is_file():
            texts[str(file.relative_to(folder))] = file.read_bytes().decode("latin-1")
    return texts


def run(outcome: Outcome, arguments: argparse.Namespace) -> None:
    """Searches everything that the server leaves for what clients sent."""
    with temporary_folder() as folder, serving("--run-dir", str(folder / "run")) as server:
        count = maltreat(server.url)
        shown = pages(server.url)
        leaks = {path: found_in(text) for path, text in shown.items() if found_in(text)}
        outcome.check(
            "pages and metrics hold no prompt and no key", not leaks, leaks or f"{len(shown)} pages, {count} calls"
        )
        server.send_signal(15)
        outcome.check("the server ends with exit code 0", server.wait(60) == 0, server.process.returncode)
        log = server.text()
        outcome.check(
            "the log holds no prompt and no key", not found_in(log), found_in(log) or f"{len(log):,} characters"
        )
        kept = records(folder / "run")
        leaks = {name: found_in(text) for name, text in kept.items() if found_in(text)}
        rows = len(re.findall("'request_id'", kept.get("table requests", "")))
        outcome.check(
            "records hold no prompt and no key", not leaks, leaks or f"{len(kept)} files and tables, {rows} requests"
        )


if __name__ == "__main__":
    main("secrets", run)
