"""How one model is spread over ranks. Knows no torch, so that settings and the scheduler can use it."""

from dataclasses import dataclass, replace

from sojourn.metrics.errors import ModelError


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of the three kinds of parallelism, and one rank's place in them.

    The layers are cut into `pipeline_parallel` stages. Within a stage, `tensor_parallel` ranks share each matrix
    (Shoeybi et al., 2019, Megatron-LM), and `expert_parallel` parts of the ranks hold different experts. Without
    tensor parallelism the ranks of a stage hold the same attention and different experts. Ranks of one stage are
    neighbours: rank = stage * ranks_per_stage + rank_in_stage. Raises ModelError.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    rank: int = 0
    divides_tokens: bool = (
        False  # each rank of a stage routes a part of the tokens, and sends them where the experts are
    )

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name}={getattr(self, name)} must be at least 1")
        if self.tensor_parallel > 1 and self.tensor_parallel % self.expert_parallel:
            raise ModelError(
                f"expert_parallel={self.expert_parallel} must divide tensor_parallel={self.tensor_parallel}; or leave "
                "tensor_parallel at 1, which copies attention to every rank"
            )
        if self.divides_tokens and (self.tensor_parallel > 1 or self.expert_parallel == 1):
            raise ModelError("tokens are divided between ranks that hold whole experts; use expert_parallel alone")
        if not 0 <= self.rank < self.size:
            raise ModelError(f"rank {self.rank} is not one of the {self.size} ranks of this layout")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.pipeline_parallel * self.ranks_per_stage

    @property
    def ranks_per_stage(self) -> int:
        return max(self.tensor_parallel, self.expert_parallel)

    @property
    def stage(self) -> int:
        return self.rank // self.ranks_per_stage

    @property
    def rank_in_stage(self) -> int:
        return self.rank % self.ranks_per_stage

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pipeline_parallel - 1

    @property
    def tensor_rank(self) -> int:
        """Which of the `tensor_parallel` parts of a matrix the rank holds."""
        return self.rank_in_stage % self.tensor_parallel

    @property
    def expert_rank(self) -> int:
        """Which of the `expert_parallel` parts of the experts the rank holds."""
        return self.rank_in_stage // self.ranks_per_expert

    @property
    def ranks_per_expert(self) -> int:
        """Ranks that share each expert's matrices."""
        return self.ranks_per_stage // self.expert_parallel

    @property
    def rank_in_expert(self) -> int:
        """Which part of its experts' matrices the rank holds."""
        return self.rank_in_stage % self.ranks_per_expert

    def of_rank(self, rank: int) -> "ParallelLayout":
        """The same layout from another rank's point of view."""
        return replace(self, rank=rank)

    def tensor_part(self, whole: int, what: str) -> range:
        """This rank's part of `whole` heads, columns or whatever the plural `what` says. Raises ModelError."""
        return even_part(whole, self.tensor_parallel, self.tensor_rank, "tensor_parallel", what)

    def vocabulary(self, vocab_size: int) -> range:
        """This rank's tokens. The last rank has fewer where they do not divide evenly."""
        most = -(-vocab_size // self.tensor_parallel)
        begin = most * self.tensor_rank
        if begin >= vocab_size:
            raise ModelError(
                f"tensor_parallel={self.tensor_parallel} leaves ranks without a part of the {vocab_size} tokens"
            )
        return range(begin, min(begin + most, vocab_size))

    def stage_layers(self, num_layers: int) -> range:
        """The layers of this rank's stage. The first stages have one more where they do not divide evenly."""
        if self.pipeline_parallel > num_layers:
            raise ModelError(
                f"pipeline_parallel={self.pipeline_parallel} has more stages than the model has layers ({num_layers})"
            )
        begins = [-(-stage * num_layers // self.pipeline_parallel) for stage in (self.stage, self.stage + 1)]
        return range(*begins)


def even_part(whole: int, parts: int, index: int, setting: str, what: str) -> range:
    """Part `index` of `parts` equal ones. Raises ModelError where `setting` does not divide."""
    if whole % parts:
        raise ModelError(f"{setting}={parts} does not divide the model's {whole} {what}; use a size that does")
    size = whole // parts
    return range(index * size, (index + 1) * size)


ONE_PROCESS = ParallelLayout()
