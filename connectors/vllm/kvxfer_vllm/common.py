"""Which part of a prompt a prefill engine has computed, as far as its answer tells.

A decode engine's prompt may be longer than the one that the prefill engine was given: a proxy appends the token that the prefill
engine sampled, or a front end calls its engine again after a tool. It may also be another one. The digest in the answer tells all
three cases apart before anything is asked of the prefill engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvxfer_vllm.params import Told

__all__ = ["CommonPart", "common_part"]


class CommonPart(NamedTuple):
    """What to load: the digest of it, and how many tokens. 0: none, and a peer that offers this digest may be told so.

    differs: Whether the prompt does not begin with the other one.
    rejected: Whether the front end has rejected the request, and all others of its batch.
    """

    digest: bytes
    tokens: int
    differs: bool = False
    rejected: bool = False


def common_part(
    told: Told, facts: str, *, whole: int, most: int, left: int, content: bytes, digest: Callable[[int], bytes]
) -> CommonPart:
    """Return what to load of a prompt.

    If the facts of the two engines differ, so do all digests; the load is left to fail, and its failure names those facts.

    Args:
        told: What the prefill engine has said about its own prompt; it is taken to be as long as this one if it has not said more.
        facts: The hash of this engine's facts.
        whole: The tokens of this prompt.
        most: How many of them may be loaded.
        left: How many tokens at the end of its prompt the prefill engine leaves out, because it offers a state. A state is of use
            whole only.
        content: The digest of this prompt.
        digest: Returns the digest of its first tokens, given their number.
    """
    length = told.tokens + left if told.tokens else whole
    own = digest(length) if length < whole else content
    same = length <= whole and told.digest in (b"", own)
    if told.digest and not same and told.facts in ("", facts):
        # vLLM's front end replaces a prompt that it refuses by one token.
        return CommonPart(told.digest, 0, differs=whole > 1, rejected=whole == 1)
    if not same:
        length, own = whole, content
    tokens = length - left
    if tokens > most:
        tokens = 0 if left else most
    return CommonPart(own if tokens else told.digest or own, tokens)
