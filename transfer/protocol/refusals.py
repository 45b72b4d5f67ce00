"""What a sender says of a hand-over that nobody took, or that was not taken in time."""

from kvrelay.errors import ContextLengthExceeded, HandOverFailed, NoWorkers, Overloaded, WorkerLost
from kvrelay.messages import KVGrant, RefusalReason
from kvrelay.transfer.protocol.handover import Handover, Phase
from kvrelay.types import KVLayout


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


def fault_of_grant(handover: Handover, grant: KVGrant, layout: KVLayout) -> str:
    """Why a grant cannot be meant for this prompt, whose blocks are of `layout` here; empty if it can."""
    theirs = layout.model_copy(update={"block_size": grant.block_size})
    num_tokens = handover.sequence.num_prompt_tokens
    fits = len(grant.block_ids) == theirs.num_blocks(num_tokens) and grant.held_blocks <= len(grant.block_ids)
    if fits and not theirs.why_not_from(layout) and grant.held_blocks * grant.block_size % layout.block_size == 0:
        return ""
    return (
        f"{handover.peer.name} granted {len(grant.block_ids)} blocks of {grant.block_size} tokens, "
        f"{grant.held_blocks} of them held, for a prompt of {num_tokens} in blocks of {layout.block_size}."
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
