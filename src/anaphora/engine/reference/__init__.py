"""The reference engine: a plain transformer in NumPy behind the engine protocol.

It is slow and easy to read: the story of how prompt caching works, as code, and the oracle for the
fast engines.
"""

from anaphora.engine.reference.engine import ReferenceEngine
from anaphora.engine.reference.loader import ReferenceModel, load

__all__ = ["ReferenceEngine", "ReferenceModel", "load"]
