"""Named facts that all KV of an engine depends on, whatever the request: weights, dtype, quantisation and the like.

Two engines may exchange KV only if they state the same facts. They compare them at first contact, where an error names
those that differ, with both values. Their hash also goes into every digest, so that KV offered under other facts is never taken.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from msgspec import Meta

from kvxfer.errors import ConfigError
from kvxfer.identity import key
from kvxfer.text import escaped

__all__ = ["Facts", "check", "difference", "sealed", "settings_hash"]

MAX_FACTS, MAX_NAME, MAX_TEXT = 32, 40, 200

Facts = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=MAX_NAME)], Annotated[str, Meta(max_length=MAX_TEXT)]],
    Meta(max_length=MAX_FACTS),
]
"""Short texts by short names; messages list them in this order."""


def check(facts: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of the facts, once they are known to be few, short and printable.

    Raises:
        ConfigError: There are too many, or one is not; the message names it.
    """
    if not isinstance(facts, Mapping):
        raise ConfigError(f"facts must be a mapping of texts by name, not a {type(facts).__name__}")
    if len(facts) > MAX_FACTS:
        raise ConfigError(f"{len(facts)} facts are more than {MAX_FACTS}; state a hash of some")
    for name, text in facts.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise ConfigError(f"the fact {name!r:.60} must be a text by a name, not {text!r:.60}")
        if not 0 < len(name) <= MAX_NAME or len(text) > MAX_TEXT or not (name + text).isprintable():
            raise ConfigError(
                f"the fact {name[:MAX_NAME]!r}: {text[:MAX_TEXT]!r} is not up to {MAX_NAME} and {MAX_TEXT} printable characters; "
                "state a hash of it"
            )
    return dict(facts)


def difference(ours: Mapping[str, str], theirs: Mapping[str, str], there: str) -> str | None:
    """Describe the facts in which two engines differ, with both values; ``None`` if they do not.

    ``there`` says where the other engine is, such as ``"at the producer"``.
    """
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if not names:
        return None
    told = "; ".join(f"{escaped(name)}: {_value(ours, name)} here, {_value(theirs, name)} {there}" for name in names)
    return f"the models differ: {told}"


def sealed(facts: Mapping[str, str]) -> str:
    """Return a hash of the facts for use in digests, whatever their order.

    Raises:
        ConfigError: The facts are not acceptable; see ``check``.
    """
    return hashlib.blake2b(key(*sorted(check(facts).items())), digest_size=16).hexdigest()


def settings_hash(settings: Mapping[str, Any], without: Collection[str]) -> str:
    """Return a hash of a model's settings, to be stated as a fact; names in ``without`` are left out at any depth."""

    def essential(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: essential(inner) for name, inner in value.items() if name not in without}

    text = json.dumps(essential(settings), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _value(facts: Mapping[str, str], name: str) -> str:
    return escaped(facts[name]) if name in facts else "not stated"
