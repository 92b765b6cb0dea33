"""Covers values.json.encode and values.json.restore: pydantic models as arguments and results."""

from datetime import UTC, datetime
from decimal import Decimal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tickwheel.values.json.call import Signature
from tickwheel.values.json.encode import decode, encode
from tickwheel.values.json.restore import restore


class Line(BaseModel):
    model_config = ConfigDict(strict=True)
    article: str
    price: Decimal


class Order(BaseModel):
    id: int
    placed_at: datetime
    lines: list[Line] = []
    customer: str = Field(default="", alias="customerName")


ORDER = Order(
    id=1, placed_at=datetime(2026, 3, 29, tzinfo=UTC), customerName="Ann",
    lines=[Line(article="tea", price=Decimal("2.50"))],
)  # fmt: skip


def close(order: Order, others: dict[str, Order] | None = None) -> None:
    pass


def test_a_model_goes_as_an_object_and_comes_back_as_the_model():
    body = encode(ORDER)
    assert decode(body)["lines"] == [{"article": "tea", "price": "2.50"}]
    assert restore(decode(body), Order) == ORDER


def test_a_function_gets_the_models_that_its_hints_name():
    signature = Signature.of(close)
    body = signature.pack((ORDER,), {"others": {"a": ORDER}})
    assert signature.unpack(body) == ((), {"order": ORDER, "others": {"a": ORDER}})


def test_an_object_that_does_not_fit_a_model_is_refused_with_the_field():
    with pytest.raises(TypeError, match=r"order: .* is not .*Order: .*\n.*placed_at"):
        Signature.of(close).unpack(b'{"order": {"id": 1}}')


def test_of_a_union_the_model_that_fits_is_chosen():
    assert restore({"article": "tea", "price": "1"}, Order | Line) == Line(
        article="tea", price=Decimal(1)
    )
