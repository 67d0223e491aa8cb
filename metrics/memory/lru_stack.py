"""Keys in order of their last use, and how many others were used since each.

This is the stack of Mattson et al. (IBM Systems Journal 9, 1970). A Fenwick tree over the order of uses counts in
O(log n), as in Olken (1981).
"""

from collections.abc import Hashable, Iterator

SMALLEST = 1024  # places of the tree


class LruStack:
    """Owns the order. Uses beyond the tree's places renumber those that are still there."""

    def __init__(self) -> None:
        self._place: dict[Hashable, int] = {}  # in order of the last use, oldest first
        self._tree = [0] * (SMALLEST + 1)
        self._next = 1

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._place

    def __iter__(self) -> Iterator[Hashable]:
        """Oldest first."""
        return iter(self._place)

    def push(self, key: Hashable) -> None:
        """The key is the one that was used last."""
        if key in self._place:
            self.remove(key)
        if self._next == len(self._tree):
            self._renumber()
        place, tree = self._next, self._tree
        self._place[key] = place
        self._next += 1
        while place < len(tree):
            tree[place] += 1
            place += place & -place

    def above(self, key: Hashable) -> int:
        """Keys that were used after this one, which is there."""
        place, tree, count = self._place[key], self._tree, len(self._place)
        while place:
            count -= tree[place]
            place &= place - 1
        return count

    def remove(self, key: Hashable) -> None:
        place, tree = self._place.pop(key), self._tree
        while place < len(tree):
            tree[place] -= 1
            place += place & -place

    def pop_oldest(self) -> Hashable:
        key = next(iter(self._place))
        self.remove(key)
        return key

    def _renumber(self) -> None:
        """Half of the places are free afterwards, so it costs each use a constant."""
        count = len(self._place)
        size = SMALLEST
        while size < 2 * count:
            size *= 2
        self._place = {key: number for number, key in enumerate(self._place, 1)}
        self._tree = [min(place & -place, max(0, count - place + (place & -place))) for place in range(size + 1)]
        self._next = count + 1
