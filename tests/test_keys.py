"""API keys: what is stored, who is let in, and that tenants never meet."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.cache.keys import Segment, segment_id
from anaphora.errors import KeysError
from anaphora.keys import LOCAL, KeyFile, Keys, Tenant, namespace_salt, tenant_salt


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config" / "keys.json"


def checked(path: Path, key: str) -> Tenant:
    tenant = Keys(path).check(key)
    assert tenant is not None
    return tenant


def test_without_keys_everybody_is_local_and_nothing_is_written(path: Path) -> None:
    keys = Keys(path)
    assert not keys.required
    assert keys.check(None) is LOCAL
    assert keys.check("Bearer anything") is LOCAL
    assert LOCAL.segments(100) == (Segment(),)
    assert LOCAL.operator
    assert not path.exists()


def test_a_key_lets_its_tenant_in_however_it_is_sent(path: Path) -> None:
    key = KeyFile(path).add("laptop", "acme")
    keys = Keys(path)
    assert keys.required
    for header in (key, f"Bearer {key}", f"bearer  {key} "):
        tenant = keys.check(header)
        assert tenant is not None
        assert tenant.name == "acme"
        assert [segment.owner for segment in tenant.segments()] == ["acme"]
        assert not tenant.operator
    wrong = (None, "", "Bearer", "Bearer ", key[:-1], key + "x", f"Basic {key}", "é", "\ud83d")
    for refused in wrong:
        assert keys.check(refused) is None


def test_the_file_is_private_and_holds_no_key(path: Path) -> None:
    key = KeyFile(path).add("laptop")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert key not in path.read_text()
    assert key.removeprefix("ana-") not in path.read_text()
    path.chmod(0o644)
    KeyFile(path).add("other")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_every_key_has_a_tenant_of_its_own_unless_told_otherwise(path: Path) -> None:
    file = KeyFile(path)
    texts = [file.add("a"), file.add("b"), file.add("a2", "a")]
    tenants = [Keys(path).check(text) for text in texts]
    assert [tenant.name for tenant in tenants if tenant] == ["a", "b", "a"]
    assert tenants[0] == tenants[2]
    assert len(set(texts)) == 3


def test_names_are_unique_and_plain(path: Path) -> None:
    file = KeyFile(path)
    file.add("laptop")
    with pytest.raises(KeysError, match="already"):
        file.add("laptop", "other")
    for name in ("", " ", "a b", "ü", "-x", "a\n", "a/b", "x" * 65):
        with pytest.raises(KeysError, match="cannot be called"):
            file.add(name)
        with pytest.raises(KeysError, match="cannot be called"):
            file.add("fine", name)
    with pytest.raises(KeysError, match="no key called"):
        file.revoke("unknown")
    assert [record.name for record in file.records()] == ["laptop"]


def test_adding_and_revoking_count_at_once_in_a_running_server(path: Path) -> None:
    keys = Keys(path)
    first = KeyFile(path).add("first")
    assert keys.check(None) is None, "once there are keys, they are required"
    assert keys.check(first) is not None
    second = KeyFile(path).add("second")
    KeyFile(path).revoke("first")
    assert keys.check(first) is None
    assert keys.check(second) is not None
    KeyFile(path).revoke("second")
    assert keys.check(second) is None
    assert keys.check(None) is None, "a running server does not fall open"
    path.unlink()
    assert keys.check(None) is None


def test_a_file_damaged_while_the_server_runs_refuses_every_key(path: Path) -> None:
    key = KeyFile(path).add("laptop")
    keys = Keys(path)
    sound = path.read_text()
    path.write_text(sound[:-20])
    assert keys.check(key) is None
    path.write_text(sound)
    assert keys.check(key) is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        '{"version": 2}',
        '{"version": 1, "secret": "00", "keys": []}',
        '{"version": 1, "secret": "' + "00" * 32 + '", "keys": [{"name": 1}]}',
        '{"version": 1, "secret": "' + "00" * 32 + '", "keys": [{"name": "a", "tenant": 5, '
        '"digest": "' + "00" * 32 + '", "created": 0}]}',
        '{"version": 1, "secret": "' + "00" * 32 + '", "keys": [{"name": "a", "tenant": "a", '
        '"digest": "' + "00" * 32 + '", "created": 0, "operator": "no"}]}',
        '{"version": 1, "secret": "' + "00" * 32 + '", "keys": [], "shared": {"a": 1}}',
        '{"version": 1, "secret": "' + "00" * 32 + '", "keys": [], "shared": {"a": "b c"}}',
        "\xff",
    ],
)
def test_a_damaged_file_is_one_line_and_is_kept(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_bytes(text.encode("latin-1"))
    for use in (lambda: Keys(path), lambda: KeyFile(path).add("x"), lambda: Keys(path, ["given"])):
        with pytest.raises(KeysError) as caught:
            use()
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == text.encode("latin-1")


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KeysError, match="--keys-file"):
        KeyFile(tmp_path / "file" / "keys.json").add("x")
    with pytest.raises(KeysError, match="--keys-file"):
        Keys(tmp_path)


def test_given_keys_share_a_tenant_that_outlives_them(path: Path) -> None:
    before = Keys(path, ["one", "two"])
    assert before.required
    tenant = before.check("Bearer one")
    assert tenant is not None
    assert before.check("two") == tenant
    assert before.check("three") is None
    assert Keys(path, ["three"]).check("three") == tenant, "cached content survives a new key"
    assert "one" not in json.loads(path.read_text()).values()


@pytest.mark.parametrize("key", ["", "a b", "schlüssel", "a\nb"])
def test_given_keys_a_header_cannot_carry_are_refused_without_showing_them(
    path: Path, key: str
) -> None:
    with pytest.raises(KeysError) as caught:
        Keys(path, [key])
    assert not key or key not in str(caught.value)


def test_two_installations_have_different_salts(tmp_path: Path) -> None:
    salts = set()
    for name in ("a", "b"):
        key = KeyFile(tmp_path / name).add("acme")
        tenant = Keys(tmp_path / name).check(key)
        assert tenant is not None
        salts.add(tenant.salt)
    assert len(salts) == 2


def test_no_tenant_can_be_called_like_everybody(path: Path) -> None:
    for name, tenant in (("local", None), ("laptop", "local")):
        with pytest.raises(KeysError, match="local"):
            KeyFile(path).add(name, tenant)
    KeyFile(path).add("local", "acme")


def test_an_operators_key_says_so(path: Path) -> None:
    file = KeyFile(path)
    ours, theirs = file.add("ours", "acme", operator=True), file.add("theirs", "acme")
    assert [record.operator for record in file.records()] == [True, False]
    assert checked(path, ours).operator
    assert not checked(path, theirs).operator
    assert checked(path, ours).segments() == checked(path, theirs).segments(), "one tenant"


def test_a_key_may_have_a_profile_of_its_own(path: Path) -> None:
    file = KeyFile(path)
    keys = [file.add("one", "acme", profile="anthropic"), file.add("two", "acme")]
    assert [record.profile for record in file.records()] == ["anthropic", None]
    assert [checked(path, key).profile for key in keys] == ["anthropic", None]
    with pytest.raises(KeysError, match="use local, anthropic, openai"):
        file.add("three", profile="google")
    path.write_text(path.read_text().replace('"anthropic"', '"google"'))
    with pytest.raises(KeysError, match="damaged"):
        file.records()


def test_a_file_from_before_there_were_operators_and_namespaces_is_read(path: Path) -> None:
    key = KeyFile(path).add("laptop")
    data = json.loads(path.read_text())
    del data["shared"]
    del data["keys"][0]["operator"]
    del data["keys"][0]["profile"]
    path.write_text(json.dumps(data))
    assert not checked(path, key).operator
    assert checked(path, key).shared is None
    assert KeyFile(path).shared() == {}


def test_a_namespace_holds_the_beginnings_of_its_members_prompts(path: Path) -> None:
    file = KeyFile(path)
    keys = {name: file.add(name) for name in ("one", "two", "other", "alone")}
    for name, namespace in (("one", "house"), ("two", "house"), ("other", "mansion")):
        file.share(name, namespace)
    assert file.shared() == {"one": "house", "two": "house", "other": "mansion"}
    divided = {name: checked(path, key).segments(100) for name, key in keys.items()}
    beginnings = {name: segments[0] for name, segments in divided.items()}
    assert beginnings["one"] == beginnings["two"]
    assert beginnings["one"].end == 100
    assert len({segment_id(segment) for segment in beginnings.values()}) == 3
    assert len({segment_id(segments[-1]) for segments in divided.values()}) == 4
    assert [len(segments) for segments in divided.values()] == [2, 2, 2, 1]
    assert len(checked(path, keys["one"]).segments(0)) == 1


def test_who_shares_can_be_changed_in_a_running_server(path: Path) -> None:
    file = KeyFile(path)
    key = file.add("laptop", "acme")
    keys = Keys(path)

    def owners() -> list[str]:
        tenant = keys.check(key)
        assert tenant is not None
        return [segment.owner for segment in tenant.segments(9)]

    assert owners() == ["acme"]
    file.share("acme", "house")
    assert owners() == ["shared:house", "acme"]
    file.share("acme", "mansion")
    assert owners() == ["shared:mansion", "acme"]
    file.add("phone", "acme")
    file.revoke("phone")
    assert owners() == ["shared:mansion", "acme"]
    assert file.unshare("acme") == "mansion"
    assert owners() == ["acme"]


def test_only_tenants_there_are_can_share(path: Path) -> None:
    file = KeyFile(path)
    file.add("laptop", "acme")
    with pytest.raises(KeysError, match="no key speaks"):
        file.share("laptop", "house")
    for name in ("", "a b", "a/b", "shared:house"):
        with pytest.raises(KeysError, match="namespace cannot be called"):
            file.share("acme", name)
    with pytest.raises(KeysError, match="shares"):
        file.unshare("acme")
    file.share("default", "house")  # that of the keys given in the settings
    given = Keys(path, ["given"]).check("given")
    assert given is not None
    assert given.operator
    assert given.segments(9)[0].owner == "shared:house"


def test_a_namespace_never_has_the_salt_or_the_name_of_a_tenant(path: Path) -> None:
    assert namespace_salt(bytes(32), "x") != tenant_salt(bytes(32), "x")
    key = KeyFile(path).add("x")
    KeyFile(path).share("x", "x")
    shared, own = checked(path, key).segments(9)
    assert shared.owner != own.owner
    assert shared.salt != own.salt


@given(st.lists(st.text(min_size=1), min_size=2, max_size=8, unique=True))
def test_salts_of_different_tenants_never_collide(names: list[str]) -> None:
    names = [name.encode(errors="replace").decode() for name in names]
    secret = bytes(32)
    segments = {segment_id(Segment(name, tenant_salt(secret, name))) for name in names}
    assert len(segments) == len(set(names))
    assert tenant_salt(secret, "acme" + "42") != tenant_salt(secret, "acme4" + "2x")


def test_a_secret_and_a_tenant_cannot_trade_bytes() -> None:
    assert tenant_salt(b"a" * 32, "acme4") != tenant_salt(b"a" * 32, "acme42")
    assert tenant_salt(b"a" * 32, "acme") != tenant_salt(b"b" * 32, "acme")


def test_processes_that_add_at_once_lose_no_key(path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from anaphora.keys import KeyFile\n"
        "for n in range(5): KeyFile(Path(sys.argv[1])).add(f'{sys.argv[2]}{n}')"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in ("a", "b", "c")
    ]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert len(KeyFile(path).records()) == 15
