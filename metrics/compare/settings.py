"""How two runs were set up: the settings in force, the load, the machine, and in what they differ. Pure."""

from typing import Any, NamedTuple

import msgspec

from sojourn.metrics.run.directory import section, server_hardware

MACHINE = ("cpu", "cores", "gpus")  # of `hardware`: what makes it the same machine, or one alike
# Of these none changes what a request meets.
WITHOUT_EFFECT = ("host", "port", "run_dir", "served_model_name", "base_url", "served", "usage_dir", "api_keys")
# What a server says beside its settings: it follows from the model and from the settings.
FOLLOWS = ("num_kv_blocks", "weight_bytes", "num_parameters", "frees_window", "weight_error", "kv_address")
MEASURED = ("memory_bytes", "kv_address")  # differ from start to start
RESOLVED = ("device", "dtype", "weights", "threads", "block_size", "num_kv_blocks")  # of `core`: what `auto` came to
UNRESOLVED = (None, "auto", 0)  # the server chooses
MOST_CHARACTERS = 60  # of a value in a list of differences
MOST_NAMES = 4  # of settings that one side alone knows
A_AND_B, THERE_AND_HERE = ("in A", "in B"), ("there", "here")
_ABSENT: Any = object()


class Differences(NamedTuple):
    """`changed`: each as `place is X in A and Y in B`. `only`: what one side alone knows, each as `place (X)`."""

    changed: list[str]
    only: tuple[list[str], list[str]]
    sides: tuple[str, str]

    def unknown(self) -> list[str]:
        """A line for each side that does not know what the other knows."""
        return [_folded(names, side) for names, side in zip(reversed(self.only), self.sides, strict=True) if names]

    def lines(self) -> list[str]:
        return self.changed + self.unknown()


def identity(meta: dict[str, Any]) -> dict[str, Any]:
    """What two runs must have in common to be compared: load, objectives, model, hardware. Settings may differ."""
    scenario = meta.get("scenario") if isinstance(meta.get("scenario"), dict) else {}
    engine, hardware = meta.get("engine") or {}, server_hardware(meta)
    measure = {name: value for name, value in (scenario.get("measure") or {}).items() if name != "seed"}
    return {
        "workload": scenario.get("workload"), "arrivals": scenario.get("arrivals"), "target": scenario.get("target"),
        "measure": measure, "objectives": meta.get("objectives"), "model": engine.get("model"),
        "hardware": {name: value for name, value in hardware.items() if name in MACHINE},
    }  # fmt: skip


def engine_of(meta: dict[str, Any]) -> dict[str, Any]:
    """The settings that the engine was given; {} of a foreign server."""
    return {name: value for name, value in (meta.get("engine") or {}).items() if name not in ("served", "base_url")}


def effective_settings(meta: dict[str, Any]) -> dict[str, Any]:
    """The engine's settings in force, as far as the run knows them: as given, as the server states them, and what the
    core made of `auto`. A setting that is absent is unknown; one that is None is known to be off."""
    given, core = section(meta, "engine"), section(meta, "core")
    stated = section(section(given, "served"), "engine")
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
        {"engine": each, "versions": section(meta, "versions")} for each, meta in zip(settings, (a, b), strict=True)
    )
    return _compared(first, second, sides, _ABSENT)


def alike(a: dict[str, Any], b: dict[str, Any]) -> str:
    """What may be said of two runs without a difference. Of a foreign server run.json may know no setting."""
    if all(effective_settings(meta).keys() - {"model"} for meta in (a, b)):
        return "Nothing that run.json names: the same load, model, machine, settings and versions."
    return "Nothing that run.json names: the same load, model and machine. The servers' settings are not known."


def load_differences(a: dict[str, Any], b: dict[str, Any], sides: tuple[str, str] = A_AND_B) -> Differences:
    """In what the load, the model and the machine of two runs differ."""
    first, second = ({name: value for name, value in identity(meta).items() if value is not None} for meta in (a, b))
    return _compared(first, second, sides, _ABSENT)


def differences(before: Any, now: Any) -> list[str]:
    """Which values of two JSON documents differ, each as `place is X there and Y here`; what is absent is null."""
    return _compared(before, now, THERE_AND_HERE, None).changed


def _compared(before: Any, now: Any, sides: tuple[str, str], absent: Any) -> Differences:
    found = Differences([], ([], []), sides)
    _collect(before, now, "", absent, found)
    return found


def _collect(before: Any, now: Any, place: str, absent: Any, found: Differences) -> None:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*before, *now]):
            inner = f"{place}.{key}" if place else str(key)
            _collect(before.get(key, absent), now.get(key, absent), inner, absent, found)
    elif before is _ABSENT:
        found.only[1].append(f"{place} ({_short(now)})")
    elif now is _ABSENT:
        found.only[0].append(f"{place} ({_short(before)})")
    elif before != now:
        found.changed.append(f"{place} is {_short(before)} {found.sides[0]} and {_short(now)} {found.sides[1]}")


def _folded(names: list[str], side: str) -> str:
    shown = sorted(names, key=lambda name: name.endswith("(null)"))[:MOST_NAMES]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"not known {side}: {', '.join(shown)}{more}"


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 3]}..."
