"""Codes of few bits, several to a word, as checkpoints store them. All work on the meta device, too."""

import torch

# Positions of a word's nibbles, in the order of the columns that they hold (AWQ's GEMM layout).
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# Bits of a float8_e4m3fn for each e2m1 code: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same below zero.
_E2M1 = tuple(sign | code for sign in (0, 0x80) for code in (0x00, 0x30, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C))


def unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first `count` codes of each row: int32 words [rows, n], a dense stream from the lowest bit → uint8."""
    if bits not in (2, 4, 8):
        return _unpacked_across_words(words, bits)[:, :count].contiguous()
    octets = words.contiguous().view(torch.uint8)
    if bits < 8:
        shifts = range(0, 8, bits)
        octets = torch.stack([(octets >> shift) & ((1 << bits) - 1) for shift in shifts], dim=-1).flatten(-2)
    return octets[:, :count].contiguous()


def _unpacked_across_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    starts = torch.arange(words.shape[1] * 32 // bits, device=words.device) * bits
    wide = torch.cat([words, torch.zeros_like(words[:, :1])], dim=1).long() & 0xFFFFFFFF
    both = wide[:, starts // 32] | (wide[:, starts // 32 + 1] << 32)
    return ((both >> (starts % 32)) & ((1 << bits) - 1)).to(torch.uint8)


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The reverse of `unpacked`: uint8 codes [rows, count] → int32 [rows, ceil(count * bits / 32)]."""
    rows, count = codes.shape
    starts = torch.arange(count) * bits
    words = torch.zeros(rows, -(-count * bits // 32) + 1, dtype=torch.int64)
    wide = codes.long() << (starts % 32)
    words.index_add_(1, starts // 32, wide & 0xFFFFFFFF)
    words.index_add_(1, starts // 32 + 1, wide >> 32)
    return words[:, :-1].to(torch.int32)  # two's complement: the highest bit becomes the sign


def awq_unpacked(words: torch.Tensor) -> torch.Tensor:
    """AWQ's int32 [rows, columns / 8] → uint8 codes [rows, columns]."""
    nibbles = unpacked(words, 4, 8 * words.shape[1]).unflatten(1, (-1, 8))
    return torch.stack([nibbles[..., position] for position in AWQ_ORDER], dim=-1).flatten(1)


def awq_packed(codes: torch.Tensor) -> torch.Tensor:
    """The reverse of `awq_unpacked`."""
    columns = codes.unflatten(1, (-1, 8))
    nibbles = torch.empty_like(columns)
    for column, position in enumerate(AWQ_ORDER):
        nibbles[..., position] = columns[..., column]
    return packed(nibbles.flatten(1), 4)


def e2m1_codes(octets: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n], the lower nibble first → e2m1 numbers [..., 2 n] as float8_e4m3fn, which holds them exactly."""
    table = torch.tensor(_E2M1, dtype=torch.uint8, device=octets.device)
    nibbles = torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)
    return table[nibbles.int()].view(torch.float8_e4m3fn)


def e8m0_scales(exponents: torch.Tensor) -> torch.Tensor:
    """uint8 exponents → float32 powers of two; 255 is no number (OCP Microscaling Formats, 1.0)."""
    powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - 127)
    return torch.where(exponents == 255, torch.nan, powers)
