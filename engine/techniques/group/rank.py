"""The process of a rank beside the first. Never started by hand.

python -m sojourn.engine.techniques.group.rank CORE_PID: reads a line of JSON:
{"sockets": folder, "rank": number, "config": settings}.
"""

import json
import signal
import sys
from pathlib import Path

from sojourn.engine.process import end_with_parent, name_process


def main() -> int:
    core_pid = int(sys.argv[1])
    # Ctrl-C in a terminal, or SIGTERM to a process group, reach this process too; rank 0 decides when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(core_pid)
    # Torch is imported from here on: it takes seconds, and rank 0 may die in them.
    from sojourn.engine.config import EngineConfig
    from sojourn.engine.techniques.group.rank_loop import run

    line = sys.stdin.readline()
    if not line:  # rank 0 is gone
        return 0
    work = json.loads(line)
    name_process(f"sojourn-rank-{work['rank']}")
    return run(core_pid, Path(work["sockets"]), work["rank"], EngineConfig.model_validate(work["config"]))


if __name__ == "__main__":
    sys.exit(main())
