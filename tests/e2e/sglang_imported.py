"""What an SGLang server has imported when it is ready: of a process that has imported this, servers are forked."""

import gc

from tests.sglang import overlay

gc.disable()  # until all is imported
overlay.install()

from sglang.launch_server import run_server  # noqa: E402, F401
from sglang.srt.disaggregation.checksum import KvChecksumComputer  # noqa: E402, F401
from sglang.srt.entrypoints import http_server  # noqa: E402, F401
from sglang.srt.managers import detokenizer_manager, scheduler  # noqa: E402, F401
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402, F401
from sglang.srt.models import registry  # noqa: E402, F401
from sglang.srt.plugins import load_plugins  # noqa: E402, F401
from sglang.srt.server_args import prepare_server_args  # noqa: E402, F401

gc.freeze()
gc.enable()
