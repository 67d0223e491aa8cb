"""Delays planted in a server from outside: Python imports this file at its start where PYTHONPATH names its folder.

The file that SOJOURN_PLANTS names has two numbers for each of PLACES: how long every call there is delayed, in seconds
(a test writes it), and how long all calls have been so far (written here, as the clock saw it).
"""

import asyncio
import importlib.abc
import mmap
import os
import struct
import sys
import time
from functools import partial

# place → module, class, function
PLACES = {
    "encode": ("sojourn.engine.token.text.tokenizer", "Tokenizer", "encode"),
    "schedule": ("sojourn.engine.request.scheduler", "Scheduler", "schedule"),
    "forward": ("sojourn.engine.token.models.decoder", "Decoder", "forward"),
    "sample": ("sojourn.engine.token.sampling.sampler", "Sampler", "sample"),
    "decode": ("sojourn.engine.token.text.tokenizer", "TextStream", "push"),
    "write": ("uvicorn.protocols.http.httptools_impl", "RequestResponseCycle", "send"),
}
NUMBERS = struct.Struct("dd")
VARIABLE = "SOJOURN_PLANTS"
# `N:SHARE`: every N-th step takes longer by this share of itself, by work and not by sleep, as on a slower device.
STRETCH = "SOJOURN_STRETCH"
STEP_END = ("sojourn.engine.loop.engine", "Engine", "_collect_next")


class Delay:
    """The delay of one place, shared by the test and the processes of its server."""

    def __init__(self, shared: mmap.mmap, place: str):
        self._shared = shared
        self._offset = list(PLACES).index(place) * NUMBERS.size

    def read(self) -> tuple[float, float]:
        """Seconds a call, and seconds so far."""
        return NUMBERS.unpack_from(self._shared, self._offset)

    def set(self, seconds: float) -> None:
        NUMBERS.pack_into(self._shared, self._offset, seconds, self.read()[1])

    def add(self, seconds: float) -> None:
        delay, so_far = self.read()
        NUMBERS.pack_into(self._shared, self._offset, delay, so_far + seconds)


def mapped(path: str) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def delayed(function, delay: Delay):
    def call(*arguments, **named):
        if seconds := delay.read()[0]:
            begin = time.monotonic()
            time.sleep(seconds)
            delay.add(time.monotonic() - begin)
        return function(*arguments, **named)

    return call


def delayed_write(function, delay: Delay):
    """Only what carries text, and without holding up anybody else."""

    async def send(self, message):
        if message.get("body") and (seconds := delay.read()[0]):
            begin = time.monotonic()
            await asyncio.sleep(seconds)
            delay.add(time.monotonic() - begin)
        await function(self, message)

    return send


def stretched(function, every: int, share: float):
    """The end of a step (STEP_END), before the clock is read that ends it."""
    calls = 0

    def call(engine, readings):
        nonlocal calls
        result = function(engine, readings)
        calls += 1
        if calls % every == 0:
            now = time.monotonic_ns()
            until = now + share * (now - readings[0])
            while time.monotonic_ns() < until:
                pass
        return result

    return call


class Wrapper(importlib.abc.MetaPathFinder):
    """Wraps functions as soon as their modules have been loaded."""

    def __init__(self, wraps):
        """`wraps`: pairs of (module, class, function) and what makes the new function of the old one."""
        self._wraps = wraps

    def find_spec(self, name, path, target=None):
        wraps = [(owner, function, wrap) for (module, owner, function), wrap in self._wraps if module == name]
        if not wraps:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(spec for spec in others if spec is not None)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            for owner, function, wrap in wraps:
                kind = getattr(module, owner)
                setattr(kind, function, wrap(getattr(kind, function)))

        spec.loader.exec_module = exec_module
        return spec


def plants(shared: mmap.mmap) -> list:
    """The wraps that delay each of PLACES."""
    wraps = {place: delayed_write if place == "write" else delayed for place in PLACES}
    return [(PLACES[place], partial(wrap, delay=Delay(shared, place))) for place, wrap in wraps.items()]


if STRETCH in os.environ:
    EVERY, SHARE = os.environ[STRETCH].split(":")
    sys.meta_path.insert(0, Wrapper([(STEP_END, partial(stretched, every=int(EVERY), share=float(SHARE)))]))
if VARIABLE in os.environ:
    sys.meta_path.insert(0, Wrapper(plants(mapped(os.environ[VARIABLE]))))
