"""Which technique a planted case shows, and in which role: as what is at fault, or as what mends it. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from sojourn.diagnosis.score.figures import Share, share_of
from sojourn.diagnosis.score.judgement import Judgement

# Technique → its settings. A technique is at fault only in a run that chose one of them.
TECHNIQUES = {
    "speculation": ("speculation", "speculation_adaptive", "speculation_tokens"),
    "formats of weights": ("weights", "dtype"),
    "formats of keys and values": ("kv_cache_dtype",),
    "eviction policies": ("eviction_policy", "eviction_ttl_seconds"),
    "window with sinks": ("attention_window",),
    "KV tiers": ("kv_host_gib", "kv_disk_path"),
    "LoRA adapters": ("max_loras",),
}
Role = Literal["cause", "fix"]


class TechniqueCase(msgspec.Struct, frozen=True, kw_only=True):
    """The verdicts on one case of a technique, over its severities and repeats that hurt."""

    technique: str
    role: Role  # of the technique in the case
    case: str
    first: Share
    among_three: Share
    remedy: Share


def role_in(truth_settings: Sequence[str], chosen: Mapping[str, Any]) -> tuple[str, Role] | None:
    """Technique and role of a case whose fix sets these settings. `chosen` are the settings that the run chose. None
    where the fix is no technique."""
    for technique, settings in TECHNIQUES.items():
        if truth_settings and truth_settings[0] in settings:
            return technique, "cause" if any(chosen.get(name) is not None for name in settings) else "fix"
    return None


def technique_cases(judgements: Sequence[Judgement], chosen: Mapping[str, Mapping[str, Any]]) -> list[TechniqueCase]:
    """In the order of TECHNIQUES, the causes first. `chosen`: run → its chosen settings."""
    found: dict[tuple[str, Role, str], list[Judgement]] = {}
    for each in judgements:
        settings = [remedy.setting for truth in each.record.truths for remedy in truth.remedies]
        shown = role_in(settings, chosen[each.run])
        if each.counts and shown is not None:
            found.setdefault((*shown, each.record.case), []).append(each)
    names = list(TECHNIQUES)
    return [
        TechniqueCase(
            technique=technique, role=role, case=case, first=share_of(same, lambda each: each.first),
            among_three=share_of(same, lambda each: each.among_three), remedy=share_of(same, lambda each: each.remedy),
        )
        for (technique, role, case), same in sorted(
            found.items(), key=lambda item: (names.index(item[0][0]), *item[0][1:])
        )
    ]  # fmt: skip
