"""Options from the command line, the environment and a TOML file."""

from __future__ import annotations

import logging
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from anaphora.config import FIELDS, Config, load_config, spelled, variable
from anaphora.errors import ConfigError, SettingsError
from anaphora.profiles import Anthropic, OpenAI
from anaphora.prompt.conversation import Conversation
from anaphora.settings import Adapter, Settings

GOOD: dict[str, tuple[str, object, object]] = {
    "model": ("model.gguf", "model.gguf", "model.gguf"),
    "host": ("0.0.0.0", "0.0.0.0", "0.0.0.0"),
    "port": ("9000", 9000, 9000),
    "alias": ("mine", "mine", "mine"),
    "api_key": ("one,two", ["one", "two"], ("one", "two")),
    "keys_file": ("/k.json", "/k.json", Path("/k.json")),
    "profile": ("openai", "openai", "openai"),
    "rules": (
        "anthropic.minimum=512,anthropic.lifetimes.5m=600,openai.rounding=128",
        {"anthropic": {"minimum": 512, "lifetimes": {"5m": 600}}, "openai": {"rounding": 128}},
        (Anthropic(minimum=512, lifetimes={"5m": 600}), OpenAI(rounding=128)),
    ),
    "ctx_size": ("4096", 4096, 4096),
    "swap_model": ("a.gguf,b=c.gguf", ["a.gguf", "b=c.gguf"], ("a.gguf", "b=c.gguf")),
    "engine": ("thread", "thread", "thread"),
    "parallel": ("2", 2, 2),
    "threads": ("3", 3, 3),
    "gpu_layers": ("-1", -1, -1),
    "kv_type": ("q8_0", "q8_0", "q8_0"),
    "flash_attn": ("on", "on", "on"),
    "adapter": (
        "/a.gguf,/b.gguf:0.5",
        ["/a.gguf", "/b.gguf:0.5"],
        (Adapter(Path("/a.gguf")), Adapter(Path("/b.gguf"), 0.5)),
    ),
    "llama": (
        "n_batch=512,cpu_moe=true,rope_freq_base=1e6,load_mode=mlock",
        {"n_batch": 512, "cpu_moe": True, "rope_freq_base": 1e6, "load_mode": "mlock"},
        (("n_batch", 512), ("cpu_moe", True), ("rope_freq_base", 1e6), ("load_mode", "mlock")),
    ),
    "chat_template": ("/t.jinja", "/t.jinja", Path("/t.jinja")),
    "cache_dir": ("/c", "/c", Path("/c")),
    "memory_budget": ("8GiB", 8 << 30, 8 << 30),
    "disk_budget": ("0", 0, 0),
    "block_size": ("128", 128, 128),
    "exact": ("true", True, True),
    "store_days": ("0", 0, 0),
    "store_budget": ("2GiB", "2GiB", 2 << 30),
    "volatile": ("off", "off", "off"),
    "usage_file": ("/u.db", "/u.db", Path("/u.db")),
    "usage_days": ("30", 30, 30),
    "prices": ("/p.toml", "/p.toml", Path("/p.toml")),
    "explain_memory": ("0", 0, 0),
    "queue_size": ("0", 0, 0),
    "max_body": ("1MB", "1MB", 1_000_000),
    "strict_model": ("yes", True, True),
    "strict_max_tokens": ("1", True, True),
    "allow_host": ("a,b", ["a", "b"], ("a", "b")),
    "allow_origin": ("*", ["*"], ("*",)),
    "drain_seconds": ("5", 5, 5),
}
"""For every option: as text, as in TOML, and what it means."""


def toml(value: object) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {toml(item)}' for name, item in value.items())}}}"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)


def test_every_option_can_be_given_in_all_three_places(tmp_path: Path) -> None:
    assert GOOD.keys() == FIELDS.keys()
    file = tmp_path / "anaphora.toml"
    file.write_text("".join(f"{spelled(n)} = {toml(v)}\n" for n, (_, v, _) in GOOD.items()))
    texts = {name: text for name, (text, _, _) in GOOD.items()}
    wanted = Config(**{name: meant for name, (_, _, meant) in GOOD.items()})  # type: ignore[arg-type]
    assert load_config({}, {}, file) == wanted
    assert load_config({}, {variable(name): text for name, text in texts.items()}) == wanted
    assert load_config(texts, {}) == wanted


def test_the_command_line_goes_before_the_environment_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "anaphora.toml"
    file.write_text("port = 1\nparallel = 1\nthreads = 1\n")
    environ = {"ANAPHORA_PORT": "2", "ANAPHORA_PARALLEL": "2", "ANAPHORA_CONFIG": str(file)}
    config = load_config({"port": "3"}, environ)
    assert (config.port, config.parallel, config.threads, config.block_size) == (3, 2, 1, 256)


def test_an_empty_variable_is_not_set_and_a_foreign_one_is_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environ = {"ANAPHORA_PORT": "", "ANAPHORA_CONFIG": "", "ANAPHORA_PROT": "80", "HOME": "/"}
    with caplog.at_level(logging.WARNING):
        assert load_config({}, environ) == Config()
    assert [record.getMessage() for record in caplog.records] == [
        "ANAPHORA_PROT is set, but there is no such option"
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("123", 123),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("1.5KiB", 1536),
        ("500MB", 500_000_000),
        ("2kb", 2000),
        ("1TiB", 1 << 40),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert load_config({"memory_budget": text}, {}).memory_budget == size


@pytest.mark.parametrize(
    ("text", "path", "scale"),
    [
        ("a.gguf", "a.gguf", 1.0),
        ("a.gguf:2", "a.gguf", 2.0),
        ("a.gguf:-0.5", "a.gguf", -0.5),
        ("odd:name.gguf", "odd:name.gguf", 1.0),
        ("odd:name.gguf:.25", "odd:name.gguf", 0.25),
        ("a.gguf:", "a.gguf:", 1.0),
    ],
)
def test_adapters(text: str, path: str, scale: float) -> None:
    assert load_config({"adapter": [text]}, {}).settings().adapters == (Adapter(Path(path), scale),)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("512", 512),
        ("-1", -1),
        ("0.5", 0.5),
        ("1e6", 1e6),
        ("true", True),
        ("True", "True"),
        ("layer", "layer"),
        ("3,1", "3,1"),
        ("exps=CPU,a=B", "exps=CPU,a=B"),
        ("\u0661", "\u0661"),
    ],
)
def test_parameters_of_llama_cpp_are_switches_numbers_or_texts(text: str, value: object) -> None:
    llama = load_config({"llama": [f"name={text}"]}, {}).settings().llama
    assert llama == {"name": value}
    assert type(llama["name"]) is type(value)


def test_a_section_of_llama_cpps_parameters_is_passed_on_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "anaphora.toml"
    file.write_text(
        """
        port = 80
        [llama]
        n_ubatch = 64
        tensor_split = [3, 1]
        [llama.kv_overrides]
        "llama.context_length" = 4096
        """
    )
    llama = load_config({}, {}, file).settings().llama
    assert llama == tomllib.loads(file.read_text())["llama"]
    assert load_config({"llama": ["n_batch=1"]}, {}, file).settings().llama == {"n_batch": 1}


BAD: dict[str, list[object]] = {
    "memory_budget": ["", "8G", "-1", "nan", "inf", "GiB", "1e99999999999", "8GiBs", True, [], -5],
    "port": ["http", "-1", "65536", "", "8.5", 8.5, True, [], "tcp://10.0.0.1:80"],
    "ctx_size": ["63", "99999999999999999999"],
    "parallel": ["0", "many"],
    "exact": ["maybe", 5, []],
    "flash_attn": ["sometimes", True, []],
    "host": ["  ", 5],
    "api_key": [5, [5], "a,,b"],
    "adapter": ["", 5, [5], ":2", "a.gguf:nan", "a.gguf:inf", "a,,b"],
    "llama": ["", 5, [5], "n_batch", "=1", "n_batch=", "n_batch=1,n_batch=2"],
    "profile": ["", "google", 5, []],
    "rules": [
        *("", 5, "minimum=1", "google.minimum=1", "anthropic.maximum=1", "anthropic.minimum=0"),
        *("anthropic.minimum=x", "anthropic=1", "anthropic.lifetimes=5", "local.lifetimes.5m=0"),
        *("local.lifetimes.5w=1", "anthropic.minimum=1,anthropic.minimum=2"),
        *("anthropic.minimum.x=1,anthropic.minimum=1", "anthropic.minimum=1,anthropic.minimum.x=1"),
        *({"anthropic": 5}, {"anthropic": {"minimum": "x"}}, {"x": {}}),
    ],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_a_bad_value_is_one_line_that_says_where_it_stands(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({name: value}, {})
    message = str(caught.value)
    assert message.startswith(f"--{spelled(name)} is ")
    assert ": use " in message
    assert "\n" not in message


def test_a_bad_value_names_the_variable_or_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^ANAPHORA_PORT is 'http': use a whole number, 0 to"):
        load_config({}, {"ANAPHORA_PORT": "http"})
    file = tmp_path / "a.toml"
    file.write_text('port = "http"')
    with pytest.raises(ConfigError, match=r"^port in .*a\.toml is 'http': use"):
        load_config({}, {}, file)


def test_a_wrong_key_is_not_shown_and_no_key_is_in_the_repr() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({}, {"ANAPHORA_API_KEY": "sesame,"})
    assert "sesame" not in str(caught.value)
    assert "sesame" not in repr(load_config({}, {"ANAPHORA_API_KEY": "sesame"}))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot = 80", "did you mean port"),
        ("ctx_size = 80", "did you mean ctx-size"),
        ("[server]\nport = 80", "known: model, swap-model"),
        ("port = ", "no TOML"),
        ("\xff", "no TOML"),
    ],
)
def test_a_file_with_an_unknown_key_or_no_toml_is_one_line(
    tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "anaphora.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=says) as caught:
        load_config({}, {}, file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="can't be read"):
            load_config({}, {}, path)


def test_the_defaults_are_the_librarys(tmp_path: Path) -> None:
    assert Config(cache_dir=tmp_path).settings() == Settings(cache_dir=tmp_path)
    changed = Config(cache_dir=tmp_path, ctx_size=512, exact=True, gpu_layers=3).settings()
    assert (changed.context_size, changed.exact, changed.gpu_layers) == (512, True, 3)


def test_what_the_settings_refuse_is_told_in_the_words_it_was_written_in(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("block-size = 100")
    for config, says in (
        (load_config({"block_size": "100"}, {}), "--block-size"),
        (load_config({}, {"ANAPHORA_BLOCK_SIZE": "100"}), "ANAPHORA_BLOCK_SIZE"),
        (load_config({}, {}, file), f"block-size in {file}"),
    ):
        with pytest.raises(SettingsError) as caught:
            config.settings()
        assert str(config.as_written(caught.value)) == (
            f"{says} is 100: use a multiple of 64, for example 256"
        )


def test_every_setting_is_told_as_the_option_it_is() -> None:
    for item in fields(Settings):
        told = str(Config().as_written(SettingsError("is wrong", setting=item.name)))
        option = told.removeprefix("--").removesuffix(" is wrong").replace("-", "_")
        assert option in FIELDS or item.name == "reserve_tokens", "no option has that"
    assert str(Config().as_written(SettingsError("nothing fits"))) == "nothing fits"


def test_every_option_is_explained() -> None:
    for item in FIELDS.values():
        assert item.metadata["option"].help.endswith(".")


def test_rules_for_volatile_text_stand_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "anaphora.toml"
    file.write_text('[[volatile]]\nname = "clock"\npattern = "Time [0-9:]+"\n')
    texts = ("x-anthropic-billing-header: 1", "Time 12:34")
    system = ({"role": "system", "content": text} for text in texts)
    conversation = Conversation.parse([*system, {"role": "user", "content": "Hi"}])
    built_in = ("x-anthropic-billing-header",)
    for given, names in (
        ({}, (*built_in, "clock")),
        ({"volatile": "on"}, built_in),
        ({"volatile": "off"}, ()),
    ):
        rules = load_config(given, {}, file).volatile_rules
        assert rules.apply(conversation).rules == names
    for wrong, told in (
        ('[[volatile]]\nname = "a"', "no pattern"),
        ("volatile = 1", "use on, off"),
    ):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=told):
            load_config({}, {}, file)


def test_the_usage_file_can_be_switched_off() -> None:
    assert load_config({"usage_file": "off"}, {}).usage_file == "off"
