"""The sentence for a failed turn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codex_workspace.common.values import JsonObject
from codex_workspace.protocol.codex_events import MAX_QUOTED_CHARS, TurnError, describe_failure, error_metadata

RAW = "unexpected status {0}: Incorrect API key sk-raw, url: https://gateway.internal/v1/responses, request id: r-1"


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (TurnError(RAW.format("401 Unauthorized"), "other", None, None), "rejected the credential (HTTP 401)"),
        (TurnError("x", "httpConnectionFailed", 401, None), "rejected the credential (HTTP 401)"),
        (TurnError("x", "httpConnectionFailed", 402, None), "payment"),
        (TurnError("x", "httpConnectionFailed", 403, None), "credential's rights"),
        (TurnError(RAW.format("404 Not Found"), "other", None, None), "does not know the model or the URL"),
        (TurnError("x", "modelNotFound", None, None), "does not know the model"),
        (TurnError("x", "responseTooManyFailedAttempts", 429, None), "rate limit is reached (HTTP 429)"),
        (TurnError("x", "rateLimitExceeded", None, None), "rate limit is reached"),
        (TurnError("x", "usageLimitExceeded", 429, None), "usage limit is reached"),
        (TurnError("x", "internalServerError", None, None), "internal error (HTTP 500)"),
        (TurnError("x", "serverOverloaded", 503, None), "overloaded"),
        (TurnError("x", "contextWindowExceeded", None, None), "start a new context"),
        (TurnError("x", "httpConnectionFailed", 502, None), "had an error (HTTP 502); try again later"),
        (TurnError("unexpected status 503 Service Unavailable", "other", None, None), "(HTTP 503)"),
        (TurnError("The turn was silent for 300 s.", "watchdogTimeout", None, None), "silent for 300 s"),
        (TurnError("Missing environment variable: `X`.", "other", None, None), "Missing environment variable: `X`."),
    ],
)
def test_a_known_failure_has_its_own_message(failure: TurnError, said: str) -> None:
    sentence = describe_failure(failure)
    assert said in sentence
    assert "sk-raw" not in sentence
    assert "gateway" not in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (TurnError("x", "httpConnectionFailed", 401, None), {"code": "unauthorized", "httpStatus": 401}),
        (TurnError("x", "responseStreamConnectionFailed", 401, None), {"code": "unauthorized", "httpStatus": 401}),
        (TurnError(RAW.format("401 Unauthorized"), "other", None, None), {"code": "unauthorized", "httpStatus": 401}),
        (TurnError("x", "unauthorized", None, None), {"code": "unauthorized"}),
        (TurnError("x", "httpConnectionFailed", 403, None), {"code": "httpConnectionFailed", "httpStatus": 403}),
        (TurnError("x", "serverOverloaded", 503, None), {"code": "serverOverloaded", "httpStatus": 503}),
        (TurnError("It was silent.", "watchdogTimeout", None, None), {"code": "watchdogTimeout"}),
    ],
)
def test_a_failure_has_a_code_and_a_status(failure: TurnError, told: JsonObject) -> None:
    assert error_metadata(failure) == told


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:9/v1/responses",
        "https://user:pass@gateway.internal/v1?api_key=sk-secret",
        "wss://gateway.internal/v1/responses",
        "HTTPS://gateway.internal/",
        "(http://gateway.internal:8080/v1)",
    ],
)
def test_addresses_do_not_show(address: str) -> None:
    sentence = describe_failure(TurnError(f"error sending request for url {address}: refused", "other", None, None))
    assert "[address]" in sentence
    for part in ("gateway", "127.0.0.1", "sk-secret", "pass"):
        assert part not in sentence


@given(st.text(), st.text(), st.none() | st.integers(0, 999))
def test_any_failure_is_one_bounded_line(message: str, kind: str, status: int | None) -> None:
    sentence = describe_failure(TurnError(message, kind, status, None))
    assert len(sentence) < MAX_QUOTED_CHARS + 30
    assert "\n" not in sentence
    assert sentence.strip()
