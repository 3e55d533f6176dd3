"""What kind of thing changed, judged by how it looks in both texts."""

from __future__ import annotations

import re
from typing import Literal

from anaphora.diagnose.difference import Change

Kind = Literal["timestamp", "date", "uuid", "hash", "id", "counter"]

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?"
    r"|Sep(?:t(?:ember)?)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"
)
_WEEKDAY = r"(?:Mon|Tue(?:s)?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_DATE = (
    r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}"
    rf"|{_MONTH}\.?\s+\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?"
    rf"|\d{{1,2}}\.?\s+{_MONTH}\.?(?:\s+\d{{4}})?|{_MONTH}\s+\d{{4}}"
)
_TIME = (
    r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AaPp]\.?[Mm]\b\.?)?"
    r"(?:\s?(?:Z|UTC|GMT|[+-]\d{2}:?\d{2})\b)?"
)
_EPOCH = r"(?<!\d)(?:1[5-9]|20)\d{8}(?:\.\d+|\d{3})?(?!\d)"
"""Seconds or milliseconds since 1970, for the years 2017 to 2036."""

_PATTERNS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("uuid", re.compile(r"[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}")),
    ("timestamp", re.compile(rf"(?:(?:{_DATE})[T ,]\s?)?{_TIME}|{_EPOCH}")),
    ("date", re.compile(rf"(?:\b{_WEEKDAY}\b,?\s*)?(?:{_DATE})|\b{_WEEKDAY}\b")),
    ("hash", re.compile(r"(?<![0-9A-Za-z])[0-9A-Fa-f]{5,}(?![0-9A-Za-z])")),
    ("id", re.compile(r"(?<!\w)\w[\w-]{4,}(?!\w)")),
    ("counter", re.compile(r"\d+")),
)


def kind_of(change: Change) -> Kind | None:
    """The kind of text that differs; ``None``: nothing that changes by itself."""
    for kind, pattern in _PATTERNS:
        one = _covering(pattern, change.earlier, change.start)
        other = _covering(pattern, change.now, change.start)
        if one and other and one != other and _is_such(kind, one, other):
            return kind
    return None


def _covering(pattern: re.Pattern[str], text: str, place: int) -> str | None:
    """The match of ``pattern`` that ``place`` lies in, or at whose end it lies."""
    for match in pattern.finditer(text):
        if match.start() <= place <= match.end():
            return match[0]
        if match.start() > place:
            break
    return None


def _is_such(kind: Kind, one: str, other: str) -> bool:
    both = one + other
    if kind == "hash":
        return any(c.isdigit() for c in both) and any(c.isalpha() for c in both)
    if kind == "id":
        return all(any(c.isdigit() for c in text) for text in (one, other))
    return True


def same_words(one: str, other: str) -> bool:
    """Whether two texts of data differ only in the order of what is in them."""
    return one != other and sorted(_WORDS.findall(one)) == sorted(_WORDS.findall(other))


_WORDS = re.compile(r"[^\s,{}\[\]]+")
