"""What schemathesis checks beside its own checks; it loads this file itself."""

from __future__ import annotations

import json
from typing import Any

import schemathesis
from pydantic import ValidationError

from anaphora.prompt.conversation import plain
from tests.api.test_odd_values import REQUESTS

KINDS = {path: kind for path, kind, _ in REQUESTS}


@schemathesis.check
def a_valid_form_is_taken(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case[Any]
) -> None:
    """What fits the document is not refused for its form."""
    positive = case.meta is not None and case.meta.generation.mode.is_positive
    if positive and case.method == "POST" and case.path in KINDS:
        body = json.loads(response.request.body or "")
        try:
            KINDS[case.path].model_validate(plain(body))
        except ValidationError as error:
            raise AssertionError(f"{body} is refused: {error}") from error
