"""What decoding and prefill must at least read and multiply, to be compared with what a GPU can: numbers alone."""

from dataclasses import dataclass

BF16_BYTES = 2
FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Decoder:
    """The numbers of a Llama model of bfloat16 with tied embeddings."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the weights of a layer."""
        return {
            "qkv": ((self.num_heads + 2 * self.num_kv_heads) * self.head_dim, self.hidden),
            "output": (self.hidden, self.num_heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    @property
    def kv_values(self) -> int:
        """Keys and values of a token in a layer."""
        return 2 * self.num_kv_heads * self.head_dim


LLAMA_1B = Decoder(16, 2048, 32, 8, 64, 8192, 128256)
LLAMA_8B = Decoder(32, 4096, 32, 8, 128, 14336, 128256)


def decode_attention_bytes(decoder: Decoder, batch: int, context: int, *, quantised: bool = False) -> int:
    """Keys and values of one layer, read once, with a scale for each head of a token if they are int8; q and result."""
    per_head = decoder.head_dim + FP32_BYTES if quantised else decoder.head_dim * BF16_BYTES
    rows = 2 * batch * decoder.num_heads * decoder.head_dim * BF16_BYTES
    return batch * context * 2 * decoder.num_kv_heads * per_head + rows


def prefill_attention_operations(decoder: Decoder, num_tokens: int) -> int:
    """Multiplications and additions of one causal layer over a prompt without a cached prefix."""
    seen = num_tokens * (num_tokens + 1) // 2
    return 4 * decoder.num_heads * decoder.head_dim * seen


def matmul_bytes(num_rows: int, outputs: int, inputs: int, weight_bits: float = 16) -> int:
    """A weight, the rows and the results, each once."""
    return int(outputs * inputs * weight_bits / 8) + num_rows * (outputs + inputs) * BF16_BYTES


def matmul_operations(num_rows: int, outputs: int, inputs: int) -> int:
    """Multiplications and additions."""
    return 2 * num_rows * outputs * inputs


def step_bytes(decoder: Decoder, batch: int, context: int) -> int:
    """What one decode step must read: every weight once, and every sequence's keys and values."""
    weights = decoder.num_layers * sum(outputs * inputs for outputs, inputs in decoder.projections.values())
    weights += decoder.vocab * decoder.hidden
    return (weights + decoder.num_layers * batch * context * decoder.kv_values) * BF16_BYTES


def share(amount: float, seconds: float, rate: float) -> float:
    """Per cent of `rate`, in units per second, that `amount` units in `seconds` make."""
    return 100 * amount / seconds / rate
