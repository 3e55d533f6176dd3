"""API keys, and the tenants they speak for.

A key belongs to a tenant, and a tenant's salt keeps its cache content apart from everybody else's.
A tenant may join a namespace: the beginnings of its prompts then have the namespace's salt.
The file holds a secret of this installation and, for every key, a hash: a key is shown once, when
it is made. Keys are 32 random bytes, so a fast hash gives nothing away.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from blake3 import blake3

from anaphora.cache.keys import Segment
from anaphora.clock import Clock, SystemClock
from anaphora.errors import KeysError
from anaphora.profiles import PROFILES

logger = logging.getLogger(__name__)

DEFAULT_KEYS_FILE = Path("~/.config/anaphora/keys.json")

_VERSION = 1
_PREFIX = "ana-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
_GIVEN_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whoever a request is served for."""

    name: str
    salt: bytes = field(repr=False)
    shared: Segment | None = field(default=None, repr=False)
    """The namespace it shares the beginnings of its prompts in."""
    operator: bool = False
    """Whether the key is one of those who run the server, and may see what concerns all tenants."""
    profile: str | None = None
    """Name of the profile whose rules count for the key's requests; ``None``: the server's."""

    def segments(self, shared: int = 0) -> tuple[Segment, ...]:
        """How to divide a prompt whose first ``shared`` tokens may be shared: the rest is its own.

        Where the tenant is in no namespace, all of it is.
        """
        own = Segment(owner=self.name, salt=self.salt)
        if self.shared is None or not shared:
            return (own,)
        return replace(self.shared, end=shared), own


LOCAL = Tenant("local", b"", operator=True)
"""Everybody, where there are no keys. Its cache content is the library's own."""


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What is stored of a key."""

    name: str
    tenant: str
    digest: str
    """Keyed BLAKE3 of the key, in hex."""
    created: float
    """Seconds since the Unix epoch."""
    operator: bool = False
    profile: str | None = None
    """Of the requests with this key; ``None``: the server's."""


@dataclass(frozen=True, slots=True)
class _Contents:
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    """32 bytes, made once for each installation."""
    records: tuple[KeyRecord, ...] = ()
    shared: Mapping[str, str] = field(default_factory=dict)
    """The namespace of each tenant that is in one."""


class KeyFile:
    """The file behind ``anaphora keys``. Several processes may change it at once."""

    def __init__(self, path: Path = DEFAULT_KEYS_FILE, clock: Clock | None = None) -> None:
        self.path = path.expanduser()
        self._clock = clock or SystemClock()

    def records(self) -> tuple[KeyRecord, ...]:
        """All keys, oldest first. Raises :class:`~anaphora.errors.KeysError`."""
        contents = _read(self.path)
        return contents.records if contents else ()

    def shared(self) -> Mapping[str, str]:
        """The namespace of each tenant that is in one. Raises as :meth:`records`."""
        contents = _read(self.path)
        return contents.shared if contents else {}

    def add(
        self,
        name: str,
        tenant: str | None = None,
        *,
        operator: bool = False,
        profile: str | None = None,
    ) -> str:
        """Make a key and return it; it cannot be had again.

        Without ``tenant`` the key gets a tenant of its own, called like the key, and without
        ``profile`` that of the server.
        Raises :class:`~anaphora.errors.KeysError`, also where the name is taken.
        """
        tenant = name if tenant is None else tenant
        _check_name("key", name)
        _check_name("tenant", tenant)
        if tenant == LOCAL.name:
            raise KeysError(
                f"a tenant cannot be called {tenant!r}: that is everybody where there are no keys"
            )
        if profile is not None and profile not in PROFILES:
            raise KeysError(f"there is no profile {profile!r}: use {', '.join(PROFILES)}")
        key = _PREFIX + secrets.token_urlsafe(32)
        with self._changing() as contents:
            if any(record.name == name for record in contents.records):
                raise KeysError(
                    f"there is a key called {name} already: choose another name, or revoke it first"
                )
            digest = _key_digest(contents.secret, key).hex()
            record = KeyRecord(name, tenant, digest, self._clock.now(), operator, profile)
            self._write(replace(contents, records=(*contents.records, record)))
        return key

    def revoke(self, name: str) -> KeyRecord:
        """Forget a key, and return what was stored of it.

        Raises :class:`~anaphora.errors.KeysError`, also where there is none of that name.
        """
        with self._changing() as contents:
            kept = tuple(record for record in contents.records if record.name != name)
            gone = next((record for record in contents.records if record.name == name), None)
            if gone is None:
                raise KeysError(f"there is no key called {name}: 'anaphora keys ls' lists them all")
            self._write(replace(contents, records=kept))
        return gone

    def share(self, tenant: str, namespace: str) -> None:
        """Let ``tenant`` share the beginnings of its prompts with everybody in ``namespace``.

        It leaves the namespace it was in before. Raises :class:`~anaphora.errors.KeysError`, also
        where no key speaks for such a tenant.
        """
        _check_name("namespace", namespace)
        with self._changing() as contents:
            # Keys given in the settings are in no file.
            known = {_GIVEN_TENANT, *(record.tenant for record in contents.records)}
            if tenant not in known:
                raise KeysError(
                    f"no key speaks for a tenant called {tenant}: 'anaphora keys ls' lists them all"
                )
            self._write(replace(contents, shared={**contents.shared, tenant: namespace}))

    def unshare(self, tenant: str) -> str:
        """Let ``tenant`` share nothing any more, and return the namespace it was in.

        Raises :class:`~anaphora.errors.KeysError`, also where it was in none.
        """
        with self._changing() as contents:
            kept = dict(contents.shared)
            namespace = kept.pop(tenant, None)
            if namespace is None:
                raise KeysError(f"there is no tenant called {tenant} that shares anything")
            self._write(replace(contents, shared=kept))
        return namespace

    def ensure(self) -> None:
        """Make the file, with a secret and no keys, if there is none."""
        with self._changing() as contents:
            if not self.path.exists():
                self._write(contents)

    @contextmanager
    def _changing(self) -> Iterator[_Contents]:
        """What the file holds, while nobody else changes it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = self.path.with_name(self.path.name + ".lock").open("w")
        except OSError as error:
            raise _unusable(self.path, error) from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield _read(self.path) or _Contents()

    def _write(self, contents: _Contents) -> None:
        """Replace the file whole; nobody else may read it."""
        data = {
            "version": _VERSION,
            "secret": contents.secret.hex(),
            "keys": [asdict(record) for record in contents.records],
            "shared": dict(contents.shared),
        }
        temporary = None
        try:
            handle, temporary = tempfile.mkstemp(prefix=self.path.name, dir=self.path.parent)
            with open(handle, "w") as file:  # mkstemp made it 0600
                json.dump(data, file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError as error:
            if temporary is not None:
                with suppress(OSError):
                    os.unlink(temporary)
            raise _unusable(self.path, error) from error


class Keys:
    """Says whom a request is for. Keys added or revoked later count from the next request on."""

    def __init__(self, path: Path = DEFAULT_KEYS_FILE, given: Iterable[str] = ()) -> None:
        """Keys of the file at ``path``, if there is one, and those ``given`` in the settings.

        Given keys share one tenant, and are operators': whoever sets options runs the server.
        Raises :class:`~anaphora.errors.KeysError`.
        """
        self._file = KeyFile(path)
        self._given = tuple(given)
        for key in self._given:
            if not (key.isascii() and key.isprintable() and key) or " " in key:
                raise KeysError("an API key must be printable ASCII without spaces")
        if self._given:
            self._file.ensure()  # their tenant's salt must be the same after a restart
        self._tenants: list[tuple[bytes, Tenant]] = []
        self._secret = b""
        self._seen = self._signature()
        self._read()
        self.required = bool(self._tenants)
        """Whether requests need a key. Once they do, they do until the server ends."""

    def check(self, header: str | None) -> Tenant | None:
        """Whom a request is for; ``None``: its key is missing or wrong.

        ``header`` is the value of ``Authorization`` (``Bearer KEY``) or ``x-api-key`` (``KEY``).
        Where there are no keys everything is for :data:`LOCAL`.
        """
        self._refresh()
        if not self.required:
            return LOCAL
        scheme, _, rest = (header or "").strip().partition(" ")
        key = rest.strip() if scheme.lower() == "bearer" else scheme
        digest = _key_digest(self._secret, key)
        found = None
        for stored, tenant in self._tenants:  # all of them: time must not tell which came close
            if hmac.compare_digest(stored, digest):
                found = tenant
        return found

    def _refresh(self) -> None:
        signature = self._signature()
        if signature == self._seen:
            return
        self._seen = signature
        try:
            self._read()
        except KeysError as error:
            self._tenants = []
            logger.error("%s; until then every key is refused", error)
        self.required = self.required or bool(self._tenants)

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            status = self._file.path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _read(self) -> None:
        contents = _read(self._file.path)
        if contents is None:  # the given keys go on with the secret they had
            contents = _Contents(self._secret) if self._secret else _Contents()
        self._secret = contents.secret
        given = _tenant(contents, _GIVEN_TENANT, operator=True)
        self._tenants = [(_key_digest(contents.secret, key), given) for key in self._given]
        for record in contents.records:
            tenant = _tenant(
                contents, record.tenant, operator=record.operator, profile=record.profile
            )
            self._tenants.append((bytes.fromhex(record.digest), tenant))


def tenant_salt(secret: bytes, tenant: str) -> bytes:
    """32 bytes that nobody without the installation's secret can work out."""
    return _digest(secret, b"anaphora tenant 1", tenant.encode())


def namespace_salt(secret: bytes, namespace: str) -> bytes:
    """As :func:`tenant_salt`, and never the same as that of any tenant."""
    return _digest(secret, b"anaphora namespace 1", namespace.encode())


def _tenant(
    contents: _Contents, name: str, *, operator: bool, profile: str | None = None
) -> Tenant:
    shared = None
    if namespace := contents.shared.get(name):
        # No tenant can have this owner's name, so promises to the two are never mixed up either.
        shared = Segment(f"shared:{namespace}", namespace_salt(contents.secret, namespace))
    return Tenant(name, tenant_salt(contents.secret, name), shared, operator, profile)


def _check_name(what: str, text: str) -> None:
    if not _NAME.fullmatch(text):
        raise KeysError(
            f"a {what} cannot be called {text!r}: use up to 64 letters, digits and ._@+-, "
            "beginning with a letter or digit"
        )


def _key_digest(secret: bytes, key: str) -> bytes:
    return _digest(secret, b"anaphora api key 1", key.encode(errors="surrogatepass"))


def _digest(secret: bytes, *fields: bytes) -> bytes:
    """Keyed BLAKE3 over fields with their lengths, so that no two lists of fields collide."""
    text = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
    return blake3(text, key=secret).digest()


def _read(path: Path) -> _Contents | None:
    """What the file holds; ``None`` where there is none. Raises :class:`KeysError`."""
    try:
        data = json.loads(path.read_bytes())
        if data["version"] != _VERSION:
            raise KeysError(
                f"{path} was written by another version of Anaphora: move it away and make new keys"
            )
        secret = bytes.fromhex(data["secret"])
        records = tuple(KeyRecord(**record) for record in data["keys"])
        digests = [bytes.fromhex(record.digest) for record in records]
        if any(len(text) != 32 for text in (secret, *digests)):
            raise ValueError
        shared = dict(data.get("shared", {}))
        names = [text for r in records for text in (r.name, r.tenant)]
        if not all(_NAME.fullmatch(text) for pair in (names, *shared.items()) for text in pair):
            raise ValueError
        if not all(isinstance(record.operator, bool) for record in records):
            raise ValueError
        if not {record.profile for record in records} <= {None, *PROFILES}:
            raise ValueError
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise KeysError(f"{path} is damaged: move it away and make new keys") from error
    return _Contents(secret, records, shared)


def _unusable(path: Path, error: OSError) -> KeysError:
    why = error.strerror or error
    return KeysError(f"the key file {path} can't be used ({why}): choose another with --keys-file")
