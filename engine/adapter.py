"""A LoRA adapter as the front and the core name it to each other. Knows no torch and no file."""

import msgspec


class AdapterReference(msgspec.Struct, frozen=True):
    """One adapter with its contents: the same name with other weights is another adapter."""

    name: str
    folder: str
    digest: str  # of its files
    rank: int  # the largest of its modules
    parameters: int  # that a token is multiplied by, in all layers
    nbytes: int  # of them, as stored

    @property
    def key(self) -> str:
        """Names the weights: adapters of one key are the same."""
        return f"{self.name}@{self.digest}"
