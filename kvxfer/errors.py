"""What kvxfer raises. A message says what happened, to which transfer and peer, and what to do."""


class KvxferError(Exception):
    """Base of all errors that kvxfer raises on purpose."""


class ConfigError(KvxferError):
    """The configuration is wrong; raised before anything has started."""


class TransportError(KvxferError):
    """A back end could not do what was asked of it."""


class PeerError(KvxferError):
    """A peer refused, disappeared or broke the protocol."""


class TransferError(KvxferError):
    """One transfer ended without its bytes.

    Args:
        transfer: The transfer's id, as both sides know it.
        peer: The other side, as the operator would look for it (an address, if there is one).
        what: What happened, in a clause.
        advice: What the operator can do about it, in a sentence.
    """

    def __init__(self, transfer: object, peer: object, what: str, advice: str) -> None:
        super().__init__(f"transfer {transfer} with {peer}: {what}. {advice}")
        self.transfer = transfer
        self.peer = peer
        self.what = what
        self.advice = advice
