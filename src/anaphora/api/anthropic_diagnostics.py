"""Anthropic's cache diagnostics: where a prompt parts from that of an earlier request.

Of requests that ask for it, hashes are remembered; no text. They are kept in memory, so many for
each tenant, and are gone after a restart.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from blake3 import blake3

from anaphora.api.anthropic_bodies import CountRequest
from anaphora.engine.protocol import Started
from anaphora.prompt.conversation import Message

_DIGEST = 16
_OVERHEAD = 512
"""Bytes of a fingerprint besides its messages, roughly."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the prompt of a request looked like, in hashes."""

    speed: str
    tools: bytes
    system: bytes
    settings: bytes
    """Of what else of the request matters for caching."""
    messages: bytes
    """16 bytes for each."""

    @classmethod
    def of(cls, body: CountRequest) -> Fingerprint:
        """Raises what :meth:`CountRequest.read` does."""
        reading = body.read()
        conversation, conditions = reading.conversation, asdict(reading.conditions)
        speed = conditions.pop("speed")
        first = 1 if body.system else 0
        system, messages = conversation.messages[:first], conversation.messages[first:]
        others = [[item.type, item.name] for item in body.tools or () if item.input_schema is None]
        return cls(
            speed,
            _digest([conversation.tools, others]),
            _digest(_plain(system)),
            _digest(conditions),
            b"".join(_digest(message) for message in _plain(messages)),
        )


@dataclass(frozen=True, slots=True)
class _Seen:
    """A request that was begun."""

    model: str
    fingerprint: Fingerprint
    cached: int
    """Tokens of its prompt that were cached from then on."""


class Diagnostics:
    """Remembers requests, and compares later ones with them."""

    def __init__(self, budget: int = 1 << 20) -> None:
        """``budget``: bytes kept of each tenant's requests; the oldest go first."""
        self._budget = budget
        self._seen: dict[str, OrderedDict[str, _Seen]] = {}

    def compare(
        self,
        tenant: str,
        message_id: str,
        model: str,
        fingerprint: Fingerprint,
        started: Started,
        previous_id: str | None,
    ) -> dict[str, Any] | None:
        """What a message says of its own request, which is remembered by ``message_id``.

        ``None`` where nothing differs from the request of ``previous_id``, or none is named.
        """
        cached = started.read_tokens + started.written_tokens
        now = _Seen(model, fingerprint, cached)
        seen = self._seen.setdefault(tenant, OrderedDict())
        previous = None if previous_id is None else seen.get(previous_id)
        self._remember(seen, message_id, now)
        if previous_id is None:
            return None
        if previous is None:
            return {"cache_miss_reason": {"type": "previous_message_not_found"}}
        changed = _changed(previous, now)
        if changed is None:
            return None
        reason: dict[str, Any] = {"type": changed}
        if changed != "unavailable":
            reason["cache_missed_input_tokens"] = max(0, previous.cached - started.read_tokens)
        return {"cache_miss_reason": reason}

    def _remember(self, seen: OrderedDict[str, _Seen], message_id: str, now: _Seen) -> None:
        seen[message_id] = now
        size = sum(_OVERHEAD + len(one.fingerprint.messages) for one in seen.values())
        while size > self._budget:
            _, gone = seen.popitem(last=False)
            size -= _OVERHEAD + len(gone.fingerprint.messages)


def _changed(before: _Seen, now: _Seen) -> str | None:
    """The first level at which ``now`` doesn't begin like ``before``."""
    one, other = before.fingerprint, now.fingerprint
    if (before.model, one.speed) != (now.model, other.speed):
        return "model_changed"
    if one.tools != other.tools:
        return "tools_changed"
    if one.system != other.system:
        return "system_changed"
    if one.settings != other.settings:
        return "unavailable"
    if not other.messages.startswith(one.messages):
        return "messages_changed"
    return None


def _plain(messages: Iterable[Message]) -> list[Any]:
    return [[message.role, message.text, message.fields] for message in messages]


def _digest(value: Any) -> bytes:
    """Of JSON; the order of keys counts, since it does in the prompt."""
    return blake3(json.dumps(value).encode()).digest(_DIGEST)
