"""What a run of a parallel group tells of the same model in one process: how fast its device would be."""

import msgspec

from sojourn.metrics.compute.group_facts import GroupFacts
from sojourn.metrics.compute.speed_reference import LAYOUT
from sojourn.metrics.errors import ReplayError
from sojourn.metrics.prediction import Change


def told(change: Change, group: GroupFacts | None) -> Change:
    """The change with its `device_speed`, where it makes one process of the run's group. A speed that was given stays.

    The ranks' own computation is known, and one process exchanges nothing. Raises ReplayError for any other group: how
    the work of ranks divides, and what they exchange then, no run of another group shows.
    """
    named = {name: value for name, value in change.settings.items() if name in LAYOUT}
    if not named or change.device_speed != 1.0:
        return change
    words = ", ".join(f"{name}={value}" for name, value in named.items())
    if group is None:
        if all(value == 1 for value in named.values()):
            return change  # as it was
        raise ReplayError(
            f"{words} divides the model between ranks, and this run had one process: it does not show what their "
            "exchanges would cost; record a run with it, or give device_speed beside it"
        )
    after = {name: named.get(name, getattr(group.shape, name)) for name in LAYOUT}
    if all(value == getattr(group.shape, name) for name, value in after.items()):
        return change
    if any(value != 1 for value in after.values()):
        raise ReplayError(
            f"{words} leaves a group of another size, which this run does not show; only the change to one process is "
            "predicted: record a run with it, or give device_speed beside it"
        )
    if group.shape.pipeline_parallel > 1:
        raise ReplayError(
            f"{words}: the steps of a pipeline hold a part of the requests each, and a replay cannot join them; record "
            "a run with it, or give device_speed beside it"
        )
    return msgspec.structs.replace(change, device_speed=group.one_process_speed)
