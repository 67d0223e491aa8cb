"""Things in order of their last use, and how much was used since each.

This is the stack of Mattson et al. (IBM Systems Journal 9, 1970). A Fenwick tree over the order of uses counts in
O(log n), as in Olken (1981). An entry has a weight: one block, or a sequence of blocks that were used together.
"""

from collections.abc import Hashable, Iterator

SMALLEST = 1024  # places of the tree


class LruStack:
    """Owns the order. Uses beyond the tree's places renumber those that are still there."""

    def __init__(self) -> None:
        self.total = 0  # of the weights
        self._place: dict[Hashable, int] = {}  # in order of the last use, oldest first
        self._weight: dict[Hashable, int] = {}
        self._tree = [0] * (SMALLEST + 1)
        self._next = 1

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._place

    def __iter__(self) -> Iterator[Hashable]:
        """Oldest first."""
        return iter(self._place)

    def push(self, key: Hashable, weight: int = 1) -> None:
        """The key is the one that was used last."""
        if key in self._place:
            self.remove(key)
        if self._next == len(self._tree):
            self._renumber()
        self._place[key] = self._next
        self._next += 1
        self._weight[key] = 0
        self._add(key, weight)

    def above(self, key: Hashable) -> int:
        """The weight of what was used after this one, which is there."""
        place, tree, weight = self._place[key], self._tree, self.total
        while place:
            weight -= tree[place]
            place &= place - 1
        return weight

    def shrink(self, key: Hashable, by: int) -> None:
        """The entry stays in its place, and weighs less; without weight it is gone."""
        self._add(key, -by)
        if not self._weight[key]:
            del self._weight[key], self._place[key]

    def remove(self, key: Hashable) -> None:
        self.shrink(key, self._weight[key])

    def pop_oldest(self) -> Hashable:
        key = next(iter(self._place))
        self.remove(key)
        return key

    def _add(self, key: Hashable, weight: int) -> None:
        place, tree = self._place[key], self._tree
        self._weight[key] += weight
        self.total += weight
        while place < len(tree):
            tree[place] += weight
            place += place & -place

    def _renumber(self) -> None:
        """Half of the places are free afterwards, so it costs each use a constant."""
        size = SMALLEST
        while size < 2 * len(self._place):
            size *= 2
        tree = [0] * (size + 1)
        for place, key in enumerate(self._place, 1):
            self._place[key] = place
            tree[place] += self._weight[key]
            if (parent := place + (place & -place)) <= size:
                tree[parent] += tree[place]
        for place in range(len(self._place) + 1, size + 1):
            if (parent := place + (place & -place)) <= size:
                tree[parent] += tree[place]
        self._tree, self._next = tree, len(self._place) + 1
