"""Which settings differ between two runs."""

from collections.abc import Mapping
from typing import Any

from sojourn.metrics.compare.settings import FOLLOWS, WITHOUT_EFFECT, engine_of
from sojourn.metrics.run.directory import engine_settings, section

POOL_DIFFERS = 0.05  # of the blocks


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Engine settings that were given and differ between two `run.json`, with the values in force.

    What a server derives from them, such as the blocks of its pool, differs in consequence and is left out. Of servers
    that were started by others (`sojourn load`) the settings count that they state of themselves, and of these the
    blocks of the pool where nothing else explains that they differ: the flag that sizes it is often not stated.
    """
    first, second = engine_settings(dict(before)), engine_settings(dict(after))
    are_foreign = all("base_url" in section(dict(meta), "engine") for meta in (before, after))
    if are_foreign:
        given = {name for name in first.keys() & second.keys() if not isinstance(first[name], dict | list)}
        given -= {*FOLLOWS, "model"}
    else:
        given = engine_of(dict(before)).keys() | engine_of(dict(after)).keys()
    given -= set(WITHOUT_EFFECT)
    found = {name: (first.get(name), second.get(name)) for name in sorted(given) if first.get(name) != second.get(name)}
    pools = [each.get("num_kv_blocks") for each in (first, second)]
    if are_foreign and not found and all(type(blocks) is int for blocks in pools):
        small, large = sorted(pools)
        if large > (1 + POOL_DIFFERS) * small:  # a server that measures its memory finds a little more or less
            return {"num_kv_blocks": (pools[0], pools[1])}
    return found
