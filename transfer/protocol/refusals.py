"""What a sender says of a hand-over that nobody took, or that was not taken in time."""

from kvrelay.errors import ContextLengthExceeded, HandOverFailed, NoWorkers, Overloaded, WorkerLost
from kvrelay.messages import KVGrant, RefusalReason
from kvrelay.transfer.protocol.handover import Handover, Phase


def fault_of_refusals(handover: Handover) -> tuple[str, str]:
    """Code and sentence when no candidate is left."""
    sentences = " ".join(sentence for _, sentence in handover.refusals)
    return _code_for([reason for reason, _ in handover.refusals]), f"No decode worker took the request: {sentences}"


def fault_of_deadline(handover: Handover, lease_s: float) -> tuple[str, str]:
    """Code and sentence when the lease of `lease_s` seconds has passed without a commit."""
    if handover.phase is Phase.OFFERED:
        return Overloaded.code, f"No decode worker took the request within {lease_s:g} s; try again later."
    return HandOverFailed.code, (
        f"The KV did not reach {handover.peer.name} within the lease of {lease_s:g} s; if the prompt needs "
        "longer than that, raise --lease-s."
    )


def fault_of_grant(handover: Handover, grant: KVGrant) -> str:
    """Why a grant cannot be meant for this prompt, or nothing."""
    if len(grant.block_ids) == handover.num_blocks and grant.held_blocks <= handover.num_blocks:
        return ""
    return (
        f"{handover.peer.name} granted {len(grant.block_ids)} blocks, {grant.held_blocks} of them held, for a "
        f"prompt of {handover.num_blocks}."
    )


def _code_for(reasons: list[RefusalReason | None]) -> str:
    """One code for many refusals: what the client can do something about comes first."""
    if RefusalReason.QUEUE_FULL in reasons:
        return Overloaded.code
    if None in reasons:
        return WorkerLost.code
    if all(reason is RefusalReason.NEVER_FITS for reason in reasons):
        return ContextLengthExceeded.code
    return NoWorkers.code
