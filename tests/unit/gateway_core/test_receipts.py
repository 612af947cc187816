"""Receipts: estimates before, measures after, and the price of prefill that they teach."""

from __future__ import annotations

import pytest

from gateway.core.packing.plans import Freed, Move
from gateway.core.packing.receipts import PRICES_MIN, RECEIPTS_MAX, Receipt, ReceiptBook
from gateway.core.types import EngineName, SessionId, TurnId, Version

E0, E1 = EngineName("e0"), EngineName("e1")


def opened(book: ReceiptBook, *tokens: int, busy: float = 0.25) -> Receipt:
    moves = [Move(TurnId(f"t{i}"), SessionId(f"s{i}"), E0, E1, n, n / 1000) for i, n in enumerate(tokens)]
    return book.open(Version(3), Freed(E0, 0.5, 20.0, busy), moves, "why", now=100.0, unix_s=1e9)


def test_both_figures_of_a_move_that_was_made() -> None:
    book = ReceiptBook()
    receipt = opened(book, 300, 200, 100)
    assert (receipt.emptied_after_s, receipt.gain_measured_s, receipt.price_measured_s) == (None, None, 0)
    book.settle(receipt, receipt.moves[0].move, "moved", 0.4)
    book.settle(receipt, receipt.moves[1].move, "moved", 0.1)
    book.settle(receipt, receipt.moves[2].move, "ended")
    book.emptied(receipt, 102.0)
    book.ended(receipt, 142.0)
    assert receipt.price_measured_s == pytest.approx(0.5)
    assert receipt.emptied_after_s == 2.0
    assert receipt.gain_measured_s == pytest.approx(40 * 0.75), "so long the tail would have held the rest of it"
    assert [(m.outcome, m.pause_s) for m in receipt.moves] == [("moved", 0.4), ("moved", 0.1), ("ended", None)]


def test_an_engine_that_never_was_empty_gained_nothing_that_could_be_measured() -> None:
    book = ReceiptBook()
    receipt = opened(book, 300)
    book.settle(receipt, receipt.moves[0].move, "failed")
    book.ended(receipt, 142.0)
    assert (receipt.emptied_after_s, receipt.gain_measured_s) == (None, None)


def test_an_outcome_is_said_once() -> None:
    book = ReceiptBook()
    receipt = opened(book, 300)
    book.settle(receipt, receipt.moves[0].move, "ended")
    with pytest.raises(AssertionError):
        book.settle(receipt, receipt.moves[0].move, "moved", 1.0)


def test_the_price_of_prefill_is_learnt_from_pauses() -> None:
    book = ReceiptBook()
    receipt = opened(book, *(500 for _ in range(PRICES_MIN)))
    for i in range(PRICES_MIN):
        assert book.prefill_tokens_per_s(1000.0) == 1000.0
        book.settle(receipt, receipt.moves[i].move, "moved", 0.1 if i else 9.0)
    assert book.prefill_tokens_per_s(1000.0) == 5000.0


def test_receipts_are_bounded() -> None:
    book = ReceiptBook()
    for _ in range(RECEIPTS_MAX + 5):
        opened(book, 1)
    assert len(book.receipts) == RECEIPTS_MAX
    assert book.receipts[-1].number == RECEIPTS_MAX + 5
