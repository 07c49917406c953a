"""Spans of loads and offers in the traces of their requests, if vLLM exports traces (``--otlp-traces-endpoint``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

__all__ = ["LOAD", "OFFER", "RequestSpans"]

LOAD, OFFER = "kvxfer.load", "kvxfer.offer"
"""A load's span lasts from the request's arrival until its KV is here or will not come; an offer's from the request's end until other
engines have fetched its KV or will not fetch it."""


class RequestSpans:
    """The open spans; one thread. A request that came without a trace has no span."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._tracer: Any = None
        self._open: dict[tuple[str, str], Any] = {}
        settings = getattr(vllm_config, "observability_config", None)
        if getattr(settings, "otlp_traces_endpoint", None) is not None:
            from opentelemetry import trace  # vLLM refuses an endpoint if this is not installed

            self._tracer = trace.get_tracer("kvxfer")  # uses the provider that vLLM has set, or will set

    def begin(self, name: str, request: Request, transfer: str) -> None:
        """Open a span of this name for a request."""
        headers = getattr(request, "trace_headers", None)
        if self._tracer is None or not headers:
            return
        from vllm.tracing import extract_trace_context

        attributes = {"kvxfer.request": request.request_id, "kvxfer.transfer": transfer}
        context = extract_trace_context(headers)
        self._open[name, request.request_id] = self._tracer.start_span(name, context=context, attributes=attributes)

    def end(self, name: str, request: str, outcome: str | None = None) -> None:
        """Close a request's span of this name, if there is one."""
        span = self._open.pop((name, request), None)
        if span is not None:
            if outcome is not None:
                span.set_attribute("kvxfer.outcome", outcome)
            span.end()

    def __len__(self) -> int:
        """Return how many are open."""
        return len(self._open)
