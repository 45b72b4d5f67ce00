"""What a receiver of KV can take at all. What it can take now is a matter of waiting, not of refusing."""

from dataclasses import dataclass

from kvrelay.messages import KVOffer, RefusalReason
from kvrelay.types import KVLayout

Refusal = tuple[RefusalReason, str]


@dataclass(frozen=True, slots=True)
class Admission:
    """The limits of one receiver. `num_blocks` are all it has, `max_lease_s` the longest lease it grants."""

    layout: KVLayout
    fingerprint: str
    num_blocks: int
    max_model_len: int
    max_lease_s: float

    def objection(self, offer: KVOffer) -> Refusal | None:
        """Why the offer can never be taken, as a reason and a sentence, or None."""
        return self._incompatible(offer) or self._never_fits(offer)

    def _incompatible(self, offer: KVOffer) -> Refusal | None:
        sentence = ""
        if offer.fingerprint != self.fingerprint:
            sentence = f"The sender serves model {offer.fingerprint} and the receiver {self.fingerprint}."
        elif fault := self.layout.why_not_from(offer.layout):
            sentence = fault
        elif offer.num_samples != 1:
            sentence = f"A hand-over carries one sample, not {offer.num_samples}: n > 1 is not supported yet."
        elif offer.lease_s > self.max_lease_s:
            sentence = (
                f"The sender asks for a lease of {offer.lease_s} s, the receiver grants at most {self.max_lease_s} s; "
                "give both the same --lease-s."
            )
        return (RefusalReason.INCOMPATIBLE, sentence) if sentence else None

    def _never_fits(self, offer: KVOffer) -> Refusal | None:
        num_tokens = len(offer.prompt_token_ids)
        needed = self.layout.num_blocks(num_tokens + 1)  # the first token's KV needs a place too
        sentence = ""
        if num_tokens > self.max_model_len:
            sentence = f"The prompt has {num_tokens} tokens, the context only {self.max_model_len}."
        elif needed > self.num_blocks:
            sentence = f"The prompt needs {needed} blocks of KV and the receiver has {self.num_blocks} in all."
        return (RefusalReason.NEVER_FITS, sentence) if sentence else None
