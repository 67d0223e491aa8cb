"""The least time that a step can take on a device of the catalogue: its peak rates, without a kernel.

A lower bound. Each rank computes its share and reads its weights and keys and values once; each layer then sums its
results over the ranks twice, by the link.
"""

from collections.abc import Mapping

from sojourn.metrics.compute.cost_model import ModelShape, num_pairs
from sojourn.metrics.compute.memory_plan import GIB, memory_plan
from sojourn.metrics.compute.model_catalog import find_model
from sojourn.metrics.compute.rank_shape import rank_shape
from sojourn.metrics.errors import InputError, ModelError
from sojourn.replay.device.catalogue import Device, device_named
from sojourn.replay.device.composition import SERVING
from sojourn.replay.device.estimate import Composition, Deployment, DeviceStep, KnownError, OutsideTables

REDUCTIONS = 2  # of a layer: behind its attention and behind its feed-forward part
NUMBER_BYTES = 2  # of what is summed


class Roofline:
    """A `DeviceEstimate` of peak rates."""

    def __init__(
        self, deployment: Deployment, devices: Mapping[str, Device] | None = None, error: KnownError | None = None
    ) -> None:
        """Raises InputError for an unknown device or format, OutsideTables for a model that cannot be counted."""
        self.deployment, self.error = deployment, error
        device, serving = device_named(deployment.device, devices), SERVING[deployment.backend]
        if not 1 <= deployment.tensor_parallel <= device.devices_per_node:
            raise InputError(
                f"tensor parallelism {deployment.tensor_parallel} leaves a node of {device.devices_per_node} x "
                f"{deployment.device}; the catalogue knows the link within a node"
            )
        parts = {"tensor_parallel": deployment.tensor_parallel, "expert_parallel": deployment.expert_parallel}
        try:
            sizes = find_model(deployment.model)
            self._shape = rank_shape(sizes, deployment.weight_format, deployment.kv_format, **parts)
            plan = memory_plan(
                sizes, device.memory_gib * GIB, weights=deployment.weight_format, kv=deployment.kv_format,
                utilisation=serving.memory_fraction, is_of_free=serving.fraction_is_of_free,
                batch_tokens=serving.step_tokens, **parts,
            )  # fmt: skip
        except ModelError as error:
            raise OutsideTables(str(error)) from None
        if not plan.fits:
            raise OutsideTables(
                f"{deployment.model} in {plan.weight_format} leaves no memory for keys and values on "
                f"{deployment.tensor_parallel} x {deployment.device}; take more devices, larger ones or a narrower "
                "format"
            )
        self.kv_tokens = plan.kv_tokens
        self.composition: Composition = serving.composition
        self.host_ns = serving.host_ns
        self.provenance = f"peak rates: {device.source}"
        self._flops, self._attention_flops = device.flops_of(plan.weight_format), device.flops_of("bf16")
        self._bytes = device.bandwidth_gbs * 1e9
        ranks, shape = deployment.tensor_parallel, self._shape
        moved = REDUCTIONS * shape.num_layers * shape.hidden_size * NUMBER_BYTES * 2 * (ranks - 1) / ranks
        self._reduce_ns = moved / device.link_gbs  # of one token

    def device_ns(self, step: DeviceStep) -> float:
        shape, decodes = self._shape, step.decodes
        past = round(step.decode_past_tokens / decodes) if decodes else 0
        tokens = decodes + step.chunk_tokens
        if not tokens:
            return 0.0
        sequences = [(1, past, decodes), *((new, done, 1) for new, done in step.chunks)]
        pairs = kv_reads = 0
        for window, layers in shape.windows:
            for new, done, count in sequences:
                seen = done + new if window is None else min(done + new, window + new - 1)
                pairs += count * layers * num_pairs(new, done, window)
                kv_reads += count * layers * seen
        linear = 2 * tokens * (shape.attention_parameters + shape.mlp_parameters)
        linear += shape.head_flops_per_row * (decodes + len(step.chunks))
        computed_s = linear / self._flops + shape.pair_flops * pairs / self._attention_flops
        kv_bytes = shape.kv_bytes_per_token * (kv_reads / shape.num_layers + tokens)
        moved_s = (self._weight_bytes(shape, tokens) + kv_bytes) / self._bytes
        return 1e9 * max(computed_s, moved_s) + self._reduce_ns * tokens

    @staticmethod
    def _weight_bytes(shape: ModelShape, tokens: int) -> float:
        """That a step of so many tokens reads; of the experts the distinct ones, if all are as likely."""
        experts = shape.experts
        if experts is None:
            return shape.weight_bytes
        distinct = experts.num_experts * (1 - (1 - experts.num_chosen / experts.num_experts) ** tokens)
        return shape.weight_bytes + experts.num_layers * distinct * experts.expert_bytes
