"""The OpenAPI document, and requests that schemathesis makes of it: valid ones and broken ones.

Its checks hold answers and errors to the document (status, content type, shape), and want what the
document calls wrong to be refused. Two are off:

- ``positive_data_acceptance``: a request that fits the document may be refused for what it means (a
  prompt that doesn't fit the context, a last message that calls a tool), which no schema can tell.
  It must not be refused for its form: ``document_checks`` looks for that.
- ``allow_header_conformance``: for ``/v1/models/load``, which may be the name of a model, too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anaphora.api.endpoint import Options
from anaphora.api.serving import Serving
from tests.api import document_checks
from tests.api.conftest import Server, roster
from tests.api.document_checks import KINDS
from tests.conftest import SOAK

OFF = ("positive_data_acceptance", "allow_header_conformance")


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Server]:
    """With a small context, since an answer without a limit may fill it."""
    server = Server(Serving(roster([tiny_llama], context_size=128)), Options())
    server.start()
    yield server
    server.stop()


def test_requests_from_the_document(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = [str(Path(sys.executable).with_name("schemathesis")), "--no-color", "run"]
    command += [f"{server.url}/openapi.json", "--exclude-checks", ",".join(OFF)]
    command += ["--phases", "coverage,fuzzing", "--generation-deterministic"]
    command += ["--max-examples", "200" if SOAK else "10"]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "SCHEMATHESIS_HOOKS": document_checks.__name__,
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Tested: 14" in done.stdout
    assert "refused a cached block" not in caplog.text, "there was no room for what was promised"


def test_the_document_describes_every_route(server: Server) -> None:
    response = server.http().get("/openapi.json")
    document = response.json()
    assert document["openapi"].startswith("3.")
    schemas = document["components"]["schemas"]
    for path in KINDS:
        operation = document["paths"][path]["post"]
        content = operation["requestBody"]["content"]["application/json"]
        name = content["schema"]["$ref"].removeprefix("#/components/schemas/")
        assert {"messages", "prompt", "input"} & set(schemas[name]["properties"])
        answer = operation["responses"]["200"]["content"]
        name = answer["application/json"]["schema"]["$ref"].removeprefix("#/components/schemas/")
        assert schemas[name]["required"]
        assert ("text/event-stream" in answer) == ("stream" in KINDS[path].model_fields)
        error = "AnthropicError" if path.startswith("/v1/messages") else "OpenAIError"
        for status in ("400", "401", "413", "default"):
            content = operation["responses"][status]["content"]["application/json"]
            assert content["schema"] == {"$ref": f"#/components/schemas/{error}"}
    references = set(re.findall(r'"#/components/schemas/(\w+)"', response.text))
    assert references <= set(schemas)
    assert {"/v1/models", "/health", "/metrics"} <= set(document["paths"])
    operations: list[Any] = [
        operation for path in document["paths"].values() for operation in path.values()
    ]
    assert all("default" in operation["responses"] for operation in operations)
    assert not any("422" in operation["responses"] for operation in operations)
