"""Anaphora: prompt caching for models you run yourself."""

from anaphora.cache.keys import Segment
from anaphora.engine.protocol import (
    GREEDY,
    CacheHints,
    Candidate,
    Found,
    Grammar,
    Sampling,
    Times,
    TokenLogprob,
)
from anaphora.errors import AnaphoraError
from anaphora.model import Chat, Model, Reply, Stream, Usage
from anaphora.settings import Adapter, Settings

__version__ = "0.1.0"

__all__ = [
    "GREEDY",
    "Adapter",
    "AnaphoraError",
    "CacheHints",
    "Candidate",
    "Chat",
    "Found",
    "Grammar",
    "Model",
    "Reply",
    "Sampling",
    "Segment",
    "Settings",
    "Stream",
    "Times",
    "TokenLogprob",
    "Usage",
]
