"""What the stories of both sides of a request mean: who waited for whom, how much came how fast, and what to set."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.failures import ADVICE, FailureKind
from kvxfer.protocol.messages import Story
from kvxfer.text import size

K = FailureKind

WORDS = {
    "found": "the engines that may hold a prefix had answered",
    "fetched": "its blocks were there, and the workers were told to fetch",
    "began": "the workers began",
    "asked": "the link was up, and the producer was asked",
    "announced": "the producer announced the first part",
    "heard": "the producer announced the last part",
    "last": "the last bytes came",
    "arrived": "all bytes were here",
    "ended": "it ended",
    "seen": "the scheduler knew of the end",
    "begun": "the first tokens were computed",
    "computed": "all tokens were computed",
    "now": "it is not over yet",
}

WAITS = {
    "fetched": "waiting for free blocks of the decode engine, or for the producer to begin",
    "began": "waiting for a step of the decode engine",
    "asked": "making the link",
    "announced": "waiting for the prefill engine to compute or to answer",
    "ended": "moving and checking the bytes",
}
"""What a load waits for before each of these stages, in their order."""


@dataclass(frozen=True)
class Finding:
    """The meaning of a request's stories."""

    ok: bool
    says: str  # what happened, in one sentence
    do: str = ""  # what to do; may be empty


START = "raise 'start_timeout' on the decode engine above the time that requests queue at the prefill engine, or add prefill engines"


def tale(story: Story) -> list[tuple[float, str]]:
    """Return what happened on one side: at which Unix time, and what."""
    began = "the request arrived at the decode engine" if story.role == "consumer" else "the request was offered"
    if story.role == "none":
        return [(story.at, story.text)]
    rows = [(story.at, f"{began} ({story.tokens} tokens)")]
    for stage, seconds in story.stages.items():
        if stage == "last" and story.stages.get("arrived"):
            continue
        words = WORDS.get(stage, stage)
        if stage == "ended":
            words = f"it ended: {story.outcome}"
            if story.role == "producer" and story.came:
                words += f", {size(story.came)} confirmed"
        elif stage in ("last", "arrived") and story.came:
            words += f" ({amount(story)})"
        elif stage == "now":
            words += f": {story.outcome}"
        rows.append((story.at + seconds, words))
    return sorted(rows, key=lambda row: row[0])


def amount(story: Story) -> str:
    """Return how much came, of how much, and how fast."""
    whole = f" of {size(story.announced)}" if story.announced and story.announced != story.came else ""
    rate = f" at {size(story.came / story.moving)}/s" if story.moving > 0 and story.came else ""
    return f"{size(story.came)}{whole}{rate}"


def judge(consumer: Story | None, producer: Story | None, unknown: str = "") -> Finding:
    """Return the verdict on one request.

    Args:
        consumer: What the decode engine says; ``None`` if it does not know the request, or was not asked.
        producer: The same of the prefill engine.
        unknown: The address of the prefill engine, if that has answered that it does not know the request.
    """
    if consumer is None:
        return _unloaded(producer)
    if consumer.role == "none":
        held = (
            "" if producer is None or producer.over else "; the prefill engine still holds its KV until its lease ends"
        )
        return Finding(False, f"the decode engine did not load it: {consumer.text}{held}", _router(consumer.text))
    if not consumer.over:
        return _under_way(consumer, producer)
    if consumer.outcome in ("delivered", "not loaded"):
        return _delivered(consumer)
    return _failed(consumer, producer, unknown)


def _unloaded(producer: Story | None) -> Finding:
    if producer is None or producer.role == "none":
        text = "" if producer is None else producer.text
        return Finding(False, f"the prefill engine did not offer it: {text}", _router(text))
    if producer.outcome == "delivered":
        return Finding(True, f"it was delivered: consumers have confirmed {size(producer.came)}")
    if not producer.over and "computed" not in producer.stages:
        return Finding(
            True, "the prefill engine is still computing it, and no decode engine that was asked knows of it"
        )
    return Finding(
        False,
        f"the prefill engine offered it, and the decode engine that was asked knows nothing of it ({producer.outcome})",
        "check that the router sends the request on, with the prefill engine's params, to this decode engine",
    )


def _under_way(consumer: Story, producer: Story | None) -> Finding:
    since = consumer.stages.get("now", 0.0)
    where = {
        "waiting": "it waits for the prefill engine to begin",
        "open": "it waits for free blocks of the decode engine",
        "shared": "another request of the same prompt loads it",
        "fetching": "it waits for the prefill engine, or its bytes are on their way",
    }.get(consumer.outcome, "its bytes are on their way")
    theirs = ""
    if producer is not None and not producer.over and "computed" not in producer.stages:
        theirs = "; the prefill engine has not computed all of it yet"
    return Finding(
        True, f"it is not over after {since:.1f} s: {where}{theirs}", "ask again, or look at the load of both engines"
    )


def _delivered(consumer: Story) -> Finding:
    if consumer.outcome == "not loaded":
        return Finding(True, consumer.text)
    waits = _waits(consumer)
    total = sum(waits.values())
    stage = max(waits, key=lambda name: waits[name], default="")
    most = f"; most of it, {waits[stage]:.3f} s, went into {WAITS[stage]}" if stage else ""
    return Finding(True, f"it was delivered in {total:.3f} s, {amount(consumer)}{most}")


def _waits(story: Story) -> dict[str, float]:
    """Return the seconds spent before each stage."""
    out, before = {}, 0.0
    for stage in WAITS:
        at = story.stages.get(stage)
        if at is not None:
            out[stage], before = max(at - before, 0.0), max(at, before)
    return out


def _failed(consumer: Story, producer: Story | None, unknown: str) -> Finding:
    """Return the verdict on a load that failed. The failure's own text has how far it got, and advice."""
    kind, says, do = consumer.outcome, consumer.text, ""
    usual = ADVICE.get(kind, "")  # type: ignore[call-overload]
    text, _, advice = (says.removesuffix("; " + usual), "", usual) if says.endswith(usual) else says.rpartition("; ")
    if not text:
        text, advice = says, ""
    asked = consumer.at + consumer.stages["asked"] if "asked" in consumer.stages else None
    if producer is not None and producer.role == "producer":
        computed, ended = (producer.at + producer.stages.get(stage, 0.0) for stage in ("computed", "ended"))
        over = consumer.at + consumer.stages.get("ended", 0.0)
        begun, whole = (
            stage in producer.stages and producer.at + producer.stages[stage] < over for stage in ("begun", "computed")
        )
        if (
            kind in (K.NEVER_OFFERED, K.TIMED_OUT)
            and producer.outcome != K.WITHDRAWN
            and not whole
            and asked is not None
        ):
            text += f"; the prefill engine {'had not computed all of it' if begun else 'still had it in its queue'}"
            do = START
        elif producer.outcome == K.UNFETCHED and asked is not None and ended < asked:
            text += f"; its lease had ended {asked - ended:.1f} s before the decode engine asked"
            do = f"raise 'lease' on the prefill engine above {asked - computed:.0f} s, or add decode engines: so long it took to get there"
        elif producer.outcome in (K.UNFETCHED, K.WITHDRAWN) and asked is None:
            text += "; the prefill engine had it, and was not asked"
        elif (
            producer.outcome not in (kind, "delivered")
            and producer.over
            and (text.partition(": ")[2] or text) not in producer.text
        ):
            theirs = (producer.text or producer.outcome).removesuffix("; " + ADVICE.get(producer.outcome, ""))  # type: ignore[call-overload]
            text += f"; the prefill engine says: {theirs}"
    elif producer is None and unknown and kind in (K.NEVER_OFFERED, K.WITHDRAWN):
        text += f"; the engine at {unknown} knows nothing of it"
        do = (
            "check that this address, and the name that was resolved to it, lead to the engine that computed the prompt; it may have "
            "restarted, or the router sent the prompt to another one"
        )
    elif producer is not None:
        text += f"; the prefill engine says: {producer.text}"
    return Finding(False, text, do or advice)


def _router(text: str) -> str:
    return (
        "compare what the router forwards with docs/router-contract.md: `kvxfer conformance --router URL` tests it"
        if ("router" in text or "params" in text)
        else ""
    )
