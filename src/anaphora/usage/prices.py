"""What tokens cost: the operator's price table, and presets of hosted models.

All prices are per million tokens. They are decimals from the file to the sum, so that nothing
drifts.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from decimal import ROUND_HALF_EVEN, Decimal
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from anaphora.errors import ConfigError
from anaphora.usage.record import LIFETIMES, Cost, Lifetime, TokenCounts

_WRITES: Mapping[str, Lifetime] = {f"write-{lifetime}": lifetime for lifetime in LIFETIMES}
_PRICES = ("input", "read", "write", *_WRITES, "output")
_RULE = ("tenant", "model", "preset", "above", "currency", *_PRICES)
_PRESET = ("name", "as-of", "source", "above", "currency", *_PRICES)
_MOST = Decimal(10) ** 9


@dataclass(frozen=True, slots=True)
class Price:
    """What a million tokens cost, in units of ``currency``."""

    input: Decimal
    output: Decimal
    read: Decimal
    write: Decimal
    """For lifetimes that have no price of their own."""
    writes: Mapping[Lifetime, Decimal] = field(default_factory=dict)
    currency: str = "USD"

    def cost(self, tokens: TokenCounts) -> Cost:
        """What ``tokens`` cost, and what they would have cost if nothing were ever cached.

        Each of the two is rounded once, to billionths, half to even.
        """
        output = tokens.output * self.output
        written = sum(
            (n * self.writes.get(lifetime, self.write) for lifetime, n in tokens.written.items()),
            Decimal(),
        )
        amount = tokens.read * self.read + written + tokens.uncached * self.input + output
        uncached = tokens.prompt * self.input + output
        return Cost(_billionths(amount), _billionths(uncached), self.currency)


@dataclass(frozen=True, slots=True)
class Preset:
    """Prices of a hosted model, as published."""

    name: str
    as_of: date
    source: str
    bands: tuple[tuple[int, Price], ...]
    """Prices by the length of the prompt: each holds for prompts of more tokens than its number,
    the first that fits counts."""


@dataclass(frozen=True, slots=True)
class _Rule:
    tenant: str
    model: str
    bands: tuple[tuple[int, Price], ...]


class PriceTable:
    """The operator's prices by tenant and model. The first rule that fits a request counts.

    :param rules: as the file has them, under ``price``.
    :param currency: of rules that name none.
    :raises ConfigError: a rule can't be understood.
    """

    def __init__(self, rules: Iterable[Mapping[str, Any]] = (), currency: str = "USD") -> None:
        self._rules = [
            _rule(rule, currency, f"price {number}") for number, rule in enumerate(rules, start=1)
        ]

    @staticmethod
    def load(path: Path) -> PriceTable:
        """The table in a TOML file.

        :raises ConfigError: it can't be read, or holds something that can't be understood.
        """
        try:
            text = path.expanduser().read_text(encoding="utf-8")
            data = tomllib.loads(text, parse_float=Decimal)
        except OSError as error:
            raise ConfigError(
                f"the prices {path} can't be read ({error.strerror}): name a TOML file"
            ) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"the prices {path} are no TOML: {error}") from error
        try:
            _check_keys(data, ("currency", "price"), "the top")
            rules = data.get("price", [])
            if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
                raise ConfigError("price: write each rule under [[price]]")
            return PriceTable(rules, _currency(data, "USD", "the top"))
        except ConfigError as error:
            raise ConfigError(f"the prices {path}: {error}") from None

    def find(self, tenant: str, model: str, prompt_tokens: int) -> Price | None:
        """The price of a request; ``None`` where no rule fits."""
        for rule in self._rules:
            if fnmatchcase(tenant, rule.tenant) and fnmatchcase(model, rule.model):
                for above, price in rule.bands:
                    if prompt_tokens > above or above == 0:
                        return price
        return None

    def cost(self, tenant: str, model: str, tokens: TokenCounts) -> Cost | None:
        """What a request costs; ``None`` where no rule fits."""
        price = self.find(tenant, model, tokens.prompt)
        return None if price is None else price.cost(tokens)


@cache
def presets() -> Mapping[str, Preset]:
    """Published prices of hosted models by the model's name."""
    text = files("anaphora.usage").joinpath("prices.toml").read_text(encoding="utf-8")
    found: dict[str, Preset] = {}
    for entry in tomllib.loads(text, parse_float=Decimal)["model"]:
        name = entry["name"]
        _check_keys(entry, _PRESET, name)
        band = (_above(entry, name), _price(entry, _currency(entry, "USD", name), name))
        bands = found[name].bands if name in found else ()
        ordered = tuple(sorted((*bands, band), key=lambda item: -item[0]))
        found[name] = Preset(name, entry["as-of"], entry["source"], ordered)
    return found


def _rule(rule: Mapping[str, Any], currency: str, place: str) -> _Rule:
    _check_keys(rule, _RULE, place)
    tenant, model = (_pattern(rule, name, place) for name in ("tenant", "model"))
    if "preset" not in rule:
        price = _price(rule, _currency(rule, currency, place), place)
        return _Rule(tenant, model, ((_above(rule, place), price),))
    name = rule["preset"]
    beside = [key for key in ("above", "currency", *_PRICES) if key in rule]
    if beside:
        raise ConfigError(f"{place}: a preset has its own prices: leave {beside[0]} out")
    if name not in presets():
        near = difflib.get_close_matches(str(name), presets(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(presets())}"
        raise ConfigError(f"{place}: {name!r} is no preset: {hint}")
    return _Rule(tenant, model, presets()[name].bands)


def _price(rule: Mapping[str, Any], currency: str, place: str) -> Price:
    for name in ("input", "output"):
        if name not in rule:
            raise ConfigError(f"{place}: {name} is missing: a price for a million tokens")
    plain = _amount(rule["input"], None, f"{place}: input")

    def of(name: str) -> Decimal:
        return _amount(rule.get(name, plain), plain, f"{place}: {name}")

    writes = {lifetime: of(name) for name, lifetime in _WRITES.items() if name in rule}
    output = _amount(rule["output"], None, f"{place}: output")
    return Price(plain, output, of("read"), of("write"), writes, currency)


def _amount(value: object, plain: Decimal | None, place: str) -> Decimal:
    """A price, or a multiple (``"0.1x"``) of the one of plain input."""
    times = Decimal(1)
    text = str(value).strip() if not isinstance(value, bool) else ""
    if text.endswith("x") and plain is not None:
        text, times = text[:-1], plain
    try:
        amount = Decimal(text) * times
        if not 0 <= amount <= _MOST:  # raises for NaN
            raise ValueError
    except (ArithmeticError, ValueError):
        multiple = "" if plain is None else ', or a multiple of input such as "0.1x"'
        raise ConfigError(f"{place} is {value!s}: use a number, 0 or more{multiple}") from None
    return amount


def _above(rule: Mapping[str, Any], place: str) -> int:
    above = rule.get("above", 0)
    if isinstance(above, bool) or not isinstance(above, int) or above < 0:
        raise ConfigError(f"{place}: above is {above!r}: use a number of tokens")
    return above


def _pattern(rule: Mapping[str, Any], name: str, place: str) -> str:
    pattern = rule.get(name, "*")
    if not isinstance(pattern, str) or not pattern:
        raise ConfigError(f"{place}: {name} is {pattern!r}: use a name, with * for any part of it")
    return pattern


def _currency(data: Mapping[str, Any], default: str, place: str) -> str:
    currency = data.get("currency", default)
    if not isinstance(currency, str) or not 0 < len(currency) <= 8 or not currency.isprintable():
        raise ConfigError(f"{place}: currency is {currency!r}: use a short text such as EUR")
    return currency


def _check_keys(data: Mapping[str, Any], known: tuple[str, ...], place: str) -> None:
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{place}: {key!r} means nothing here: {hint}")


def _billionths(millionths: Decimal) -> int:
    """From tokens times prices per million, which are millionths of a unit."""
    return int((millionths * 1000).to_integral_value(ROUND_HALF_EVEN))
