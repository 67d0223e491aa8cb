"""Host time of one scheduling decision with 64 running and 1,000 waiting requests, for each policy.

python -m bench.steps.schedule_step
"""

import statistics
import time

from sojourn.engine.messages import Submit
from sojourn.engine.request.policies import POLICIES
from sojourn.engine.sampling import SamplingParams
from tests.engine.simulated import Simulation

RUNNING = 64
WAITING = 1000
STEPS = 300


def measure(policy: str) -> list[float]:
    """Microseconds of `Scheduler.schedule`, sorted, while every place is taken and everybody decodes."""
    simulation = Simulation(20_000, 16, policy=policy, max_num_seqs=RUNNING, max_num_batched_tokens=2048)
    for index in range(RUNNING + WAITING):
        sampling = SamplingParams(max_tokens=STEPS + 100, temperature=0)
        prompt = [index % 50] * 20
        simulation.engine.receive([Submit(f"r{index}", prompt, sampling, 0, tenant=f"t{index % 20}")], 0)
    scheduler, times = simulation.scheduler, []
    schedule = scheduler.schedule

    def timed():
        begin = time.perf_counter_ns()
        plan = schedule()
        times.append((time.perf_counter_ns() - begin) / 1e3)
        return plan

    scheduler.schedule = timed
    simulation.check = lambda: None
    for _ in range(STEPS):
        simulation.step()
    assert scheduler.num_waiting == WAITING
    return sorted(times[10:])


if __name__ == "__main__":
    for name in POLICIES:
        runs = measure(name)
        print(f"{name:<24} {statistics.median(runs):7.0f} µs  (p99 {runs[int(len(runs) * 0.99)]:.0f})")
