"""Prices: exact arithmetic, rules in order, and the published ones."""

from __future__ import annotations

import tomllib
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.errors import ConfigError
from anaphora.usage.prices import Price, PriceTable, presets
from anaphora.usage.record import LIFETIMES, Cost, Lifetime, TokenCounts

AMOUNTS = st.decimals(0, 1000, places=3)
PRICES = st.builds(
    Price, AMOUNTS, AMOUNTS, AMOUNTS, AMOUNTS, st.dictionaries(st.sampled_from(LIFETIMES), AMOUNTS)
)
NUMBERS = st.integers(0, 10_000_000)


@st.composite
def counts(draw: st.DrawFn) -> TokenCounts:
    written = draw(st.dictionaries(st.sampled_from(LIFETIMES), NUMBERS))
    read, uncached, output = draw(NUMBERS), draw(NUMBERS), draw(NUMBERS)
    return TokenCounts(read + uncached + sum(written.values()), read, written, output=output)


def table(text: str) -> PriceTable:
    data = tomllib.loads(text, parse_float=Decimal)
    return PriceTable(data["price"], data.get("currency", "USD"))


@given(PRICES, counts())
def test_a_cost_is_exact(price: Price, tokens: TokenCounts) -> None:
    amount = Fraction(price.input) * tokens.uncached + Fraction(price.read) * tokens.read
    amount += Fraction(price.output) * tokens.output
    for lifetime, number in tokens.written.items():
        amount += Fraction(price.writes.get(lifetime, price.write)) * number
    uncached = Fraction(price.input) * tokens.prompt + Fraction(price.output) * tokens.output
    # Three decimals per million are whole billionths per token: nothing is ever rounded.
    assert price.cost(tokens) == Cost(int(amount * 1000), int(uncached * 1000), "USD")


@given(PRICES, counts())
def test_caching_costs_more_only_where_writes_outweigh_reads(
    price: Price, tokens: TokenCounts
) -> None:
    cost = price.cost(tokens)
    saved = (price.input - price.read) * tokens.read
    surcharge = sum(
        (price.writes.get(lifetime, price.write) - price.input) * number
        for lifetime, number in tokens.written.items()
    )
    assert (cost.amount <= cost.uncached) == (surcharge <= saved)


@given(PRICES, st.lists(counts(), min_size=1, max_size=5))
def test_costs_of_requests_add_up(price: Price, requests: list[TokenCounts]) -> None:
    written: dict[Lifetime, int] = {}
    for tokens in requests:
        for lifetime, number in tokens.written.items():
            written[lifetime] = written.get(lifetime, 0) + number
    together = TokenCounts(
        sum(tokens.prompt for tokens in requests),
        sum(tokens.read for tokens in requests),
        written,
        output=sum(tokens.output for tokens in requests),
    )
    costs = [price.cost(tokens) for tokens in requests]
    whole = price.cost(together)
    assert whole.amount == sum(cost.amount for cost in costs)
    assert whole.uncached == sum(cost.uncached for cost in costs)


def test_prices_finer_than_a_billionth_are_rounded_once() -> None:
    price = Price(Decimal("0.0005"), Decimal(0), Decimal("0.0005"), Decimal(0))
    assert [price.cost(TokenCounts(n)).amount for n in (1, 2, 3, 4, 5)] == [0, 1, 2, 2, 2]


def test_a_read_or_a_write_without_a_price_costs_what_input_costs() -> None:
    price = table("[[price]]\ninput = 3\noutput = 15").find("acme", "small", 10)
    assert price == Price(Decimal(3), Decimal(15), Decimal(3), Decimal(3))


def test_multiples_are_of_input_and_lifetimes_have_prices_of_their_own() -> None:
    prices = table(
        """
        currency = "EUR"
        [[price]]
        input = 0.3
        read = "0.1x"
        write = "1.25x"
        write-1h = "2x"
        write-unlimited = 0
        output = "1.2"
        """
    )
    tokens = TokenCounts(5_000_000, 10**6, {"5m": 10**6, "1h": 10**6, "unlimited": 10**6})
    # 0.03 read, 0.375 and 0.6 and nothing written, 0.3 uncached
    assert prices.cost("acme", "small", tokens) == Cost(1_305_000_000, 1_500_000_000, "EUR")


def test_the_first_rule_that_fits_counts() -> None:
    prices = table(
        """
        [[price]]
        tenant = "acme"
        model = "qwen*"
        above = 1000
        input = 1
        output = 1
        [[price]]
        tenant = "acme"
        input = 2
        output = 1
        [[price]]
        model = "qwen3-?b"
        input = 3
        output = 1
        currency = "EUR"
        """
    )

    def found(tenant: str, model: str, prompt: int = 10) -> int | None:
        price = prices.find(tenant, model, prompt)
        return None if price is None else int(price.input)

    assert found("acme", "qwen3-8b", 1001) == 1
    assert found("acme", "qwen3-8b", 1000) == 2
    assert found("acme", "Qwen3-8b", 1001) == 2
    assert found("beta", "qwen3-8b", 0) == 3
    assert found("beta", "qwen3-14b") is None
    assert prices.cost("beta", "other", TokenCounts(10)) is None


def test_a_preset_stands_for_all_its_prices() -> None:
    prices = table('[[price]]\npreset = "claude-haiku-5-5"')
    short, long = (prices.find("acme", "small", prompt) for prompt in (100_000, 100_001))
    assert short is not None
    assert long is not None
    assert (short.input, short.output) == (Decimal("0.10"), Decimal("0.50"))
    assert (long.input, long.read) == (Decimal("0.50"), Decimal("0.05"))


def test_published_prices_are_dated_sourced_and_follow_the_providers_rules() -> None:
    for name, preset in presets().items():
        assert preset.source
        assert preset.as_of.year >= 2026
        assert preset.bands[-1][0] == 0, f"{name} has no price for short prompts"
        for _, price in preset.bands:
            assert price.input < price.output
            assert price.read <= price.input / 10
            assert price.write == price.input * Decimal("1.25")
            if name.startswith("claude-"):
                assert price.writes == {"1h": price.input * 2}
            elif price.writes:
                assert price.writes == {"12h": price.input * Decimal("2.5")}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[[price]]\noutput = 1", "input is missing"),
        ("[[price]]\ninput = 1", "output is missing"),
        ("[[price]]\ninput = -1\noutput = 1", "0 or more"),
        ("[[price]]\ninput = nan\noutput = 1", "0 or more"),
        ("[[price]]\ninput = inf\noutput = 1", "0 or more"),
        ("[[price]]\ninput = true\noutput = 1", "0 or more"),
        ("[[price]]\ninput = '0.1x'\noutput = 1", "input is 0.1x: use a number"),
        ("[[price]]\ninput = 1\nread = 'x'\noutput = 1", "a multiple of input"),
        ("[[price]]\ninput = 1\nread = []\noutput = 1", "a multiple of input"),
        ("[[price]]\ninput = 1\noutput = 1\nwrite-2h = 3", "did you mean write-12h"),
        ("[[price]]\ninput = 1\noutput = 1\nabove = -1", "number of tokens"),
        ("[[price]]\ninput = 1\noutput = 1\nabove = true", "number of tokens"),
        ("[[price]]\ninput = 1\noutput = 1\ntenant = 5", "tenant is 5"),
        ("[[price]]\ninput = 1\noutput = 1\ncurrency = ''", "short text"),
        ("[[price]]\npreset = 'claude-opus-5.5'", "did you mean claude-opus-5-5"),
        ("[[price]]\npreset = 5", "is no preset"),
        ("[[price]]\npreset = 'claude-opus-5-5'\ninput = 1", "leave input out"),
        ("[price]\ninput = 1\noutput = 1", "under \\[\\[price\\]\\]"),
        ("price = [1]", "under \\[\\[price\\]\\]"),
        ("prices = 1", "did you mean price"),
        ("currency = 5", "short text"),
        ("[[price", "no TOML"),
        ("\xff", "no TOML"),
    ],
)
def test_a_table_that_cannot_be_understood_is_one_line(
    tmp_path: Path, text: str, wrong: str
) -> None:
    path = tmp_path / "prices.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=wrong) as caught:
        PriceTable.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_table_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text("[[price]]\ninput = 0.1\noutput = 0.2")
    cost = PriceTable.load(path).cost("acme", "small", TokenCounts(3, output=1))
    assert cost == Cost(500, 500, "USD")
    with pytest.raises(ConfigError, match="name a TOML file"):
        PriceTable.load(tmp_path / "none.toml")


def test_without_rules_nothing_has_a_price() -> None:
    rules: list[dict[str, Any]] = []
    assert PriceTable(rules).find("acme", "small", 5) is None
