"""Where a prompt leaves what is known, against a walk over every known branch."""

from hypothesis import given
from hypothesis import strategies as st

from sojourn.metrics.memory.branches import Branches, follow_branches, with_branch
from sojourn.metrics.memory.known_prompts import packed_tokens

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=5)


@given(st.lists(tokens, max_size=12), tokens)
def test_branches_are_followed_as_far_as_any_of_them_goes(known, asked):
    tree: Branches = None
    for branch in known:
        tree = with_branch(tree, packed_tokens(branch))

    def shared(branch: list[int]) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(branch, asked, strict=False)) if a != b), min(len(branch), len(asked))
        )

    furthest = max(map(shared, known), default=0)
    leaves = any(shared(branch) == furthest and len(branch) > furthest for branch in known)
    shared_tokens, goes_on, followed = follow_branches(tree, packed_tokens(asked))
    assert shared_tokens == furthest
    if furthest:
        assert followed in map(packed_tokens, known) and followed.startswith(packed_tokens(asked[:furthest]))
    else:
        assert followed is None
    if furthest < len(asked):
        assert goes_on == leaves
