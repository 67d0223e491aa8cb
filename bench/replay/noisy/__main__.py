"""Whether intervals hold on a machine that is busy on purpose: pairs are recorded beside a neighbour, then judged.

python -m bench.replay.noisy DIR [--pairs 40] [--markdown docs/results/noisy_pairs.md] [--beside SENTENCE]

Resumable: a run that DIR holds already is not made again. A pair takes about 50 seconds; with --judge-only no run is
made. `--beside` says what else ran on the machine, for the page.
"""

import argparse
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from bench.replay.noisy.judge import Judged, coverage, judge, line, markdown
from bench.replay.noisy.pairs import noisy_pairs, record, whole_pairs
from sojourn.metrics.machine.host import hardware


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path, help="folder of the pairs; an earlier one is continued")
    options.add_argument("--pairs", type=int, default=40)
    options.add_argument("--judge-only", action="store_true", help="make no run, use those that are there")
    options.add_argument("--markdown", type=Path, help="file to write the tables to")
    options.add_argument("--beside", default="", help="what else ran on the machine, as a sentence")
    chosen = options.parse_args()
    pairs = noisy_pairs(chosen.pairs)
    for pair in [] if chosen.judge_only else pairs:
        begin = time.monotonic()
        record(pair, chosen.folder)
        print(f"{pair.name}: {time.monotonic() - begin:.0f} s", flush=True)
    found: list[Judged] = []
    for both in whole_pairs(pairs, chosen.folder):
        found.append(judge(*both))
        print(line(found[-1]), flush=True)
    if not found:
        print("no pair has both of its runs", file=sys.stderr)
        return 1
    print(f"the attainment held in {coverage(found, 'attainment')[0]} of {len(found)} pairs")
    if chosen.markdown:
        facts = hardware()
        machine = f"{facts.get('cpu') or 'CPU'}, {facts.get('cores')} cores"
        command = f"python -m bench.replay.noisy DIR --pairs {chosen.pairs}"
        day = f"{datetime.now(UTC):%-d %B %Y}"
        chosen.markdown.write_text(markdown(found, command, machine, day, chosen.beside), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
