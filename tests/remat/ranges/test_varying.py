"""Which sizes of batches vary, learned from shapes alone."""

from __future__ import annotations

from remat.graph_capture.sizes.symbols import Symbol
from remat.ranges.varying import At, LearnedSizes, Shapes

NAMES = {(i, dim): f"{name}_{dim}" for i, name in enumerate(("x", "y")) for dim in range(2)}


def both(*size: int) -> Shapes:
    return (size, size, None)


def ranges(known: LearnedSizes, shapes: Shapes) -> dict[str, tuple[int, int]]:
    known.learn(shapes)
    found, _ = known.ranges_for(shapes)
    known.planned |= found
    return {name: (one.low, one.high) for name, one in found.items()}


def test_nothing_varies_before_a_second_batch_differs() -> None:
    known = LearnedSizes(NAMES)
    assert not known.learn(both(4, 48))
    assert not known.learn(both(4, 48))
    assert known.symbols_at(both(4, 48)) == {}
    assert known.learn(both(4, 63))
    assert known.symbols_at(both(4, 63)) == {(0, 1): "x_1", (1, 1): "x_1"}


def test_places_of_equal_sizes_share_a_name_until_a_batch_tells_them_apart() -> None:
    known = LearnedSizes(NAMES)
    known.learn(both(4, 48))
    known.learn(both(4, 63))
    assert not known.learn(both(4, 20))
    assert known.learn(((4, 30), (4, 31), None))
    assert known.symbols_at(both(4, 20)) == {(0, 1): "x_1", (1, 1): "y_1"}
    assert known.learn(both(5, 20))
    assert known.symbols_at(both(4, 20)) == {
        (0, 0): "x_0", (0, 1): "x_1", (1, 0): "x_0", (1, 1): "y_1",
    }  # fmt: skip


def test_a_range_holds_what_was_seen_and_is_extended_to_twice_its_end() -> None:
    known = LearnedSizes(NAMES)
    known.learn(both(4, 48))
    assert ranges(known, both(4, 63)) == {"x_1": (2, 63)}
    assert ranges(known, both(4, 10)) == {"x_1": (2, 63)}
    assert ranges(known, both(4, 64)) == {"x_1": (2, 126)}
    assert known.ranges_for(both(4, 127)) == ({"x_1": Symbol("x_1", 2, 252)}, True)
    assert ranges(known, both(4, 600)) == {"x_1": (2, 600)}


def test_sizes_of_one_are_no_part_of_a_range() -> None:
    known = LearnedSizes(NAMES)
    known.learn(both(4, 48))
    known.learn(both(1, 48))
    assert known.symbols_at(both(1, 48)) == {}
    assert ranges(known, both(4, 50)) == {"x_0": (2, 4), "x_1": (2, 50)}
    assert ranges(known, both(1, 50)) == {"x_1": (2, 50)}


def test_the_largest_sizes_to_come_vary_from_the_first_batch_on() -> None:
    known = LearnedSizes(NAMES, upto={(0, 1): 512, (1, 1): 512})
    assert ranges(known, both(4, 48)) == {"x_1": (2, 512)}
    assert known.ranges_for(both(4, 300)) == ({"x_1": Symbol("x_1", 2, 512)}, False)


def test_equal_sizes_follow_the_one_that_is_named_whatever_their_order() -> None:
    for named in ((0, 1), (1, 1)):
        known = LearnedSizes(NAMES, upto={named: 512})
        name = NAMES[named]
        assert ranges(known, both(4, 48)) == {name: (2, 512)}
        assert known.symbols_at(both(4, 48)) == {(0, 1): name, (1, 1): name}
        assert not known.learn(both(4, 300))
        assert known.learn(((4, 30), (4, 31), None))
        assert known.symbols_at(both(4, 48)) == {(0, 1): "x_1", (1, 1): "y_1"}


def test_a_size_that_is_equal_by_chance_follows_in_each_way_until_none_does() -> None:
    known = LearnedSizes(NAMES, upto={(0, 0): 512})
    square = both(64, 64)
    ways: list[set[At]] = []
    known.learn(square)
    ways.append(set(known.symbols_at(square)))
    while known.follow_otherwise():
        ways.append(set(known.symbols_at(square)))
    x, y = [(0, 0), (0, 1)], [(1, 0), (1, 1)]
    assert ways == [{x[0], y[0]}, {x[0], *y}, {*x, *y}, {x[0]}]
    known.follow_as_at_first()
    assert set(known.symbols_at(square)) == ways[0]
    assert not known.learn(both(100, 64))
    assert known.learn(((100, 64), (64, 64), None))
    assert known.symbols_at(square) == {x[0]: "x_0"}


def test_names_that_are_given_are_taken_and_nothing_is_learned() -> None:
    given = {(0, 1): Symbol("seq", 16, 64, 16)}
    known = LearnedSizes(NAMES, given)
    assert ranges(known, both(4, 48)) == {"seq": (16, 64)}
    assert not known.learn(both(5, 48))
    assert known.symbols_at(both(4, 50)) == {}  # no multiple of 16
    assert ranges(known, both(4, 80)) == {"seq": (16, 128)}
    known.unfit = "it says so"
    assert known.symbols_at(both(4, 48)) == {}
