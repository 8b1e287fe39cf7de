"""Texts of exceptions that explain something even if the exception does not."""

from __future__ import annotations

import pytest

from orchestrator.common.text import failure_reason
from tasks.spec.messages import error_text, typed_error_text


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def failed_assertion() -> BaseException:
    tokens = 9
    try:
        assert tokens <= 8
    except AssertionError as caught:
        caught.args = ()  # pytest rewrites assertions, and adds a text
        return caught
    return ValueError()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("n_head"), "KeyError: 'n_head' (test_messages.py:"),
        (KeyError("three or more words"), "KeyError: 'three or more words' (test_messages.py:"),
        (SystemExit(0), "SystemExit: 0 (test_messages.py:"),
        (StopIteration(), "StopIteration: raise error (test_messages.py:"),
        (NotImplementedError(), "NotImplementedError: raise error (test_messages.py:"),
        (ValueError(" \n"), "ValueError: raise error (test_messages.py:"),
    ],
)
def test_an_error_without_a_sentence_has_its_type_and_place(
    error: BaseException, text: str
) -> None:
    assert error_text(raised(error)).startswith(text)
    assert typed_error_text(raised(error)).startswith(text)


def test_a_bare_assertion_shows_its_line() -> None:
    text = error_text(failed_assertion())
    assert text.startswith("AssertionError: assert tokens <= 8 (test_messages.py:")


def test_a_sentence_stays_as_it_is_and_has_a_type_on_request() -> None:
    error = raised(ValueError("the width is odd"))
    assert error_text(error) == "the width is odd"
    assert typed_error_text(error) == "ValueError: the width is odd"


def test_an_error_that_was_never_raised_has_no_place() -> None:
    assert error_text(EOFError()) == "EOFError"


def test_the_reason_of_an_old_row_without_message_is_the_exception() -> None:
    assert failure_reason({"message": "", "exception": "AssertionError"}) == "AssertionError"
    assert failure_reason({"message": "\nthe second line"}) == "the second line"
