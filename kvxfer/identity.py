"""Names that two engines agree on: transfers, epochs, generations, digests, keys."""

import hashlib
import os
import re
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvxfer.errors import KvxferError

# Counts the times that an engine gave up and offered anew; meaningful together with its epoch only.
Generation: TypeAlias = int

_PREFIX = re.compile(r"(?:cmpl|chatcmpl|generate-tokens)-")
_CHILD = re.compile(r"([0-9]+)_")
_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")
_PROMPT = re.compile(r"-([0-9]+)\Z")


class IdentityError(KvxferError):
    """An id or an ingredient of a digest cannot be used: no transfer may be made from it."""


class External(msgspec.Struct, frozen=True):
    """What is left of an engine's request id without the engine's additions.

    base: the id that came from outside (an X-Request-Id header, say).
    prompt: index within a batched completion, else 0.
    child: index within n > 1 samples of one prompt, None if there is only one.
    """

    base: str
    prompt: int
    child: int | None


class TransferId(msgspec.Struct, frozen=True, order=True):
    """Names the KV of one prompt of one request, the same on both sides. Opaque: use the constructors below.

    Their results never collide with one another's: the base begins with where the name came from.
    """

    base: str
    prompt: int

    @classmethod
    def derived(cls, external: External) -> "TransferId":
        """From an external id that the router gave both sides. Children of n > 1 share it."""
        return cls("ext/" + external.base, external.prompt)

    @classmethod
    def routed(cls, name: str, external: External) -> "TransferId":
        """From a name that the router minted for the HTTP request; `external` tells the prompts of a batch apart."""
        return cls("router/" + name, external.prompt)

    @classmethod
    def mint(cls, epoch: int, external: External) -> "TransferId":
        """By the producer of that epoch, for a consumer that is told the result."""
        return cls(f"own/{epoch:016x}/{external.base}", external.prompt)

    def __str__(self) -> str:
        return f"{self.base}#{self.prompt}"
