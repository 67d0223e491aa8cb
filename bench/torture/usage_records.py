"""What clients saw of their calls, beside the usage records that the servers left."""

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

from sojourn.metrics.usage.reader import read_usage

# How a call ended for its client, with the status that it got → what its record may say.
STATUSES_OF = {"done 200": {"answered"}, "done 503": {"failed", "refused"}, "done 400": {"refused"}}
STATUSES_OF |= {"error 200": {"failed"}, "left 200": {"cancelled", "answered", "interrupted"}}


def unmatched(
    folder: Path, seen: Mapping[str, str], doubtful: Collection[str], output_tokens: int
) -> tuple[list[str], list[str], list[str]]:
    """Names of calls without a record, with several, and with one that contradicts what the client saw.

    `seen`: name of a call → how it ended for its client, and the status. `doubtful` may have one record or none.
    """
    records = read_usage(folder).records
    counts = Counter(record.request_id for record in records)
    lost = [name for name in seen if name not in doubtful and counts[name] == 0]
    double = [name for name, count in counts.items() if name in seen and count > 1]
    wrong = []
    for record in records:
        end = seen.get(record.request_id)
        if end is None:
            continue
        whole = end == "done 200" and ("stream" in record.request_id or "whole" in record.request_id)
        expected = STATUSES_OF.get(end)
        is_other = expected is not None and record.status not in expected
        if is_other or (whole and record.http_status == 200 and record.output_tokens != output_tokens):
            wrong.append(f"{record.request_id}: {end}, but {record.status} with {record.output_tokens} tokens")
    return lost, double, wrong
