"""What a network looks like: the one description that both checkpoint formats are read into. Free of torch."""

from dataclasses import dataclass

from kvrelay.errors import ModelError
from kvrelay.types import KVLayout

_COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family: pre-norm, grouped-query attention with rotary positions, gated SiLU MLP.

    Raises ModelError if the numbers cannot belong together.
    """

    architecture: str  # e.g. LlamaForCausalLM
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # tokens of prompt and completion together
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_divisors: tuple[float, ...] = ()  # head_dim / 2 divisors of the rotary frequencies; empty means all 1
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name in (*_COUNTS, "max_model_len"):
            if getattr(self, name) < 1:
                raise self._impossible(f"{name} is {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise self._impossible(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise self._impossible(f"head_dim {self.head_dim} is odd, and rotary positions need pairs")
        if len(self.rope_divisors) not in (0, self.head_dim // 2):
            raise self._impossible(f"{len(self.rope_divisors)} rope frequencies do not fit head_dim {self.head_dim}")

    def kv_layout(self, block_size: int, dtype: str) -> KVLayout:
        """The shape of this network's KV cache; `dtype` is bfloat16, float16, float32 or int8."""
        return KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
        )

    def _impossible(self, what: str) -> ModelError:
        return ModelError(f"The configuration of this {self.architecture} cannot work: {what}; get the model again.")
