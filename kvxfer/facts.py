"""What all KV of an engine depends on, whatever the request: named facts, such as weights, dtype and quantisation.

Two engines may exchange KV only if they state the same facts. They say so at first contact, by name and with both
values; and the facts' hash goes into every digest, so that what was offered under other facts is never taken.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from msgspec import Meta

from kvxfer.errors import ConfigError
from kvxfer.identity import key

__all__ = ["Facts", "check", "difference", "sealed", "settings_hash"]

MOST, NAME, TEXT = 32, 40, 200

Facts = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=NAME)], Annotated[str, Meta(max_length=TEXT)]],
    Meta(max_length=MOST),
]
"""Short texts by short names; the order is that in which they are told."""

ADVICE = (
    "serve the same model by the same settings on both (where only checkpoints differ that are known to be one model, "
    "name it for both by the setting 'model')"
)


def check(facts: Mapping[str, str]) -> dict[str, str]:
    """Return the facts, if they are few, short and printable.

    Raises:
        ConfigError: They are not; the message names the fact.
    """
    if not isinstance(facts, Mapping):
        raise ConfigError(f"facts must be a mapping of texts by name, not a {type(facts).__name__}")
    if len(facts) > MOST:
        raise ConfigError(f"{len(facts)} facts are more than {MOST}; state a hash of some")
    for name, text in facts.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise ConfigError(f"the fact {name!r:.60} must be a text by a name, not {text!r:.60}")
        if not 0 < len(name) <= NAME or len(text) > TEXT or not (name + text).isprintable():
            raise ConfigError(
                f"the fact {name[:NAME]!r}: {text[:TEXT]!r} is not up to {NAME} and {TEXT} printable characters; "
                "state a hash of it"
            )
    return dict(facts)


def difference(ours: Mapping[str, str], theirs: Mapping[str, str], there: str) -> str | None:
    """Say in what two engines differ, with both values and what to do; ``None`` if in nothing.

    ``there`` says where the other is, such as ``"at the producer"``.
    """
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if not names:
        return None
    told = "; ".join(f"{_shown(name)}: {_value(ours, name)} here, {_value(theirs, name)} {there}" for name in names)
    return f"the models differ: {told}; {ADVICE}"


def sealed(facts: Mapping[str, str]) -> str:
    """Return a hash of the facts for digests, whatever their order.

    Raises:
        ConfigError: As ``check`` does.
    """
    return hashlib.blake2b(key(*sorted(check(facts).items())), digest_size=16).hexdigest()


def settings_hash(settings: Mapping[str, Any], without: Collection[str]) -> str:
    """Return a hash of a model's settings for a fact, without those of these names, however deep they lie."""

    def essential(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: essential(inner) for name, inner in value.items() if name not in without}

    text = json.dumps(essential(settings), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _value(facts: Mapping[str, str], name: str) -> str:
    return _shown(facts[name]) if name in facts else "not stated"


def _shown(text: str) -> str:
    """Return a peer's text for people to read, with nothing in it that could pass for a line of its own."""
    return text if text.isprintable() else ascii(text)
