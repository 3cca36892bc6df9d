"""Requests as a model sees them: what a tokenizer's template may do to one row."""

from __future__ import annotations

import pytest

from moegen.graph.requests import Request
from moegen.jobs.encoded import Unservable, encode


@pytest.mark.parametrize(
    "fault", [TypeError("can only concatenate"), ZeroDivisionError(), RecursionError()]
)
def test_a_template_that_fails_in_any_way_is_an_error_of_the_row(fault):
    class Tokenizer:
        chat_template = "{{ 1 + 'a' }}"

        def apply_chat_template(self, *_, **__):
            raise fault

    request = Request("a", messages=({"role": "user", "content": "Hi"},))
    with pytest.raises(Unservable, match="the chat template refuses these messages: ."):
        encode(Tokenizer(), request)
