"""docs/clients.md says what the matrix runs, and what an SDK cannot do."""

import inspect

from tests.docs.test_docs import ROOT, names_in, table
from tests.matrix import test_matrix
from tests.matrix.clients import CANNOT, KINDS

DOCUMENT = ROOT / "docs" / "clients.md"


def test_the_document_names_every_row_and_what_cannot_be_done() -> None:
    sdks = DOCUMENT.read_text().partition("| feature | test | ")[2].splitlines()[0].strip("| ").split(" | ")
    rows = {names_in(test)[0]: dict(zip(sdks, cells, strict=True)) for _, test, *cells in table(DOCUMENT, "clients")}
    run = {name for name, test in inspect.getmembers(test_matrix, inspect.isfunction) if name.startswith("test_")}
    assert set(rows) == run
    assert {kind.sdk for kind in KINDS} <= set(sdks)
    cells = [(sdk, row.removeprefix("test_"), said) for row, told in rows.items() for sdk, said in told.items()]
    assert {(sdk, row) for sdk, row, said in cells if said != "yes"} == set(CANNOT)
