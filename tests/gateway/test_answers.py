"""The JSON that clients get."""

import pytest

from kvrelay.gateway.answers import to_json


def test_json_is_compact_and_not_escaped() -> None:
    assert to_json({"text": "ü", "ids": [1, 2]}) == '{"text":"ü","ids":[1,2]}'.encode()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_without_a_word_in_json_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        to_json({"logprob": number})
