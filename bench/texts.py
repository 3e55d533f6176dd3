"""English text by the token."""

from __future__ import annotations

from pathlib import Path

from anaphora import Model
from anaphora.bundled import load_test_document


class Texts:
    """Prompts for one model, measured in its tokens. The model is loaded only to make this."""

    def __init__(self, model: Path) -> None:
        with Model.load(model, cache_dir=None, context_size=64, parallel=1) as loaded:
            vocabulary = loaded.vocabulary
            tokens = vocabulary.encode(load_test_document())
            self._pieces = [vocabulary.piece(token) for token in tokens]
            self.no_end = {str(token): -100.0 for token in vocabulary.end_of_generation}
            """A ``logit_bias`` that keeps answers from ending early."""

    def document(self, tokens: int, salt: str) -> str:
        """About ``tokens`` tokens behind ``salt``, which no other text should open with."""
        return f"{salt} {b''.join(self._pieces[:tokens]).decode(errors='ignore')}"
