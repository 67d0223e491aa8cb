"""What the replay says of recorded runs with changes, and the diagnosis of the same runs with these replays."""

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from sojourn.diagnosis.diagnose import diagnose
from sojourn.metrics.prediction import Change
from sojourn.replay.predictor import predictor_of
from tests.replay.simulated_run import random_asks, write_run

COUNT = 20
OBJECTIVES = [{"klass": "all", "ttft_ms": 15.0, "tpot_ms": 4.0, "source": "drawn"}]
CHANGES = [
    {}, {"max_num_seqs": 2}, {"max_num_seqs": 16}, {"max_num_batched_tokens": 16}, {"num_kv_blocks": 64},
    {"policy": "shortest-prefill-first"}, {"max_prefill_chunk_tokens": 8},
]  # fmt: skip


def predictions() -> Iterator[tuple[str, Any]]:
    for seed in range(COUNT):
        dice = random.Random(1000 + seed)
        settings = {
            "num_blocks": dice.choice((64, 256)), "max_num_seqs": dice.choice((2, 4, 8)),
            "max_num_batched_tokens": dice.choice((16, 32, 64)), "overlap": dice.random() < 0.5,
            "policy": dice.choice(("fcfs", "priority", "prefill-first")),
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            asks = random_asks(seed, dice.choice((60, 150)), mean_gap_ns=dice.choice((1_000_000, 4_000_000)))
            run = write_run(Path(folder) / "run", asks, objectives=OBJECTIVES, **settings)
            changes = [Change(settings=change) for change in CHANGES]
            predicted = predictor_of(run).predict(changes)
            yield (
                f"{seed:02d}",
                {
                    "predictions": msgspec.to_builtins(predicted, enc_hook=str),
                    "diagnosis": msgspec.to_builtins(diagnose(run, predictor=predictor_of(run)), enc_hook=str),
                },
            )
