"""Remembers the latest prompts of each tenant, as long as there is room."""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile
from threading import Lock

from anaphora.diagnose.explain import Explanation, explain
from anaphora.diagnose.prompts import Remembered
from anaphora.keys import Tenant
from anaphora.vocabulary import Vocabulary

_Owner = tuple[str, bytes, str]
"""Name and salt, since who has another salt is somebody else, whatever the name; and the model,
since the tokens of another one are others."""


class PromptMemory:
    """Prompts of the latest requests, kept apart by tenant. Safe to use from several threads.

    To remember costs no copy. When there are too many bytes, the tenant that has most of them
    loses its oldest prompts.

    :param max_bytes: of all prompts together; 0: nothing is remembered.
    :param max_requests: of each tenant and model.
    """

    def __init__(self, *, max_bytes: int = 64 << 20, max_requests: int = 256) -> None:
        self._max_bytes = max_bytes
        self._max_requests = max_requests
        self._prompts: dict[_Owner, OrderedDict[str, Remembered]] = {}
        self._bytes: dict[_Owner, int] = {}
        self._lock = Lock()

    def remember(self, tenant: Tenant, model: str, prompt: Remembered) -> None:
        """Keep ``prompt`` as the latest one of ``tenant`` for ``model``.

        Its arrays must not change any more.
        """
        if not self._max_bytes:
            return
        owner = (tenant.name, tenant.salt, model)
        with self._lock:
            if prompt.request_id in self._prompts.get(owner, ()):
                self._forget(owner, prompt.request_id)
            prompts = self._prompts.setdefault(owner, OrderedDict())
            prompts[prompt.request_id] = prompt
            self._bytes[owner] = self._bytes.get(owner, 0) + _size(prompt)
            if len(prompts) > self._max_requests:
                self._forget(owner, next(iter(prompts)))
            while sum(self._bytes.values()) > self._max_bytes:
                most = max(self._bytes, key=self._bytes.__getitem__)
                self._forget(most, next(iter(self._prompts[most])))

    def explain(
        self, tenant: Tenant, model: str, request_id: str, vocabulary: Vocabulary
    ) -> Explanation | None:
        """Why a request of ``tenant`` to ``model`` read no more than it did.

        ``None`` where it isn't remembered, or is somebody else's.
        """
        with self._lock:
            prompts = list(self._prompts.get((tenant.name, tenant.salt, model), {}).values())
        earlier = list(takewhile(lambda one: one.request_id != request_id, prompts))
        prompt = prompts[len(earlier)] if len(earlier) < len(prompts) else None
        return None if prompt is None else explain(prompt, earlier, vocabulary)

    def _forget(self, owner: _Owner, request_id: str) -> None:
        self._bytes[owner] -= _size(self._prompts[owner].pop(request_id))
        if not self._prompts[owner]:
            del self._prompts[owner], self._bytes[owner]


def _size(prompt: Remembered) -> int:
    """Bytes a prompt takes, about."""
    return int(prompt.tokens.nbytes) + 256 * (4 + len(prompt.spans))
