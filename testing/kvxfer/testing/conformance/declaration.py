"""What a back end says about itself."""

import os

import pytest

from kvxfer.errors import ConfigError
from kvxfer.testing.conformance.suite import Suite
from kvxfer.transport import registry
from kvxfer.transport.contract import CONTRACTS, Verb


class Declaration(Suite):
    """Clauses about what a back end declares."""

    def test_the_class_can_be_found(self) -> None:
        """``module:Class`` loads the class, which has a name and was written for a contract that kvxfer accepts.

        Users write ``name`` into their configuration, and the entry point has it too. Write ``contract`` as a number: do not
        copy ``CONTRACT_VERSION`` at run time.
        """
        cls = self.backend
        assert cls.name and cls.name == cls.name.lower()
        assert cls.contract in CONTRACTS
        assert registry.load(f"{cls.__module__}:{cls.__qualname__}") is cls

    def test_capabilities_are_consistent(self) -> None:
        """There is a way to move bytes, SEND and RECV come together, and the memory under test is among the kinds.

        The answer does not change over time.
        """
        transport = self.backend("agent", self.options)
        try:
            c = transport.capabilities
            assert c.verbs and c.verbs <= set(Verb)
            assert (Verb.SEND in c.verbs) == (Verb.RECV in c.verbs)
            assert self.memory in c.memory
            assert c.run_bytes > 0 and c.may_block_s > 0
            assert c.abort in ("batch", "peer") and c.quiet in (
                "batch",
                "peer_close",
                "later",
                "backend_reset",
                "never",
            )
            assert transport.capabilities == c
            active, idle = transport.poll_interval_s
            assert 0 < active <= idle
        finally:
            transport.close()

    def test_probe_tells_without_a_trace(self) -> None:
        """``probe`` gives its reason in words, and leaves the process's environment as it was.

        A library that changes ``UCX_*`` or ``LD_*`` when it is imported would affect other back ends.
        """
        before = dict(os.environ)
        probe = self.backend.probe()
        assert probe.usable, probe.reason
        assert probe.reason and self.memory in probe.memory
        assert all(isinstance(k, str) and isinstance(v, str) for k, v in probe.facts.items())
        assert dict(os.environ) == before

    def test_an_unknown_option_is_named(self) -> None:
        """A misspelt option raises a ``ConfigError`` that quotes it, before anything has started."""
        with pytest.raises(ConfigError, match="no_such_option"):
            self.backend("agent", {**self.options, "no_such_option": 1})
