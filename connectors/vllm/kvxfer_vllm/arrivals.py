"""What a request of vLLM's offers, loads or asks other engines for, by what its router says: decided once, when it is first seen.

And what its router is told at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvxfer.engine import Prefix, SchedulerSide, Ticket
from kvxfer.errors import KvxferError
from kvxfer.facts import sealed
from kvxfer.failures import FailureKind
from kvxfer.identity import Address, Source
from kvxfer.logs import logger
from kvxfer.text import printable
from kvxfer_vllm.blocks import CachedPrefixes, LocalHits
from kvxfer_vllm.content import RequestContent
from kvxfer_vllm.content.adapters import UnknownAdapterError
from kvxfer_vllm.internals import leave_last_token
from kvxfer_vllm.migration import params_of
from kvxfer_vllm.requests import Batches, KnownRequests, RequestFacts, RequestLog
from kvxfer_vllm.said import (
    KEYS,
    NO_VERB,
    CommonPart,
    ExternalId,
    HintNotes,
    Hints,
    Said,
    UnreadableError,
    common_part,
    external_id,
    held_answer,
    may_be_of_batch,
    read_params,
)
from kvxfer_vllm.said import answer as answer_to_router
from kvxfer_vllm.settings import EngineSetup
from kvxfer_vllm.stats import COMPUTED, Reason

log = logger("kvxfer.vllm")


class Arrivals:
    """Takes in the requests of one engine as they arrive, and answers their routers. One thread."""

    def __init__(
        self,
        setup: EngineSetup,
        side: SchedulerSide,
        hits: LocalHits,
        cached: CachedPrefixes,
        content: RequestContent,
        told: RequestLog,
        batches: Batches,
    ) -> None:
        self._setup, self._side, self._hits, self._cached = setup, side, hits, cached
        self._told, self._batches = told, batches
        self._warned: set[str] = set()  # of adapters
        self.content, self.hints = content, HintNotes()
        self.model = sealed(side.facts)

    def take_in(self, facts: RequestFacts) -> None:
        """Find out what a request offers, loads or asks for. What it is found to be it stays.

        A request is a stranger: whatever is raised because of what it says costs it its part in KV transfer, and nothing else.
        """
        try:
            self._read(facts)
        except Exception as e:
            facts.refused = "its request cannot be read"
            facts.naming, facts.kind, facts.answers = None, "", False
            self._side.offers.withdraw(facts.name, facts.refused)
            self._told.unreadable(facts.name, e)

    def _read(self, facts: RequestFacts) -> None:
        request, said = facts.request, Said()
        self.content.arrived(facts)
        params = request.kv_transfer_params or {}
        if not isinstance(params, Mapping):
            request.kv_transfer_params = None  # of which vLLM, too, takes for granted that it is one
        facts.unmoved = self.content.beside.no_part(request)
        facts.refused = facts.unmoved or self.content.beside.no_load(request)
        try:
            said = read_params(params or self._legacy(facts.name) or {})
            self._take_up(facts, said)
        except UnreadableError as e:
            if isinstance(params, Mapping) and (params.get("do_remote_decode") or params.get("remote_decoder")):
                self._told.not_offered(facts.name, Reason.INVALID, str(e))
            else:
                self._told.not_loaded(facts.name, Reason.PARAMS, str(e))
        except UnknownAdapterError as e:
            self._takes_no_part(said, Reason.ADAPTER)
            (log.debug if e.adapter in self._warned else log.warning)("%s", e)
            self._warned.add(e.adapter)
        except KvxferError as e:  # an id or a prompt that cannot be named: no transfer, the request goes on
            self._takes_no_part(said, Reason.INVALID)
            log.warning("request %s takes no part in KV transfer: %s", printable(facts.name), e)
            self._side.takes_no_part(facts.name, f"it takes no part in KV transfer: {e}")
        if facts.refused is not None and said.loads:
            self._told.not_loaded(facts.name, Reason.STATE, facts.refused)
        if isinstance(params, Mapping):
            self._follow_prefix(facts, params, said)

    def answer(
        self, facts: RequestFacts, ticket: Ticket | None, answer: str, *, whole: bool, held: bool, groups: int
    ) -> dict[str, Any] | None:
        """Return what the router of a request that is over is told; None: nothing.

        Args:
            facts: The request.
            ticket: What it had offered.
            answer: The name of the answer (``SchedulerSide.answer``).
            whole: Whether its KV is good and complete.
            held: Whether its blocks are held for others.
            groups: How many KV-cache groups vLLM's tables have.
        """
        name, request, setup, where = facts.name, facts.request, self._setup, self._side.source
        if ticket is None or not self._side.offers.stands(ticket):
            if ticket is not None and whole:
                why = f"{printable(ticket.transfer)} is given up, as the line of its withdrawal explains"
                self._told.not_offered(name, Reason.GIVEN_UP, why)
            ticket = facts.nothing if whole else None
        if ticket is not None:
            if held:
                self._told.held(facts, str(ticket.transfer))
            sizes = setup.tp, groups, request.num_prompt_tokens
            return answer_to_router(ticket, setup.engine, answer, *sizes, self.model, setup.spread)
        if whole and facts.answers:
            return held_answer(where, setup.engine, name, setup.tp, groups, request.num_computed_tokens)
        return None

    def drop_outdated(self, requests: KnownRequests) -> None:
        """Offer nothing of the requests that may not be computed as they were named, and let nobody find anything of them.

        That is partly with weights that an adapter had before, or with media that another request has under the same name.
        """
        adapters = self.content.adapters
        if adapters.take_replaced():
            for facts in (one for one in requests.all_running() if not adapters.is_same(one)):
                facts.naming = None
                if self._side.ticket(facts.name) is not None:
                    self._told.count(Reason.ADAPTER)
                self._side.offers.withdraw(facts.name, "its adapter was loaded again with other weights")
            self._cached.clear(requests.all_running())  # vLLM caches what these compute under the hashes of before
        if doubted := self.content.media.take_doubted():
            for facts in requests.all_running():
                if any(item.identifier in doubted for item in facts.request.mm_features):
                    self._side.offers.withdraw(facts.name, "two items of media have the name of one of its own")

    def _follow_prefix(self, facts: RequestFacts, params: Mapping[str, Any], said: Said) -> None:
        """Let other engines find what is computed for a request, and look for a prefix of it at those that its router names."""
        request = facts.request
        facts.answers = not (said.empty or said.offers) and self._setup.config.decode_answers
        hints = self.hints.read(params)
        try:
            named = self.content.named(facts)
            if named is None or facts.unmoved is not None:
                return
            self._cached.arrived(facts, lambda tokens: Prefix(tokens, model=self.model, **named))
            if hints.sources and (why := self._asks_nobody(facts, said)) is not None:
                self.hints.unused(KEYS[hints.kind], why)
            elif hints.sources:
                self._ask(facts, Prefix(request.prompt_token_ids or (), model=self.model, **named), hints)
        except KvxferError as e:
            log.debug("request %s is not looked for at other engines, nor found by them: %s", printable(facts.name), e)

    def _asks_nobody(self, facts: RequestFacts, said: Said) -> str | None:
        """Return why no engine is asked that the hints of a request name; None if they are asked."""
        if said.loads:
            return "stands beside a key that names the engine from which the whole prompt is loaded"
        if not self._setup.trusts:
            return (
                "names engines to ask, and any client could name one: set 'key_file' or 'peers', or 'trust_sources' if nobody else can "
                "send this engine a request"
            )
        if not self._setup.consumes:
            return "asks this engine to load a prefix, which its kv_role does not allow: set kv_both"
        if self._setup.replayed:
            return "asks this engine to load a prefix, but its model computes the window behind each prefix again"
        if facts.refused is not None:
            return f"asks for a prefix of a request that loads nothing: {facts.refused}"
        return None

    def _ask(self, facts: RequestFacts, prompt: Prefix, hints: Hints) -> None:
        sources = [Source(where.host, where.port, 0) for where in hints.sources]
        tokens = max(0, facts.request.num_prompt_tokens - self._setup.computed)
        if self._side.ask(facts.name, prompt, sources, tokens, kind=hints.kind):
            facts.kind = hints.kind

    def _takes_no_part(self, said: Said, reason: Reason) -> None:
        if self._setup.produces and said.offers:
            self._told.count(reason)

    def _legacy(self, name: str) -> dict[str, Any] | None:
        """Params out of a request id in the form of P2pNcclConnector, where the configuration allows that."""
        hosts = self._setup.config.legacy_hosts
        if not hosts:
            return None
        own = Address(self._side.source.host, self._side.source.port)
        return params_of(
            external_id(name), produces=self._setup.produces, consumes=self._setup.consumes, own=own, hosts=hosts
        )

    def _take_up(self, facts: RequestFacts, said: Said) -> None:
        name, whole = facts.name, facts.request.num_prompt_tokens
        offers = self._setup.produces and said.offers
        loads = said.given_up(whole) or (self._setup.consumes and said.loads)
        if not offers and not loads:
            if (why := said.wrong_role) is not None:
                log.warning("request %s %s", printable(name), why)
                self._side.takes_no_part(name, f"it {why}")
            elif self._setup.consumes and said.missing:
                self._told.not_loaded(name, Reason.PARAMS, NO_VERB)
            if said.offers:
                self._told.count(Reason.WRONG_ROLE)
            return
        external, content = external_id(name), self._digest(facts)  # of the whole prompt, before it may be cut
        if offers:
            self._offer(facts, said, external, content)
        if loads:
            # The last prompt token is computed here in any case. An engine that offers a state computes the one before it, too, and of the
            # tokens before both P has no state.
            part = common_part(
                said.told(external),
                self.model,
                whole=whole,
                most=max(0, facts.request.num_prompt_tokens - self._setup.computed),
                left=int(self._setup.recurrent),
                content=content,
                digest=lambda tokens: self._digest(facts, tokens),
            )
            self._load(facts, said, external, part)

    def _offer(self, facts: RequestFacts, said: Said, external: ExternalId, content: bytes) -> None:
        """Offer a prompt to other engines, or say why not."""
        request, name = facts.request, facts.name
        transfer = said.offered_id(self._side.source.epoch, external, content)
        ticket = Ticket(transfer, content, self._side.source)
        if facts.unmoved is not None:
            self._told.not_offered(name, Reason.STATE, facts.unmoved)
            return
        if request.resumable:
            why = "vLLM tells nobody of it, because more of its prompt may come (streaming input)"
            self._told.not_offered(name, Reason.STREAMING_INPUT, why)
            return
        if self._setup.spread and (external.prompt or external.child is not None):
            # The answer will tell of one of them, and that is offered by one rank.
            why = "vLLM spreads the prompts and samples of one HTTP request over its data-parallel ranks; send prefill one of them"
            self._told.not_offered(name, Reason.DATA_PARALLEL, why)
            return
        if request.num_prompt_tokens < 1 + self._setup.recurrent:
            # There is no state before its only token, or no token. Of a batch, vLLM relays the params of the first prompt, even if
            # that is this one.
            if may_be_of_batch(name):
                facts.nothing = ticket
            self._told.not_offered(
                name, Reason.NOTHING, "its prompt is too short to leave any KV or state for another engine"
            )
            return
        # All requests of an HTTP request have one time of arrival; a retry has another.
        own = transfer, request.arrival_time
        if self._told.used.get(own) and not self._side.offers.stands(ticket):
            # A router that asks D beside P may have D's answer before vLLM schedules the last sample here: nobody would read its offer.
            self._side.takes_no_part(name, "another sample of its HTTP request has made the offer, which is over")
            return
        if self._setup.recurrent:  # not before it is known that there will be an offer
            if request.prompt_token_ids is None or request.prompt_embeds is not None:
                raise KvxferError("a recurrent state is not offered for a prompt of embeddings")
            if request.skip_reading_prefix_cache:
                raise KvxferError("a request that needs its whole prompt computed offers no recurrent state")
            if request.num_output_tokens:
                raise KvxferError("a request that has produced tokens offers no recurrent state")
            leave_last_token(request)
        # All requests for which a router has one name have one answer, too.
        answer = str(transfer) if said.name is not None else self._batches.answer(facts, external, request.arrival_time)
        tokens, stops = request.num_prompt_tokens, request.max_tokens == 1
        if not self._side.offer(name, transfer, content, tokens, stops=stops, answer=answer):
            why = f"{printable(transfer)} is offered with other content, or its last offer is just ending"
            self._told.not_offered(name, Reason.OTHER_CONTENT, why)
            return
        self._told.used.put(own, True, 0.0)

    def _load(self, facts: RequestFacts, said: Said, external: ExternalId, part: CommonPart) -> None:
        """Load this part of a prompt from where the params say, unless that is known to be in vain."""
        request, name, want = facts.request, facts.name, said.wanted(external, part.digest)
        if isinstance(want, str):
            self._told.not_loaded(name, Reason.PARAMS, want)
            return
        transfer, source = want
        if part.rejected:
            self._side.loads.decline(transfer, part.digest, source, said.answer or "")
            self._told.expect(facts, str(transfer), None)
            return
        if getattr(request, "abort_immediately", False):
            return  # of the prompt vLLM has only told us that it refuses it, or that its client is gone
        key, answered = said.offer_key(transfer), said.answered  # else P may not have begun
        if key is not None and self._told.used.get(key):
            log.info("request %s is computed here: an earlier one has used the offer of its params", printable(name))
            self._side.takes_no_part(name, "it is computed here: an earlier request has used the offer of its params")
            self._told.expect(facts, str(transfer), None)
            self._told.ended(facts, COMPUTED)
            return
        enough = min(self._setup.block_tokens, part.tokens) if self._setup.partly and not answered else 0
        what = name, transfer, part.digest, source, part.tokens
        took = self._side.load(*what, begun=answered, offered=answered, enough=enough, answer=said.answer)
        self._told.expect(facts, str(transfer), key if took else None)
        facts.end = part.tokens
        if part.differs:
            log.warning(
                "request %s is computed here: its prompt does not begin with that of its params", printable(name)
            )
            self._side.takes_no_part(name, "it is computed here: its prompt does not begin with that of its params")
            self._told.ended(facts, str(FailureKind.DIGEST_DIFFERS))
        if not self._setup.replayed and facts.refused is None:
            # Not later: vLLM looks up what it has of a prompt, then asks us, then takes its blocks; none of those may be lent.
            self._hits.prefetch(request)

    def _digest(self, facts: RequestFacts, tokens: int | None = None) -> bytes:
        """Return the digest of the prompt, or of its first ``tokens`` tokens, with whatever media begin among them."""
        return self.content.digest(facts, self.model, tokens)
