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
    """Opens spans; one thread. A request that came without a trace has no span."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._tracer: Any = None
        settings = getattr(vllm_config, "observability_config", None)
        if getattr(settings, "otlp_traces_endpoint", None) is not None:
            from opentelemetry import trace  # vLLM refuses an endpoint if this is not installed

            self._tracer = trace.get_tracer("kvxfer")  # uses the provider that vLLM has set, or will set

    def begin(self, name: str, request: Request, transfer: str) -> Any:
        """Open and return a span of this name for a request; None if it has none."""
        headers = getattr(request, "trace_headers", None)
        if self._tracer is None or not headers:
            return None
        from vllm.tracing import extract_trace_context

        attributes = {"kvxfer.request": request.request_id, "kvxfer.transfer": transfer}
        context = extract_trace_context(headers)
        return self._tracer.start_span(name, context=context, attributes=attributes)
