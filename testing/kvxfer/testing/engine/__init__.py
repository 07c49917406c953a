"""A small simulated engine, to test engines and back ends with: blocks in numpy memory, and a check of every byte.

What a prompt's KV holds follows from its digest, so two engines agree on it without a word between them::

    with PagedEngine() as p, PagedEngine(memory=PagedMemory(ranks=2, seed=1)) as d:
        ticket = p.offer("r", 50)
        d.load("r", ticket, 50)
        assert "r" in d.until("r").loaded
        d.verify()

``PagedEngine`` stands on the two sides of ``kvxfer.engine``, and ``AgentEngine`` on bare agents with a directory. Either can be the
other end of a connection that is tested. All of it runs in the calling thread, apart from the threads of the agents.
"""

from kvxfer.testing.engine.bare import AgentEngine
from kvxfer.testing.engine.conversation import ConversationEngine, Turn
from kvxfer.testing.engine.defaults import FACTS, until
from kvxfer.testing.engine.memory import Content, PagedMemory
from kvxfer.testing.engine.paged import PagedEngine

__all__ = ["FACTS", "AgentEngine", "Content", "ConversationEngine", "PagedEngine", "PagedMemory", "Turn", "until"]
