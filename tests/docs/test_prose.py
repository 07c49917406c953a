"""No sentence has to be read twice, and no page is older than the code: the rules are in `tests/docs/lint.py`, which `make lint` runs."""

from tests.docs import lint


def test_prose_and_pages_keep_the_rules() -> None:
    assert not lint.findings()
