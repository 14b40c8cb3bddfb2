"""Sends weights to one server, through Solera's plugin inside it (`worker.py`)."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from solera.engines.faults import TakenError
from solera.engines.member import REMEMBERED
from solera.engines.vllm.http import Http, ServerError
from solera.engines.vllm.transport import Transport
from solera.engines.vllm.versions import Release
from solera.errors import SoleraError
from solera.models.digest import describe, digest_of
from solera.models.merging import Base
from solera.protocols import Weights
from solera.records import Manifest, TensorSpec
from solera.sync.proof import SyncFaultError

LABEL = "solera"
"""How the labels of our weights begin."""


@dataclass(frozen=True)
class Offer:
    """Weights that the server may fetch."""

    label: str
    version: int
    info: dict[str, Any]
    """What the server is told about them (`worker.Update`)."""
    digesting: float
    """Seconds that their digests took."""
    known: bool
    """Whether they were sent before. The server may hold them, however this update ends."""


class Updates:
    """`base` returns the frozen weights of a model with adapters. The server gets them once. After that, an update has
    only the adapters, and the server adds them to the base."""

    def __init__(
        self, http: Http, release: Release, transport: Transport, base: Callable[[], Base] | None = None
    ) -> None:
        self.http = http
        self.release = release
        self.transport = transport
        self.base = base
        self.labels: dict[str, tuple[str, int]] = {}
        """Lineage and version of the weights that were sent last, by label."""
        self.finished: str | None = None
        """The label of the last weights that the server took, and with which it labels its tokens; `None` if it holds
        something unknown."""
        self._lineage = ""
        self._met = False

    def offer(self, weights: Weights) -> Offer:
        """Prepare an update. Nothing that the server holds changes."""
        self._lineage = weights.lineage
        named, start = dict(weights.tensors), time.perf_counter()
        specs = describe(named.items())
        digesting = time.perf_counter() - start
        label = f"{LABEL}/{weights.lineage}/{weights.version}/{digest_of(specs)}"
        belongs = self._send_base(weights.version) if self.base is not None else {}
        info = self._info(label, self.transport.offer(label, named), specs) | belongs
        known = label in self.labels
        self.labels[label] = (weights.lineage, weights.version)  # tokens may come before the update returns
        for earlier in list(self.labels)[:-REMEMBERED]:
            del self.labels[earlier]
        return Offer(label, weights.version, info, digesting, known)

    def apply(self, offer: Offer) -> Manifest:
        """Let the server load what was offered. Returns what it holds then. If it refuses the weights, the old ones go
        on serving and a `SyncFaultError` says why."""
        try:
            self._meet()
            self._start()
            self._pass_on("/update_weights", {"update_info": offer.info})
            held, label = self._manifest()
            applied = label == offer.label
            # Tokens get the label that this call brings. They must not get that of weights which are not there.
            self.http.post("/finish_weight_update", self.release.finish(offer.label) if applied else None)
        except SoleraError as error:
            self._withdraw(offer)
            raise self._refused(offer.version, error) from error
        self.finished = label if applied or label == self.finished else None
        if applied:
            self.transport.keep()
        else:
            self._withdraw(offer)
        return held

    def untouched(self) -> bool:
        """After an update that failed: whether the server still holds the weights with which it labels its tokens, as
        far as it says."""
        try:
            held = self.ask_workers("solera_held")
        except SoleraError:
            return False
        if self.foreign(held["label"]):  # nothing of ours is there, and nothing of it is used
            return True
        return held["refused"] is not None if self.finished is None else held["label"] == self.finished

    def _withdraw(self, offer: Offer) -> None:
        self.transport.drop()
        if not offer.known:
            del self.labels[offer.label]

    def _info(self, label: str, source: dict[str, Any], specs: tuple[TensorSpec, ...]) -> dict[str, Any]:
        tensors = [[spec.name, list(spec.shape), spec.dtype, spec.digest] for spec in specs]
        return {"label": label, "transport": self.transport.name, "source": source, "tensors": tensors}

    def _pass_on(self, path: str, body: dict[str, Any]) -> Any:
        """Make a call during which the server fetches what the transport offers."""
        with ThreadPoolExecutor(1) as pool:
            fetched = pool.submit(self.http.post, path, body)
            self.transport.send()
            return fetched.result()

    # -- the base of adapters ------------------------------------------------------------------------------------

    @cached_property
    def _base_facts(self) -> tuple[str, dict[str, float]]:
        """Digest and scale of the base, which never changes."""
        assert self.base is not None
        base = self.base()
        return digest_of(describe(base.tensors.items())), dict(base.scale)

    def _send_base(self, version: int) -> dict[str, Any]:
        """Send the base unless the server has it. Returns what an update says about it."""
        digest, scale = self._base_facts
        if self.ask_workers("solera_held")["base"] != digest:
            assert self.base is not None
            named = dict(self.base().tensors)
            self._meet()
            label = f"base-{digest}"
            info = self._info(label, self.transport.offer(label, named), describe(named.items()))
            try:
                said = self._pass_on("/collective_rpc", {"method": "solera_keep_base", "args": [json.dumps(info)]})
            finally:
                self.transport.drop()
            if refused := [why for why in said["results"] if why is not None]:
                raise SyncFaultError(
                    f"sync of version {version}: vLLM server {self.http.url} refused the weights that the adapters "
                    f"belong to ({refused[0]})"
                )
        return {"base": digest, "scale": scale}

    # -- calls ---------------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Once, with a transport that needs it: bring the server's workers and this process together."""
        if self._met:
            return
        place = self.transport.meeting(self.http.get("/get_world_size")["world_size"])
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(self.http.post, "/init_weight_transfer_engine", {"init_info": {"meeting": place}})
            self.transport.meet()
            told.result()
        self._met = True

    def _start(self) -> None:
        try:
            self.http.post("/start_weight_update", self.release.start())
        except ServerError:  # a trainer that was killed may have left an update open; ours change nothing before theirs
            self.http.post("/finish_weight_update")
            self.http.post("/start_weight_update", self.release.start())

    def _refused(self, version: int, error: SoleraError) -> SoleraError:
        """Why an update failed: the server refused it, another run disturbed it, or a call failed."""
        held = self.ask_workers("solera_held")
        if self.foreign(held["label"]):
            return self.taken(held["label"])
        if held["refused"] is None:
            return ServerError(f"{error} (during the sync of version {version})")
        return SyncFaultError(
            f"sync of version {version}: vLLM server {self.http.url} refused the weights and keeps the old ones "
            f"({held['refused']})"
        )

    def _manifest(self) -> tuple[Manifest, str | None]:
        """What the server says it holds, with the digests that its workers computed, and the label of it."""
        held = self.ask_workers("solera_held")
        if self.foreign(held["label"]):
            raise self.taken(held["label"])
        lineage, version = self.labels.get(held["label"], (held["label"] or "", -1))
        specs = (TensorSpec(name, tuple(shape), dtype, digest) for name, shape, dtype, digest in held["tensors"])
        return Manifest(lineage, version, tuple(specs)), held["label"]

    def ask_workers(self, method: str) -> dict[str, Any]:
        """Ask all workers of the server. They must agree."""
        results = self.http.post("/collective_rpc", {"method": method})["results"]
        if any(result != results[0] for result in results):
            raise SyncFaultError(f"the workers of vLLM server {self.http.url} hold different weights")
        return results[0]

    def foreign(self, label: object) -> bool:
        """Whether a run that is not this one gave weights this label. An update of this run may arrive after it was
        given up, or after a new connection."""
        ours = label in self.labels or (self._lineage and lineage_of(label) == self._lineage)
        return is_label(label) and not ours

    def taken(self, label: str) -> TakenError:
        return TakenError(
            f"vLLM server {self.http.url} holds weights that this run did not send ({label!r}): another run uses it; "
            "give each run a server of its own"
        )


def is_label(label: object) -> bool:
    """Whether a run of Solera gave weights this label.

    >>> is_label("solera/run/7/c0ffee"), is_label("default"), is_label(None)
    (True, False, False)
    """
    return isinstance(label, str) and label.startswith(f"{LABEL}/")


def lineage_of(label: object) -> str:
    """The lineage in a label of ours, or nothing.

    >>> lineage_of("solera/run/7/c0ffee"), lineage_of("default")
    ('run', '')
    """
    return str(label).split("/")[1] if is_label(label) else ""
