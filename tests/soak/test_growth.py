"""What the memory part calls growth."""

from tests.soak.growth import changes, growth


def test_growth_compares_the_medians_of_the_first_and_the_last_window() -> None:
    quiet = [(float(i), {"node": 1000 + i % 2, "gone": 5} if i < 40 else {"node": 1000 + i % 2}) for i in range(80)]
    assert growth(quiet) == {"node": (1000.5, 1000.5)}
    leaking = [(float(i), {"node": 1000 + i}) for i in range(80)]
    assert growth(leaking) == {"node": (1004.5, 1074.5)}  # 0..9 and 70..79
    spike = [(float(i), {"node": 9000 if i in (3, 77) else 1000}) for i in range(80)]
    assert growth(spike) == {"node": (1000, 1000)}


def test_a_process_that_came_back_under_its_name_is_a_problem() -> None:
    quiet = [{"node": frozenset({1}), "pool": frozenset({2, 3})}] * 3
    assert changes(quiet) == []
    back = [*quiet, {"node": frozenset({4}), "pool": frozenset({2, 3})}]
    assert changes(back) == ["node ended or was started: pids [1], then [4]"]
    assert changes([*quiet, {"node": frozenset({1})}]) == ["pool ended or was started: pids [2, 3], then []"]
