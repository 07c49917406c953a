"""Loads and offers stand in the traces of the requests that they are for."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import tests.vllm.engine as made
from tests.vllm.cases import OFFER, check
from tests.vllm.conftest import Make
from tests.vllm.engine import prompt
from tests.vllm.wire import Wire

TRACE, PARENT = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
HEADERS = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01"}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Where spans go, as vLLM would have set it up."""
    found, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return found


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    """The same, with ``--otlp-traces-endpoint``."""
    plain = made.vllm_config

    def with_endpoint(*args: Any, **more: Any) -> Any:
        config = plain(*args, **more)
        config.observability_config.otlp_traces_endpoint = "http://127.0.0.1:4317"
        return config

    monkeypatch.setattr(made, "vllm_config", with_endpoint)
    return exporter


def moved(make: Make, wire: Wire, fails: bool, **more: Any) -> None:
    p, d = make(), make()
    text = prompt(60)
    at_p = p.add(text, OFFER, n=1, **more)
    p.run(until=at_p)
    p.step()
    wire.paused = fails
    name = d.add(text, p.done[at_p].params, **more)
    d.steps(2)
    for load in wire.loads(d) if fails else ():
        wire.fail(load, "the link broke")
    wire.paused = False
    d.run(p)
    check(d, name, text)


@pytest.mark.parametrize(("fails", "outcome"), [(False, "delivered"), (True, "peer_lost")])
def test_in_the_trace_of_the_request(
    traced: InMemorySpanExporter, make: Make, wire: Wire, fails: bool, outcome: str
) -> None:
    moved(make, wire, fails, trace_headers=HEADERS)
    spans: dict[str, ReadableSpan] = {span.name: span for span in traced.get_finished_spans()}
    assert set(spans) == {"kvxfer.load", "kvxfer.offer"} and len(traced.get_finished_spans()) == 2
    for span in spans.values():
        assert span.parent is not None and (span.parent.trace_id, span.parent.span_id) == (TRACE, PARENT)
    load, offer = spans["kvxfer.load"].attributes or {}, spans["kvxfer.offer"].attributes or {}
    assert load["kvxfer.outcome"] == outcome and load["kvxfer.transfer"] == offer["kvxfer.transfer"]


def test_a_request_without_a_trace_has_none(traced: InMemorySpanExporter, make: Make, wire: Wire) -> None:
    moved(make, wire, False)
    assert not traced.get_finished_spans()


def test_without_an_endpoint_there_are_none(make: Make, wire: Wire, exporter: InMemorySpanExporter) -> None:
    moved(make, wire, False, trace_headers=HEADERS)
    assert not exporter.get_finished_spans()
