"""What a dry run saw compiles for compute capability 9.0, hardly spills and fits; the whole set is slow."""

import json
from importlib.util import find_spec

import pytest

if find_spec("triton") is None:  # importing it here would settle that nobody interprets its kernels
    pytest.skip("needs triton", allow_module_level=True)

from bench.gpu.compilation import SHARED_LIMIT_BYTES, Compilation, compile_for_hopper
from bench.gpu.compiled import HEADER, compilations, row
from bench.gpu.dry_run import in_a_process
from tests.bench.gpu.shapes import LATENT, MIXTURE, SINKS
from tests.engine.compute.test_triton_compiled import SPILLED_BYTES, plan

pytestmark = pytest.mark.compiler  # Triton builds its launchers with one

SHAPES = {"mixture": MIXTURE, "latent": LATENT, "sinks": SINKS}


def check(jobs: list[Compilation], workers: int = 1) -> None:
    found = compile_for_hopper(jobs, 1800, workers)
    pairs = list(zip(jobs, found, strict=True))
    spilled = [(job.kernel, job.constants, one.local_bytes) for job, one in pairs if one.local_bytes > SPILLED_BYTES]
    assert not spilled
    assert max(one.shared_bytes for one in found) <= SHARED_LIMIT_BYTES
    for job, one in pairs:
        assert row(job, one).count("|") == HEADER.count("|")


def test_the_planning_kernel_compiles():
    """The compiler finds what the interpreter runs: a loop whose variable changes its type."""
    check([plan(0, True)])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shape", ["qwen3-0.6b", *SHAPES])
def test_every_specialisation_of_a_dry_run_compiles(shape, tmp_path):
    if shape in SHAPES:
        (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape]))
        shape = str(tmp_path / "config.json")
    record = in_a_process(shape, {"max_num_seqs": 7, "max_num_batched_tokens": 2048, "max_model_len": 2048})
    jobs = compilations(record.specialisations.values())
    assert len({job.kernel for job in jobs}) >= 9
    check(jobs, workers=2)
