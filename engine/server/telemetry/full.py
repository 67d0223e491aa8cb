"""Where the front's records go: into the exporter's arrays, and into the run directory if one is recorded."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any

import msgspec

from sojourn.engine import messages
from sojourn.engine.config import EngineConfig, model_folder, objectives
from sojourn.engine.server.gateway.usage.usage_log import UsageLog
from sojourn.engine.server.telemetry.loop_lag import LoopLag
from sojourn.engine.server.telemetry.loop_watch import LoopWatch
from sojourn.engine.server.telemetry.recent import Recent
from sojourn.engine.server.telemetry.recording import Recording
from sojourn.interop.exported.opentelemetry import Tracer
from sojourn.interop.exported.prometheus import Exporter
from sojourn.interop.exported.prometheus_pool import Pool
from sojourn.interop.exported.vllm_names import EngineFacts
from sojourn.metrics.compute.roofline import Ceilings, device_name, load_ceilings, product_precision
from sojourn.metrics.compute.step_costs import StepCosts
from sojourn.metrics.errors import CalibrationError
from sojourn.metrics.machine.host import SAMPLE_SECONDS
from sojourn.metrics.machine.sampler import SystemSampler
from sojourn.metrics.memory.residence import ModelResidence
from sojourn.metrics.records import RequestRecord, StepRecord, SystemRecord
from sojourn.metrics.run.directory import wall_anchor
from sojourn.metrics.steps import Steps

log = logging.getLogger(__name__)
FOLD_SECONDS = 0.7  # between two folds: a batch costs some milliseconds, however many steps it has
OBSERVED_SECONDS = 0.5  # the longest wait for the record of a step whose tokens are here: its core may be dead
FEWEST_SAMPLE_SECONDS = 0.25  # of the last sample: in less, one tick of the CPU clock is a large share


class Telemetry:
    """Owns the exporter, the recorder and the tracer. They see nothing but the records and the state of the pool.

    Raises RunDataError if the run directory cannot be written, or holds a finished run, and ServerError if traces are
    wanted and OpenTelemetry is not installed.
    """

    def __init__(self, config: EngineConfig):
        bounds = objectives(config)
        name = config.served_model_name or model_folder(config.model).name
        declared = [{"klass": "all"} | bounds] if bounds else None
        self.exporter = Exporter(name, declared, config.compat, config.telemetry)
        self._config = config
        self.tracer = _tracer(config, self.exporter)
        self.recent = Recent()
        self.loop_lag = LoopLag()
        self.loop_watch = LoopWatch()
        self.new_event_loop = self.loop_watch.new_event_loop
        self.failure: str | None = None  # once closed: what its run directory lacks, as a sentence
        self.usage: UsageLog | None = None  # set by the server that bills
        self._recording = Recording(config) if config.run_dir is not None else None
        self.recorder = self._recording and self._recording.recorder
        self.costs: StepCosts | None = None  # of the core that is up
        self._last: messages.Tokens | None = None  # its last message of tokens
        self._is_complete = asyncio.Event()  # the record of its last step is here, too
        self._is_complete.set()
        self._steps: list[StepRecord] = []  # not folded yet

    def core_died(self, restarts: bool) -> None:
        """`restarts`: another core is started, also if the steps of this one cannot be worked out."""
        with _log_failure("steps could not be worked out"):
            self._fold_steps()
        self._last = None
        self._is_complete.set()
        if restarts:
            self.exporter.observe_core_restart()

    def ready(self, message: messages.Ready) -> None:
        """A core has loaded its model: its whole pool is free. One that replaces another keeps its step model."""
        if self.usage is not None:
            self.usage.ready(message)
        if self.costs is None or self.costs.shape != message.shape:
            self.costs = StepCosts(message.shape)
            ceilings = _ceilings(message)
            if ceilings is not None:
                peaks = {precision: ceilings.peak_flops(precision) for precision in ceilings.precisions}
                precision = product_precision(message.weights, message.dtype, message.device)
                self.exporter.observe_ceilings(peaks, ceilings.bandwidth, precision)
            if self._recording is not None:
                self._recording.describe(message, ceilings)
        if message.startup is not None and self._recording is not None:
            self._recording.started(message.startup)
        chosen = self._config.kv_cache_dtype
        dtype = message.dtype if chosen == "auto" else chosen
        facts = EngineFacts(
            num_kv_blocks=message.num_kv_blocks,
            block_size=message.block_size,
            max_model_len=message.max_model_len,
            kv_bytes_per_token=message.shape.kv_bytes_per_token,
            cache_dtype=dtype,
            prefix_caching=self._config.prefix_caching,
        )
        self.exporter.observe_ready(facts)
        self.exporter.gauges.observe_plan(message.memory)
        self.exporter.gauges.observe_weight_error(message.weight_error)
        self.exporter.core.observe_startup(message.startup)

    def residences(self, found: list[ModelResidence]) -> None:
        """What the models of a front were until now."""
        if self._recording is not None:
            self._recording.tell_models(found)

    def tokens(self, message: messages.Tokens) -> None:
        self._last = message
        self._is_complete.clear()

    def observed(self, message: messages.Observed) -> None:
        self._is_complete.set()
        if message.step is not None:
            self._steps.append(message.step)
            if self.usage is not None:
                self.usage.step(message.step)

    async def refresh(self) -> None:
        """Folds every step whose tokens are here; its record follows them at once."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_complete.wait(), OBSERVED_SECONDS)
        self._fold_steps()

    def _fold_steps(self) -> None:
        if not self._steps:
            return
        steps, self._steps = Steps(self._steps), []
        try:
            self.costs.complete(steps)
            self.exporter.observe_steps(steps)
        finally:  # a record without costs is better than none
            for record in steps.records:
                self.recent.add_step(record)
            if self.recorder is not None:
                self.recorder.extend("steps", steps.records)

    def request(self, record: RequestRecord, attributes: Mapping[str, Any]) -> None:
        """Takes an ended request; `attributes` are those of its trace."""
        self.exporter.observe_request(record)
        if self.tracer is not None:
            self.tracer.observe(record, attributes)
        self.recent.add_request(record)
        if self.recorder is not None:
            self.recorder.append("requests", record)

    def scrape(self) -> bytes:
        if (last := self._last) is not None:
            self.exporter.gauges.observe_state(Pool(*last.blocks), last.waiting, last.running)
        if self.recorder is not None or self.usage is not None:
            dropped, failed = (0, 0) if self.recorder is None else (self.recorder.dropped, self.recorder.failed)
            unwritten = 0 if self.usage is None else self.usage.writer.failed
            self.exporter.observe_recorder(dropped, failed + unwritten)
        self.exporter.system.observe_loop_lag(self.loop_lag.counts, self.loop_lag.total_ns)
        if self.tracer is not None:
            self.exporter.observe_tracer(self.tracer.decisions, self.tracer.exports)
        return self.exporter.render()

    def watches(self, core_pid) -> list[Coroutine]:
        """What goes on for as long as the server does. `core_pid()` tells the core's process of now."""
        return [self.sample_system(core_pid), self.loop_lag.run(), self._fold_regularly()]

    async def _fold_regularly(self) -> None:
        """A process that is killed loses no older step."""
        while True:
            await asyncio.sleep(FOLD_SECONDS)
            with _log_failure("steps could not be worked out"):
                self._fold_steps()
            if self._recording is not None:
                self._recording.restore()

    async def sample_system(self, core_pid) -> None:
        """Samples the machine once a second, for as long as it runs, and at the end: what the last requests met."""
        sampler = SystemSampler(os.getpid())
        while True:
            started = time.monotonic()
            with _log_failure("the machine could not be sampled"):
                self._observe_system(await asyncio.to_thread(sampler.sample, core_pid()))
            try:
                await asyncio.sleep(max(0, started + SAMPLE_SECONDS - time.monotonic()))
            except asyncio.CancelledError:
                if time.monotonic() - started >= FEWEST_SAMPLE_SECONDS:
                    with _log_failure("the machine could not be sampled"):
                        self._observe_system(sampler.sample(core_pid()))
                raise

    def _observe_system(self, record: SystemRecord) -> None:
        record = msgspec.structs.replace(record, **self.loop_watch.take())
        self.exporter.system.observe(record)
        if self.usage is not None:
            self.usage.system(record)
        if self.recorder is not None:
            self.recorder.append("system", record)

    def close(self) -> None:
        """Writes the rest. A run that this server described itself is finished with it. Raises nothing: `failure`."""
        with _log_failure("steps could not be worked out"):
            self._fold_steps()
        if self.tracer is not None:
            self.tracer.close()
        if self._recording is not None:
            self.failure = self._recording.close()


@contextlib.contextmanager
def _log_failure(what: str) -> Iterator[None]:
    """Of one look, such as with no file left to open: it is missing, not all that follow."""
    try:
        yield
    except Exception as error:
        log.warning("%s: %s: %s", what, type(error).__name__, error)


def _tracer(config: EngineConfig, exporter: Exporter) -> Tracer | None:
    if config.otlp_endpoint is None:
        return None
    ratio = 1.0 if config.trace_sample_ratio is None else config.trace_sample_ratio
    anchor = wall_anchor()
    offset_ns = anchor["unix_ns"] - anchor["monotonic_ns"]
    return Tracer(
        config.otlp_endpoint, exporter.model_name, ratio, exporter.objectives, offset_ns,
        metrics=config.otlp_metrics is not False,
    )  # fmt: skip


def _ceilings(message: messages.Ready) -> Ceilings | None:
    """The measured limits of the core's device, if there are any."""
    try:
        return load_ceilings(device_name(None if message.device == "cpu" else message.device))
    except CalibrationError:
        return None
