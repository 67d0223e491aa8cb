"""Which attention backend and which fused operations a device gets: the registry of both swap points."""

import torch

from engine.compute.attention import AttentionBackend
from engine.compute.attention_torch import TorchAttention
from engine.compute.operations import Operations, TorchOperations


def make_attention(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The backend of EngineConfig.attention_backend; `auto` takes the fastest that this device and dtype have."""
    return TorchAttention()


def make_operations(name: str, device: torch.device, dtype: torch.dtype) -> Operations:
    """The operations of EngineConfig.fused_operations: `auto` takes fused ones where this device has them."""
    return TorchOperations()
