"""The compute lifecycle's metrics: how the work met the hardware."""

from metrics.kernels import CLASSES
from metrics.metric import PROCESSES, RATIO_BOUNDS, STEP_BOUNDS, counter, gauge, histogram
from metrics.records import STAGES
from metrics.system import THROTTLE_REASONS

COMPOSITIONS = ("prefill", "decode", "mixed")
DEVICES = ("gpu", "cpu")

COMPUTE = (
    histogram("compute", "step_seconds", "seconds", STEP_BOUNDS,
              "Wall time of a step, by composition: prefill only, decode only, mixed.",
              "Time between steps is not in it; a long step may just be a large one (see the prediction).",
              composition=COMPOSITIONS),
    counter("compute", "stage_seconds_total", "seconds",
            "Host time of steps by exclusive stage; the stages sum to the wall time.",
            "`wait` is host time: how busy the device was is in sojourn_compute_device_seconds_total.",
            stage=STAGES),
    counter("compute", "device_seconds_total", "seconds", "Time the device was busy with steps.",
            "Busy is not efficient: compare flops and bytes with the roofline."),
    counter("compute", "device_gap_seconds_total", "seconds",
            "Time the device had nothing to do while the loop had work: what the host did not hide.",
            "With an idle loop it stands still; the rest of the time without work is in no counter."),
    counter("compute", "flops_total", "flops", "Floating-point operations that steps needed, counted exactly.",
            "Padding and wasted work are not in it."),
    counter("compute", "moved_bytes_total", "bytes", "Bytes that steps must move at least: weights, KV, activations.",
            "A lower bound: misses of the device's caches are not in it."),
    counter("compute", "predicted_seconds_total", "seconds",
            "Device time that the step model expects of the steps that it could predict.",
            "Silent until the model has seen enough steps."),
    counter("compute", "residual_seconds_total", "seconds",
            "Measured minus predicted device time of a step, summed apart for slower and for faster steps.",
            "Slower than the model says is a fault only if the model was fitted on healthy steps.",
            direction=("slower", "faster")),
    histogram("compute", "prediction_ratio", "ratio", RATIO_BOUNDS,
              "Measured / predicted device time of a step: 1 is as expected of its composition.",
              "Cannot name the reason: clocks, neighbours and bad kernels look alike here."),
    counter("compute", "steps_total", "steps", "Steps by graph: eager, or the bucket that was replayed.",
            "Does not tell how long they took.", graph=()),
    counter("compute", "kernel_seconds_total", "seconds",
            "Device time of profile bursts by class of kernel; with the gaps it sums to the bursts' wall time.",
            "Bursts only (POST /debug/profile): shares, not totals of the server.", klass=CLASSES),
    gauge("compute", "power_watts", "watts", "Power that a device draws: the GPU's board, the CPU's packages.",
          "Whoever draws it; no series without a sensor.", device=DEVICES),
    counter("compute", "energy_joules_total", "joules", "Energy that a device drew, from samples of its power.",
            "Peaks between two samples are missed; whoever draws it.", device=DEVICES),
    gauge("compute", "sm_clock_hertz", "hertz", "Clock of the GPU's multiprocessors.",
          "One instant a second; no series without a GPU's driver."),
    gauge("compute", "memory_clock_hertz", "hertz", "Clock of the GPU's memory.",
          "One instant a second; no series without a GPU's driver."),
    gauge("compute", "throttle_active", "state", "1 where the GPU's clock is held below what was asked for, by reason.",
          "One instant a second; gpu_idle is no fault.", reason=tuple(THROTTLE_REASONS.values())),
    gauge("compute", "temperature_celsius", "celsius", "Temperature of the GPU.", "Of the chip, not of its memory."),
    gauge("compute", "utilisation_ratio", "ratio", "Share of the time in which the GPU ran any kernel.",
          "Not how much of the GPU it used."),
    counter("compute", "cpu_seconds_total", "seconds", "CPU time of a process: front, core.",
            "User and system time, of all its threads.", process=PROCESSES),
)  # fmt: skip
