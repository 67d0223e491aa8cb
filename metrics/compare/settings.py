"""How two runs were set up: the settings in force, the load, the machine, and in what they differ. Pure."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from sojourn.metrics.run.directory import engine_settings, section, server_hardware

MACHINE = ("cpu", "cores", "gpus")  # of `hardware`: what makes it the same machine, or one alike
# Of these none changes what a request meets.
WITHOUT_EFFECT = ("host", "port", "run_dir", "served_model_name", "base_url", "served", "usage_dir", "api_keys")
# What a server says beside its settings: it follows from the model and from the settings.
FOLLOWS = ("num_kv_blocks", "weight_bytes", "num_parameters", "frees_window", "weight_error", "kv_address")
MEASURED = ("memory_bytes", "kv_address")  # differ from start to start
STATED = "server_settings"  # what /metrics of a server says of it that others started
DRIVER = "driver_version"  # of a device in `hardware`
OF_MODEL = ("root", "max_model_len")  # of its entry in /v1/models: the rest differs from start to start
RESOLVED = ("device", "dtype", "weights", "threads", "block_size", "num_kv_blocks")  # of `core`: what `auto` came to
UNRESOLVED = (None, "auto", 0)  # the server chooses
MOST_CHARACTERS = 60  # of a text in a list of differences
MOST_VALUES = 8  # of a list in it
MOST_NAMES = 4  # of settings that one side alone knows
NOT_KNOWN = "not known"
A_AND_B, THERE_AND_HERE = ("in A", "in B"), ("there", "here")
ABSENT: Any = object()


class Difference(NamedTuple):
    """A setting with a value of each side: a number, a text, a list of them; `ABSENT` where the side does not know."""

    place: str  # such as engine.max_num_seqs, workload.classes.chat.prompt_tokens.tokens
    values: tuple[Any, Any]


class Differences(NamedTuple):
    """What differs between two runs, and how their sides are called."""

    found: list[Difference]
    sides: tuple[str, str]

    @property
    def changed(self) -> list[str]:
        """Each as `place is X in A and Y in B`."""
        a, b = self.sides
        return [
            f"{place} is {_stated(one)} {a} and {_stated(other)} {b}"
            for place, (one, other) in self.found
            if ABSENT not in (one, other)
        ]

    def unknown(self) -> list[str]:
        """A line for each side that does not know what the other knows."""
        lines = []
        for side, other in ((1, 0), (0, 1)):
            names = [f"{place} ({_stated(values[other])})" for place, values in self.found if values[side] is ABSENT]
            lines += [_folded(names, self.sides[side])] if names else []
        return lines

    def lines(self) -> list[str]:
        return self.changed + self.unknown()

    def rows(self) -> list[tuple[str, str, str]]:
        """Each as its name and both values in words; without what is off on one side and unknown to the other."""
        return [
            (place, _in_words(one), _in_words(other))
            for place, (one, other) in self.found
            if not (one in (None, ABSENT) and other in (None, ABSENT))
        ]


def identity(meta: dict[str, Any]) -> dict[str, Any]:
    """What two runs must have in common to be compared: load, objectives, model, hardware. Settings may differ."""
    scenario = meta.get("scenario") if isinstance(meta.get("scenario"), dict) else {}
    engine, hardware = meta.get("engine") or {}, server_hardware(meta)
    measure = {name: value for name, value in (scenario.get("measure") or {}).items() if name != "seed"}
    return {
        "workload": scenario.get("workload"), "arrivals": scenario.get("arrivals"), "target": scenario.get("target"),
        "measure": measure, "objectives": _bounds(meta.get("objectives")), "model": engine.get("model"),
        "hardware": _machine(meta, hardware),
    }  # fmt: skip


def _machine(meta: dict[str, Any], hardware: dict[str, Any]) -> dict[str, Any]:
    """What makes it the same machine. The cores of a client are those that it may use: they are no server's."""
    found = {name: value for name, value in hardware.items() if name in MACHINE}
    if isinstance(found.get("gpus"), list):  # a driver is installed, as any software is
        found["gpus"] = [_without_driver(each) for each in found["gpus"]]
    if "base_url" in section(meta, "engine") and not section(meta, "server_hardware"):
        found |= {"cores": hardware["host_cores"]} if hardware.get("host_cores") else {}
    return found


def _without_driver(gpu: Any) -> Any:
    return {name: value for name, value in gpu.items() if name != DRIVER} if isinstance(gpu, dict) else gpu


def _drivers(meta: dict[str, Any]) -> dict[str, Any]:
    """The driver of its devices, where the run says it."""
    gpus = server_hardware(meta).get("gpus") or []
    found = {each[DRIVER] for each in gpus if isinstance(each, dict) and each.get(DRIVER)}
    return {"driver": ", ".join(sorted(found))} if found else {}


def _bounds(objectives: Any) -> Any:
    """Without the source of each, which changes no bound."""
    is_known = isinstance(objectives, list) and all(isinstance(each, dict) for each in objectives)
    return [{name: each[name] for name in each if name != "source"} for each in objectives] if is_known else objectives


def engine_of(meta: dict[str, Any]) -> dict[str, Any]:
    """The settings that the engine was given; {} of a foreign server."""
    return {name: value for name, value in (meta.get("engine") or {}).items() if name not in ("served", "base_url")}


def effective_settings(meta: dict[str, Any]) -> dict[str, Any]:
    """The engine's settings in force, as far as the run knows them: as given, as the server states them in its records
    or else in its answers, and what the core made of `auto`. A setting that is absent is unknown; one that is None is
    known to be off."""
    given, core = section(meta, "engine"), section(meta, "core")
    served = section(given, "served")
    stated = section(served, "engine") or {
        **section(meta, STATED), **{name: served[name] for name in OF_MODEL if name in served},
    }  # fmt: skip
    found = dict(given)
    for name, value in [*stated.items(), *((name, core[name]) for name in RESOLVED if name in core)]:
        if name not in found or (value is not None and found[name] in UNRESOLVED):
            found[name] = value
    return {name: value for name, value in found.items() if name not in (*WITHOUT_EFFECT, *MEASURED)}


def setting_differences(a: dict[str, Any], b: dict[str, Any], sides: tuple[str, str] = A_AND_B) -> Differences:
    """In which engine settings and versions two runs differ, from their `run.json`. What a server that we started
    derived from its settings, such as the blocks of its pool, is no difference of its own."""
    settings = [effective_settings(meta) for meta in (a, b)]
    if not any("base_url" in section(meta, "engine") for meta in (a, b)):
        given = {name for meta in (a, b) for name, value in engine_of(meta).items() if value is not None}
        for each in settings:
            for name in set(FOLLOWS) - given:
                each.pop(name, None)
    first, second = (
        {
            "engine": each,
            "versions": section(meta, "versions"),
            "server": section(meta, "server_versions"),
            "gpu": _drivers(meta),
        }
        for each, meta in zip(settings, (a, b), strict=True)
    )
    return _compared(first, second, sides, ABSENT)


def states_settings(meta: dict[str, Any]) -> bool:
    """Whether a run knows how its server was set up. Of one that others started it may know the model alone."""
    return bool(engine_settings(meta).keys() - {"model", *WITHOUT_EFFECT})


def alike(a: dict[str, Any], b: dict[str, Any]) -> str:
    """What may be said of two runs without a difference. Of a foreign server run.json may know no setting."""
    if states_settings(a) and states_settings(b):
        return "Nothing that run.json names: the same load, model, machine, settings and versions."
    return "Nothing that run.json names: the same load, model and machine. The servers' settings are not known."


def load_differences(a: dict[str, Any], b: dict[str, Any], sides: tuple[str, str] = A_AND_B) -> Differences:
    """In what the load, the model and the machine of two runs differ."""
    first, second = ({name: value for name, value in identity(meta).items() if value is not None} for meta in (a, b))
    return _compared(first, second, sides, ABSENT)


def differences(before: Any, now: Any) -> list[str]:
    """Which values of two JSON documents differ, each as `place is X there and Y here`; what is absent is null."""
    return _compared(before, now, THERE_AND_HERE, None).changed


def _compared(before: Any, now: Any, sides: tuple[str, str], absent: Any) -> Differences:
    return Differences(list(_differing(before, now, "", absent)), sides)


def _differing(before: Any, now: Any, place: str, absent: Any) -> Iterator[Difference]:
    """Down to single values: a value that is a document of its own cannot be read in a line."""
    pair = (before, now)
    known = [each for each in pair if each is not ABSENT and each is not None]
    if known and all(isinstance(each, dict) for each in known):
        one, other = (each if each in known else {} for each in pair)
        of_one, of_other = (None if each is None else absent for each in pair)
        for key in dict.fromkeys([*one, *other]):
            inner = f"{place}.{key}" if place else str(key)
            yield from _differing(one.get(key, of_one), other.get(key, of_other), inner, absent)
    elif _are_documents(known):
        one, other = (_by_name(each) if each in known else each for each in pair)
        if len(known) == 2 and list(one) != list(other):
            yield Difference(place, (list(one), list(other)))
            one, other = _in_both(one, other), _in_both(other, one)
        yield from _differing(one, other, place, absent)
    elif before != now:
        yield Difference(place, (before, now))


def _are_documents(known: list[Any]) -> bool:
    return all(isinstance(each, list) for each in known) and any(
        isinstance(item, dict) for each in known for item in each
    )


def _in_both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in one.items() if key in other}


def _by_name(documents: list[Any]) -> dict[str, Any]:
    """Documents of a list by their class or name, else by their place."""
    for key in ("klass", "name"):
        names = [str(each[key]) for each in documents if isinstance(each, dict) and key in each]
        if len(set(names)) == len(documents):
            return dict(zip(names, documents, strict=True))
    return {str(place): each for place, each in enumerate(documents)}


def _folded(names: list[str], side: str) -> str:
    shown = sorted(names, key=lambda name: name.endswith("(null)"))[:MOST_NAMES]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"not known {side}: {', '.join(shown)}{more}"


def _stated(value: Any) -> str:
    """As JSON states a single value; of a list its first values."""
    if isinstance(value, list | dict):
        return _in_words(value)
    return msgspec.json.encode(_cut(value)).decode()


def _in_words(value: Any) -> str:
    if value is ABSENT or value is None:
        return NOT_KNOWN if value is ABSENT else "not set"
    if isinstance(value, list | dict):
        items = [f"{name}: {_in_words(each)}" for name, each in value.items()] if isinstance(value, dict) else value
        more = len(items) - MOST_VALUES
        return ", ".join(map(_in_words, items[:MOST_VALUES])) + (f" and {more} more" if more > 0 else "") or "none"
    return _cut(value) if isinstance(value, str) else _stated(value)


def _cut(value: Any) -> Any:
    is_long = isinstance(value, str) and len(value) > MOST_CHARACTERS
    return f"{value[: MOST_CHARACTERS - 1]}…" if is_long else value
