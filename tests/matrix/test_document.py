"""Compares the table in docs/clients.md with the tests that the matrix runs."""

import inspect

from tests.docs.test_docs import ROOT, names_in, table
from tests.matrix import test_matrix
from tests.matrix.clients import CANNOT, KINDS

DOCUMENT = ROOT / "docs" / "clients.md"


def test_table_matches_the_tested_features() -> None:
    sdks = DOCUMENT.read_text().partition("| feature | test | ")[2].splitlines()[0].strip("| ").split(" | ")
    rows = {names_in(test)[0]: dict(zip(sdks, cells, strict=True)) for _, test, *cells in table(DOCUMENT, "clients")}
    run = {name for name, test in inspect.getmembers(test_matrix, inspect.isfunction) if name.startswith("test_")}
    assert set(rows) == run
    assert {kind.sdk for kind in KINDS} <= set(sdks)
    cells = [(sdk, row.removeprefix("test_"), cell) for row, by_sdk in rows.items() for sdk, cell in by_sdk.items()]
    assert {(sdk, row) for sdk, row, cell in cells if cell != "yes"} == set(CANNOT)
