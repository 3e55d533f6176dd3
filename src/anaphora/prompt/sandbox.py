"""A Jinja environment for templates nobody has vetted.

A chat template comes with a model file, so it may be anything. Jinja's own sandbox keeps it away
from Python's inner parts; the budget here keeps it from running or growing without end. Every
loop, call and operation whose work or result depends on the data is paid for *before* it is done,
in units of about one call, one loop step, or 64 characters. Units are counted, not seconds: the
same template and conversation always give the same prompt or the same error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import Environment, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from anaphora.errors import TemplateError

BASE_BUDGET = 500_000
BUDGET_FACTOR = 64
"""How many times over a template may go through the data it is given."""

_CHARACTERS_PER_UNIT = 64
_ITEMS_PER_UNIT = 16
_INTEGER_BITS = 4096
_WIDTH = 9999

# Random results have no place in a prompt; the others build layouts no chat template needs.
_NO_FILTERS = {
    *("random", "batch", "slice", "center", "wordwrap", "xmlattr"),
    *("urlize", "pprint", "filesizeformat", "striptags"),
}
_NO_GLOBALS = {"lipsum"}
# These cost the same whatever they are applied to.
_FREE_FILTERS = {"length", "count", "first", "last", "default", "d", "safe", "attr", "items"}
# These run Python for every item.
_ITEM_FILTERS = {
    *("map", "select", "reject", "selectattr", "rejectattr"),
    *("sort", "dictsort", "groupby", "unique", "min", "max", "sum"),
}
# These look at everything inside their arguments.
_DEEP_FILTERS = {
    *("join", "string", "tojson", "format", "sort", "dictsort", "groupby", "unique"),
    *("min", "max", "sum", "replace", "escape", "e", "forceescape", "urlencode"),
}
_DEEP_TESTS = {
    *("==", "!=", "<", "<=", ">", ">=", "eq", "equalto", "ne", "lt", "lessthan", "le"),
    *("gt", "greaterthan", "ge", "in"),
}
_STRING_METHODS = {
    *("capitalize", "casefold", "center", "count", "endswith", "find", "format", "index"),
    *("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "islower", "isnumeric"),
    *("isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition"),
    *("removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition"),
    *("rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title"),
    *("upper", "zfill"),
}
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\d{5}|\*)")
_WIDE_FORMAT = re.compile(r"\d{5}|:[^{}]*\{")


class Budget:
    """What one rendering may still spend."""

    def __init__(self, units: int) -> None:
        self._left = units

    def spend(self, units: int) -> None:
        self._left -= units
        if self._left < 0:
            raise TemplateError(
                "the chat template does too much work or writes too much for this conversation: "
                "it may be broken or hostile; give another one as chat_template"
            )

    def weigh(self, value: Any) -> None:
        """Pay for going through everything inside ``value``, shared parts as often as they
        are met: nested lists can be exponentially longer in print than in memory."""
        if isinstance(value, str):
            self.spend(size(value))
            return
        waiting = [value]
        while waiting:
            item = waiting.pop()
            self.spend(1 + size(item))
            if isinstance(item, Mapping):
                waiting.extend(item)
                waiting.extend(item.values())
            elif isinstance(item, list | tuple):
                waiting.extend(item)
            elif isinstance(item, Namespace):
                raise TemplateError("the chat template prints or compares a namespace")


def size(value: Any) -> int:
    """Units for going through ``value`` itself, not what is inside its items."""
    if isinstance(value, str):
        return len(value) // _CHARACTERS_PER_UNIT
    if isinstance(value, list | tuple | Mapping | range):
        return len(value) // _ITEMS_PER_UNIT
    return 0


_budget: ContextVar[Budget] = ContextVar("budget")


@contextmanager
def limited(units: int) -> Iterator[Budget]:
    """A new budget for what is compiled or rendered in this context."""
    budget = Budget(units)
    token = _budget.set(budget)
    try:
        yield budget
    finally:
        _budget.reset(token)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Set up as Hugging Face's ``apply_chat_template`` does it, within the current budget."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        # Unoptimized, and with a finalizer that wants the context: nothing runs at compile time.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_print,
            extensions=[loopcontrols, GenerationBlock],
        )
        self.filters["tojson"] = _tojson
        self.filters = {
            name: _metered_filter(name, function)
            for name, function in self.filters.items()
            if name not in _NO_FILTERS
        }
        self.filters |= {"_iterate": _iterate, "_weigh": _weigh, "_measure": _measure}
        tests: dict[str, Any] = dict(self.tests)
        for name in _DEEP_TESTS:
            tests[name] = _metered_test(tests[name])
        self.tests = tests
        for name in _NO_GLOBALS:
            del self.globals[name]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Metering().visit(super()._parse(source, name, filename))
        assert isinstance(tree, nodes.Template)
        return tree.set_environment(self)  # type: ignore[return-value]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in _STRING_METHODS
        return not isinstance(obj, int | float | bytes) and super().is_safe_attribute(
            obj, attr, value
        )

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        method = super().wrap_str_format(value)
        if method is None:
            return None

        def formatted(*args: Any, **kwargs: Any) -> str:
            _refuse_width(_WIDE_FORMAT.search(value.__self__))
            _budget.get().weigh([*args, *kwargs.values()])
            return method(*args, **kwargs)

        return formatted

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.spend(1)
        if isinstance(obj, LoopContext) and args:
            args = (_iterate(args[0]), *args[1:])
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            args = _pay_for_method(budget, owner, obj.__name__, args)
        result = super().call(context, obj, *args, **kwargs)
        budget.spend(size(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        numbers = [abs(side).bit_length() for side in (left, right) if isinstance(side, int)]
        if max(numbers, default=0) > _INTEGER_BITS:
            raise TemplateError("the chat template computes with a number that is too large")
        if operator == "**" and len(numbers) == 2 and numbers[0] * abs(right) > _INTEGER_BITS:
            raise TemplateError("the chat template computes a power that is too large")
        if operator == "*" and len(numbers) == 1:
            sequence, count = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(sequence, str):
                budget.spend(len(sequence) * max(count, 0) // _CHARACTERS_PER_UNIT)
            elif isinstance(sequence, list | tuple):
                budget.spend(len(sequence) * max(count, 0) // _ITEMS_PER_UNIT)
        elif operator == "+":
            budget.spend(size(left) + size(right))
        elif operator == "%" and isinstance(left, str):
            _refuse_width(_WIDE_PERCENT.search(left))
            budget.weigh(right)
        return super().call_binop(context, operator, left, right)


class GenerationBlock(Extension):
    """``{% generation %}``: marks an answer for training; here its content is just rendered."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Metering(NodeTransformer):
    """Puts the budget's filters around what Jinja compiles to plain Python."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_iterate")
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "_weigh")
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "_weigh")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(part, "_weigh") for part in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_measure") if isinstance(node.arg, nodes.Slice) else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        # As a constant it passes the finalizer, which pays for it.
        return nodes.Const(node.data, lineno=node.lineno)


def _filtered(node: nodes.Expr | nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@pass_context
def _print(_context: Context, value: Any) -> Any:
    _budget.get().spend(1)
    return _weigh(value)


def _iterate(value: Any) -> Any:
    items = value if isinstance(value, list | tuple) else list(value)
    _budget.get().spend(1 + len(items))
    return items


def _weigh(value: Any) -> Any:
    _budget.get().weigh(value)
    return value


def _measure(value: Any) -> Any:
    _budget.get().spend(1 + size(value))
    return value


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # Some filters get the environment or the like as their first argument.
    skip = 1 if getattr(function, "jinja_pass_arg", None) else 0

    @wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.spend(1)
        given, value, rest = args[:skip], args[skip], args[skip + 1 :]
        if isinstance(value, Iterator):
            value = list(value)
        if name not in _FREE_FILTERS:
            budget.spend(size(value))
        if name in _ITEM_FILTERS and hasattr(value, "__len__"):
            budget.spend(len(value))
        if name in _DEEP_FILTERS:
            budget.weigh([value, *rest, *kwargs.values()])
        if pay := _FILTER_COSTS.get(name):
            pay(budget, value, *rest, **kwargs)
        result = function(*given, value, *rest, **kwargs)
        budget.spend(size(result))
        return result

    return metered


def _metered_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def metered(*args: Any) -> Any:
        _budget.get().weigh([arg for arg in args if not isinstance(arg, Environment)])
        return function(*args)

    return metered


def _pay_for_method(budget: Budget, text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    budget.spend(size(text))
    if name in ("center", "ljust", "rjust", "zfill"):
        _refuse_width(isinstance(args[0], int) and args[0] > _WIDTH)
    elif name == "replace":
        _pay_for_replace(budget, text, *args)
    elif name == "join":
        items = list(args[0])
        _pay_for_join(budget, items, text)
        return (items,)
    return args


def _pay_for_replace(budget: Budget, value: Any, old: Any, new: Any, count: Any = None) -> None:
    budget.spend(str(value).count(str(old)) * len(str(new)) // _CHARACTERS_PER_UNIT)


def _pay_for_join(budget: Budget, value: Any, d: Any = "", attribute: Any = None) -> None:
    budget.weigh(value)
    if hasattr(value, "__len__"):
        budget.spend(len(value) * len(str(d)) // _CHARACTERS_PER_UNIT)


def _pay_for_indent(
    budget: Budget, s: Any, width: Any = 4, first: bool = False, blank: bool = False
) -> None:
    columns = width if isinstance(width, int) else len(str(width))
    _refuse_width(columns > _WIDTH)
    budget.spend((str(s).count("\n") + 1) * columns // _CHARACTERS_PER_UNIT)


def _pay_for_json(budget: Budget, x: Any, *args: Any, **kwargs: Any) -> None:
    for layout in (*args, *kwargs.values()):
        _refuse_width(isinstance(layout, int) and layout > 16)
        _refuse_width(isinstance(layout, str) and len(layout) > 16)
        _refuse_width(isinstance(layout, list | tuple) and len("".join(map(str, layout))) > 16)


def _pay_for_format(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    _refuse_width(_WIDE_PERCENT.search(str(value)))


def _pay_for_round(budget: Budget, value: Any, precision: Any = 0, method: str = "common") -> None:
    _refuse_width(isinstance(precision, int) and abs(precision) > 100)


def _pay_for_sum(budget: Budget, iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise TemplateError("the chat template sums up something other than numbers")


_FILTER_COSTS: dict[str, Callable[..., None]] = {
    "replace": _pay_for_replace,
    "join": _pay_for_join,
    "indent": _pay_for_indent,
    "tojson": _pay_for_json,
    "format": _pay_for_format,
    "round": _pay_for_round,
    "sum": _pay_for_sum,
}


def _refuse_width(refused: object) -> None:
    if refused:
        raise TemplateError("the chat template asks for a width or precision that is too large")


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escaping, as the models have seen it in training."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
