"""A server with delays of known length planted in it, switched on and off while it runs."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from tests.engine.server_process import Running, serving

SITE = Path(__file__).parent / "planted_site"
_spec = importlib.util.spec_from_file_location("planted_site", SITE / "sitecustomize.py")
site = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(site)


class Plants:
    """The delays of a server's places."""

    def __init__(self, path: Path):
        path.write_bytes(bytes(site.NUMBERS.size * len(site.PLACES)))
        shared = site.mapped(str(path))
        self._delays = {place: site.Delay(shared, place) for place in site.PLACES}

    @contextlib.contextmanager
    def planted(self, place: str, seconds: float) -> Iterator[None]:
        """Every call of the place takes so much longer."""
        self._delays[place].set(seconds)
        try:
            yield
        finally:
            self._delays[place].set(0.0)

    def slept_ns(self, place: str) -> int:
        """What all calls of the place were delayed by so far: sleeps end late on a busy machine."""
        return round(self._delays[place].read()[1] * 1e9)


@contextlib.contextmanager
def planted_server(folder: Path, *options: str) -> Iterator[tuple[Running, Plants]]:
    """The real server, front and core, with the places of `planted_site`."""
    plants = Plants(folder / "plants")
    search_path = os.pathsep.join([str(SITE), str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": search_path, site.VARIABLE: str(folder / "plants")}
    with serving(folder, "tiny-model", *options, environment=environment) as server:
        yield server, plants
