"""Inputs that fuzzing found, and seeds: none of them may break a promise of its target again.

`crash…` files are inputs that once did. `python -m bench.fuzz` looks for more.
"""

import time

import pytest

from bench.fuzz.corpus import CORPUS, MAX_TARGET_BYTES
from bench.fuzz.targets import TARGETS

SECONDS = 2  # of one input, on a busy machine; the fuzzer itself allows ten times as much


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_of_the_corpus_breaks_a_promise(name):
    target = TARGETS[name][0]()
    for file in sorted((CORPUS / name).glob("*")):
        started = time.monotonic()
        target(file.read_bytes())
        assert time.monotonic() - started < SECONDS, f"{file.name} takes too long"


def test_the_corpus_is_small_and_has_no_target_that_is_gone():
    folders = [folder for folder in CORPUS.iterdir() if folder.is_dir()]
    assert {folder.name for folder in folders} <= set(TARGETS)
    assert sum(file.stat().st_size for file in CORPUS.rglob("*") if file.is_file()) < 1_000_000
    for folder in folders:
        assert sum(file.stat().st_size for file in folder.iterdir()) < 2 * MAX_TARGET_BYTES
