"""Shares and values in words."""

from typing import Any

from fedbilevel.errors import readable


def percent(share: Any) -> str:
    """A share for people: never certain if it is not.

    >>> percent(0.0), percent(0.0001), percent(0.123), percent(0.99996), percent(1.0)
    ('0 %', '< 0.1 %', '12.3 %', '> 99.9 %', '100 %')
    """
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    text = f"{100 * share:.1f} %"
    return {"0.0 %": "< 0.1 %", "100.0 %": "> 99.9 %"}.get(text, text)


def probable(probability: float) -> str:
    """The probability that a label is wrong, as an estimate: never 0 or 1.

    >>> probable(1.0), probable(0.5)
    ('> 99.9 %', '50.0 %')
    """
    return percent(min(max(probability, 1e-9), 1 - 1e-9))


def cell(value: Any, most: int = 60) -> str:
    """A value of somebody's table: short, on one line, with nothing that a terminal obeys; nothing if it is missing.

    >>> cell("a\\nb"), cell(0.1 + 0.2), cell(float("nan")), cell("x" * 70, 5), cell("")
    ('a b', '0.3', '', 'xxxxx...', '(empty)')
    """
    if value is None or bool(value != value):
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return readable(" ".join(text.split()), most) or "(empty)"
