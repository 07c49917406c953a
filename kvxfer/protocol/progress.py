"""How far a transfer has got, in words: what an operator reads who asks why it took so long."""

from __future__ import annotations

import math

from kvxfer.failures import Failure, FailureKind
from kvxfer.protocol.values import HeldUp
from kvxfer.text import size

STILL_S = 2.0
"""Seconds without a byte after which a transfer counts as standing still. Progress is looked at once a second."""

SLOWER, STANDSTILL = 1.5, 3.0
"""How many times longer than ever before nothing may come of what still counts as moving, and after how many it stands still."""

WANTED = {
    HeldUp.CALL: "find out what the device or the back end's library waits for: `py-spy dump --native` of this process shows it",
    HeldUp.DEVICE: "find out what else keeps the device busy, and whether its driver complains",
    HeldUp.SLOT: "see in this engine's log what holds its staging memory, or raise 'staging_bytes'",
    HeldUp.PEER: "read in the producer's log whether its device hangs; else raise its 'staging_bytes'",
}
"""What an operator can do about each reason why a part stands still."""

TELLING = frozenset(
    (FailureKind.TIMED_OUT, FailureKind.PEER_LOST, FailureKind.PEER_UNREACHABLE, FailureKind.BACKEND_FAILED)
)
"""The kinds of failure whose cause shows in how many bytes came, and when."""


def how_far(came: int, announced: int, more: bool, moving: float, still: float, usual: float = STILL_S) -> str:
    """Return how far a transfer has got."""
    whole = f"{size(announced)}{' announced so far' if more else ''}"
    if not came:
        return f"0 of {whole} had come after {moving:.1f} s"
    rate = f", {size(came / moving)}/s" if moving > 0 else ""
    since = (
        "" if came >= announced else f", and nothing for {still:.1f} s" if still > usual else ", and more was coming"
    )
    return f"{size(came)} of {whole} had come in {moving:.1f} s{rate}{since}"


def enriched(
    why: Failure,
    came: int,
    announced: int,
    more: bool,
    moving: float,
    still: float,
    gap: float,
    within: bool,
    held_up: HeldUp | None = None,
) -> Failure:
    """Return a failure with how far its transfer had got, and with advice that follows from that.

    Args:
        why: The failure.
        came: The bytes that have come.
        announced: The bytes that were announced.
        more: Whether more was still to be announced.
        moving: The seconds in which something was on its way.
        still: The seconds since the last byte.
        gap: The longest time in which nothing was told while something was on its way.
        within: Whether the back end has told of bytes of the present part. One that tells of whole messages is silent while it moves one,
            so only a much longer time than ``gap`` means that the transfer stands still, and without this nothing does.
        held_up: What it waits for, if it stands still for want of something other than the link.
    """
    if why.kind not in TELLING:
        return why
    usual = max(STILL_S, SLOWER * gap)
    detail = f"{why.detail}; {how_far(came, announced, more, moving, still, usual)}"
    advice = why.advice
    if why.kind is FailureKind.TIMED_OUT and held_up is not None:
        detail, advice = f"{detail}: {held_up}", WANTED[held_up]
    elif why.kind is FailureKind.TIMED_OUT and came and still <= usual and moving > 0 and came < announced:
        needs = math.ceil(moving * announced / came)
        advice = (
            f"the link is too slow for it: at that rate it takes {needs} s. Set 'transfer_timeout' above that on both engines, or "
            "find out with `kvxfer doctor --peer` why the link is not faster"
        )
    elif why.kind is FailureKind.TIMED_OUT and still > usual and came < announced:
        if within and still > STANDSTILL * gap:
            advice = "bytes stopped coming: check the producer's log, its host, and the network between the two hosts"
        else:
            began = f": {size(came)} had come when the present message began, of" if came else ","
            advice = (
                f"the link is slow, or stands still{began} which this back end does not tell: `kvxfer doctor --peer` measures it; raise "
                "'transfer_timeout' if it is slow, and read in the producer's log whether its device hangs"
            )
    return Failure(why.kind, detail, why.peer, advice)
