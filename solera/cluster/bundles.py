"""Where the ranks run in a Ray cluster: one in each bundle of a placement group, if wanted with an engine beside it."""

from contextlib import suppress
from typing import Any, NamedTuple

from solera.errors import SoleraError, counted


class Beside(NamedTuple):
    """Engines that belong beside ranks, on the same GPUs."""

    engines: int
    gpus: float
    """What each engine gets."""


class Bundles:
    """`count` bundles, each with room for a rank. They are removed when ranks and engines have left them: Ray ends
    whoever is in them then."""

    def __init__(self, ray: Any, count: int, gpus: float, beside: Beside | None, patience: float) -> None:
        """Every bundle has a share of a GPU for an engine if one has. Otherwise two ranks without an engine could come
        to share a GPU, and would talk over gloo."""
        self._ray, self._users = ray, 1
        self._engines = min(count, beside.engines) if beside else 0
        share = round(gpus + (beside.gpus if beside else 0.0), 4)  # Ray counts in ten-thousandths
        needed = [
            {"CPU": 2.0 if number < self._engines else 1.0} | ({"GPU": share} if share else {})
            for number in range(count)
        ]
        self._group = ray.util.placement_group(needed, strategy="PACK")
        if not self._group.wait(patience):
            self.leave()  # it would still be made when there is room
            found = ray.cluster_resources()
            has = " and ".join(counted(int(found.get(kind, 0)), kind) for kind in needed[0])
            each = f"one CPU{f' and {gpus:g} GPU' if gpus else ''} each"
            with_engines = f", with room for an engine of {beside.gpus:g} GPU beside each" if beside else ""
            raise SoleraError(
                f"cluster.learners is {count}, but the Ray cluster has {has} and no room for that many ranks of {each}"
                f"{with_engines} (waited {patience:g} s): lower it, or add machines"
            )

    def for_rank(self, number: int) -> Any:
        """A scheduling strategy of Ray."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)

    def for_engine(self, number: int) -> Any:
        """Beside the rank of this number. Without one, anywhere, on another machine than the last one if possible."""
        return self.for_rank(number) if number < self._engines else "SPREAD"

    def join(self) -> None:
        self._users += 1

    def leave(self) -> None:
        self._users -= 1
        if not self._users:
            with suppress(self._ray.exceptions.RayError):  # Ray may have died
                self._ray.util.remove_placement_group(self._group)
