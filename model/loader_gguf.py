"""Reads the tensors of a GGUF file: dequantised, under Hugging Face's names, with q and k in Hugging Face's order."""

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kvrelay.errors import ModelError
from kvrelay.gguf_file import GGUFFile, TensorInfo
from kvrelay.kernels.grouped_weights import FROM_GGUF, GroupedWeights
from kvrelay.kernels.linear_packing import Form
from kvrelay.model.config import ModelConfig
from kvrelay.model.tensors import Shape

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_SUPPORTED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_FORMS = {"Q4_0": Form.INT4, "Q4_1": Form.INT4, "Q8_0": Form.INT8}
_READ_ALREADY = "rope_freqs.weight"  # by the configuration
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFTensors:
    """A TensorReader over a GGUF file. Raises ModelError for an unsupported quantisation or a truncated file."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.source = str(file.path)
        self._file = file
        self._infos = {_name(name): info for name, info in file.tensors.items() if name != _READ_ALREADY}
        # llama.cpp stores Llama's q and k rows so that rotary pairs are neighbours; other families keep the halves.
        interleaved = file.metadata.get("general.architecture") == "llama"
        self._heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if interleaved else {}
        self.names = self._infos.keys()

    def shape(self, name: str) -> Shape:
        return self._infos[name].shape

    def dtype(self, name: str) -> torch.dtype | None:
        return _DTYPES.get(self._type(self._infos[name]).name)

    def read(self, name: str) -> torch.Tensor:
        info = self._infos[name]
        values = dequantize(self._stored_rows(info), self._type(info))
        tensor = torch.from_numpy(values if values.flags.writeable else values.copy()).reshape(info.shape)
        return self._in_our_order(name, tensor)

    def form(self, name: str) -> Form | None:
        return _FORMS.get(self._type(self._infos[name]).name)

    def grouped(self, name: str) -> GroupedWeights:
        info = self._infos[name]
        rows = torch.from_numpy(self._stored_rows(info).copy())
        return FROM_GGUF[self._type(info).name](self._in_our_order(name, rows))

    def _in_our_order(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        heads = next((count for part, count in self._heads.items() if f".{part}." in name), None)
        return rows if heads is None else _halves_from_pairs(rows, heads)

    def _stored_rows(self, info: TensorInfo) -> np.ndarray:
        """The tensor's bytes as a matrix with one stored row per row."""
        values_per_group, bytes_per_group = GGML_QUANT_SIZES[self._type(info)]
        if not info.shape or info.shape[-1] % values_per_group:
            raise self._damaged(info, f"rows of {info.shape} values are not whole groups of {values_per_group}")
        row_bytes = info.shape[-1] // values_per_group * bytes_per_group
        num_rows = int(np.prod(info.shape[:-1], dtype=np.int64))
        if info.offset + num_rows * row_bytes > len(self._file.data):
            raise self._damaged(info, f"its data runs over the end of the file at byte {len(self._file.data)}")
        stored = np.frombuffer(self._file.data, np.uint8, num_rows * row_bytes, info.offset)
        return stored.reshape(num_rows, row_bytes)

    def _type(self, info: TensorInfo) -> GGMLQuantizationType:
        known = {kind.value: kind for kind in GGMLQuantizationType}
        kind = known.get(info.ggml_type)
        if kind is None or kind.name not in _SUPPORTED:
            raise ModelError(
                f"{self.source} stores {info.name} in the quantisation {kind.name if kind else info.ggml_type}, "
                f"but supported are {', '.join(_SUPPORTED)}; take the model in one of these."
            )
        return kind

    def _damaged(self, info: TensorInfo, what: str) -> ModelError:
        return ModelError(f"{self.source} is damaged or truncated: in tensor {info.name} {what}; get the file again.")


def _name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; its own if there is none, so that an error can show it."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name
    _, layer, part = stem.split(".", 2) if stem.count(".") >= 2 else ("", "", "")
    return f"model.layers.{layer}.{_NAMES[part]}.{kind}" if part in _NAMES else name


def _halves_from_pairs(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undoes llama.cpp's order of q and k rows: from neighbouring rotary pairs to first halves, then second halves."""
    rows_per_head = tensor.shape[0] // num_heads
    pairs = tensor.reshape(num_heads, rows_per_head // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
