"""Free places in the part of the cache that holds prompts."""

from bisect import insort


class FreePlaces:
    """Stretches of the cache that hold no prompt. The first that is long enough is taken."""

    def __init__(self, size: int) -> None:
        self.free = [(0, size)]

    def hold(self, lengths: list[int]) -> bool:
        """Whether stretches of these lengths could all be taken."""
        trial = FreePlaces(0)
        trial.free = list(self.free)
        return all(trial._find(length) is not None and trial.take(length) >= 0 for length in lengths)

    def take(self, length: int) -> int:
        number = self._find(length)
        assert number is not None, "asked without looking for room"
        start, size = self.free[number]
        self.free[number] = (start + length, size - length)
        return start

    def give(self, start: int, length: int) -> None:
        insort(self.free, (start, length))
        merged = list[tuple[int, int]]()
        for begin, size in self.free:
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((begin, size))
        self.free = merged

    def _find(self, length: int) -> int | None:
        return next((number for number, (_, size) in enumerate(self.free) if size >= length), None)
