"""Anaphora: prompt caching for models you run yourself."""

from anaphora.cache.keys import Segment
from anaphora.engine.protocol import GREEDY, CacheHints, Found, Grammar, Sampling, Times
from anaphora.errors import AnaphoraError
from anaphora.model import Chat, Model, Reply, Stream, Usage
from anaphora.settings import Adapter, Settings

__version__ = "0.1.0"

__all__ = [
    "GREEDY",
    "Adapter",
    "AnaphoraError",
    "CacheHints",
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
    "Usage",
]
