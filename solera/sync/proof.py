"""Did the weights arrive? What the engine says it received is compared with what was sent; values are not compared."""

from solera.errors import SoleraError
from solera.records import Manifest


def check(sent: Manifest, held: Manifest) -> None:
    """Stop where lineage, version, or any tensor's name, shape or dtype differs from what was sent."""
    place = f"sync of version {sent.version}"
    if held.lineage != sent.lineage:
        raise SoleraError(f"{place}: the engine holds weights of another run ({held.lineage}, sent {sent.lineage})")
    if held.version != sent.version:
        raise SoleraError(f"{place}: the engine still holds version {held.version}")
    arrived = {spec.name: spec for spec in held.tensors}
    for spec in sent.tensors:
        if spec.name not in arrived:
            raise SoleraError(f"{place}: tensor {spec.name} did not arrive")
        if arrived[spec.name] != spec:
            raise SoleraError(f"{place}: tensor {spec.name} arrived as {arrived[spec.name]}, sent {spec}")
    if len(arrived) > len(sent.tensors):
        extra = sorted(arrived.keys() - {spec.name for spec in sent.tensors})
        raise SoleraError(f"{place}: the engine holds tensors that were not sent: {', '.join(extra[:3])}")
