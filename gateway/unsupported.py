"""Fields that users may know from OpenAI's API or from vLLM and that KVRelay does not act on yet.

A field set to its default asks for nothing and passes. Any other value is refused by name: an option that is dropped
in silence is worse than one that is missing. Fields that nobody knows are counted and ignored, as OpenAI does.
"""

from collections.abc import Collection, Mapping
from typing import Any

from kvrelay.errors import InvalidRequest

_BOTH: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "detokenize": (True,),
    "frequency_penalty": (0, 0.0),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "metadata": ({},),
    "min_tokens": (0,),
    "n": (1,),
    "presence_penalty": (0, 0.0),
    "priority": (0,),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "store": (False,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}

CHAT: Mapping[str, tuple[Any, ...]] = {
    **_BOTH,
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}

COMPLETION: Mapping[str, tuple[Any, ...]] = {
    **_BOTH,
    "echo": (False,),
    "prompt_embeds": (),
    "suffix": ("",),
}

MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}

STREAM_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "continuous_usage_stats": (False,),
    "include_obfuscation": (False, True),  # padding against eavesdroppers, on by default in OpenAI's own service
}


def refuse(given: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    """Raises InvalidRequest for the first field that is not supported and not at a default."""
    for name, value in given.items():
        if name in unsupported and not any(_same(value, default) for default in unsupported[name]):
            raise InvalidRequest(
                f"{prefix}{name} is not supported yet; leave it out of the request.", param=f"{prefix}{name}"
            )


def count_unknown(given: Mapping[str, Any], supported: Collection[str], unsupported: Collection[str]) -> int:
    """How many fields nobody knows."""
    return sum(name not in supported and name not in unsupported for name in given)


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and value == default
