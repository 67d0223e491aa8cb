"""The memory plan: the bytes that a core takes from its device, by purpose."""

import msgspec

GIB = 1 << 30
HOST_SHARE = 0.25  # of a host's memory that KV takes by default: other processes use it, too
# Purposes, in the order in which the memory is taken.
PURPOSES = ("process", "weights", "work space", "sampling tables", "CUDA graphs", "adapters", "KV cache", "KV tier")


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes by purpose. On a CPU the device's memory is the host's, and KV takes its part as it fills."""

    free_bytes: int  # of the device, before the model was loaded
    process_bytes: int  # interpreter and libraries; 0 on a GPU, where `free_bytes` leaves the context out
    weight_bytes: int
    kv_bytes: int
    work_bytes: int  # activations and logits of the largest step: measured on a GPU, estimated on a CPU
    table_bytes: int  # of sampling: rows of counts and biases for all requests that can run
    graph_bytes: int = 0  # of CUDA graphs
    adapter_bytes: int = 0  # slots of LoRA adapters
    tier_bytes: int = 0  # of the KV tier in host memory, where the device is the host; it fills as KV does
    num_kv_blocks: int
    kv_tokens: int  # that the blocks hold

    @property
    def parts(self) -> dict[str, int]:
        """Purpose → bytes, by PURPOSES."""
        sizes = (
            self.process_bytes,
            self.weight_bytes,
            self.work_bytes,
            self.table_bytes,
            self.graph_bytes,
            self.adapter_bytes,
            self.kv_bytes,
            self.tier_bytes,
        )
        return dict(zip(PURPOSES, sizes, strict=True))

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    def sentence(self) -> str:
        """The plan on one line."""
        parts = ", ".join(f"{name} {shown_bytes(size)}" for name, size in self.parts.items() if size)
        return f"memory: {parts}; {shown_bytes(self.total_bytes)} of {shown_bytes(self.free_bytes)} that were free"


def shown_bytes(size: int) -> str:
    """In GiB from one GiB on, in MiB, or in KiB below one MiB."""
    if 0 < size < 1 << 20:
        return f"{size / 1024:.1f} KiB"
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.0f} MiB"
