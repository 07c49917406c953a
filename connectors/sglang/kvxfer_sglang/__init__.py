"""Disaggregated prefill and decode with SGLang, over kvxfer.

SGLang loads ``plug_in`` in each of its processes (entry-point group ``sglang.srt.plugins``); from then on
``--disaggregation-transfer-backend kvxfer`` is known to it. Importing this loads no SGLang.
"""

from kvxfer_sglang.plugin import plug_in

__all__ = ["plug_in"]
