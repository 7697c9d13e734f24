"""A few of the random cases of tests/fuzz.py."""

from tests.fuzz import command_case, damage_case, fuzz, recipe_case


def test_bad_input_ends_in_one_line(tmp_path, no_launcher):
    counts = {command_case: 8, recipe_case: 4, damage_case: 8}
    assert fuzz(0, counts, tmp_path) == []
