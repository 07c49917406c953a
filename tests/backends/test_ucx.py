from tests.conftest import require

require("ucx")
from kvxfer.testing import ConformanceSuite  # noqa: E402
from kvxfer_ucx import UcxTransport  # noqa: E402


class TestUcx(ConformanceSuite):
    backend = UcxTransport
