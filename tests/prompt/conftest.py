from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from anaphora import bundled
from anaphora.prompt.tokens import Renderer
from tests.prompt.families import FAMILIES, Loaded, write_vocabulary


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Loaded]]:
    """A vocabulary with its template for each family, and the bundled model's own."""
    folder = tmp_path_factory.mktemp("vocabularies")
    loaded = {
        name: Loaded(write_vocabulary(folder / f"{name}.gguf", name, spec), spec.template)
        for name, spec in FAMILIES.items()
    }
    loaded["bundled"] = Loaded(bundled.source_path())
    yield loaded
    for one in loaded.values():
        one.close()


@pytest.fixture(params=[*FAMILIES, "bundled"])
def family(request: pytest.FixtureRequest, families: Mapping[str, Loaded]) -> Loaded:
    return families[request.param]


@pytest.fixture
def renderer(family: Loaded) -> Renderer:
    return Renderer(family.vocabulary, family.template)


@pytest.fixture
def smol(families: Mapping[str, Loaded]) -> Loaded:
    """The bundled model's vocabulary and template."""
    return families["bundled"]
