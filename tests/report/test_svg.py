from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedvl.report.svg import TEXT_SIZE, apart, coordinate, element, every, label, scale, shorten, text_width, ticks


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1.5, "1.5"), (2.0, "2"), (1 / 3, "0.33"), (-0.001, "0"), (100, "100")]
)
def test_coordinates_are_short(value, text):
    assert coordinate(value) == text


def test_scale_maps_ends_and_middle():
    # SVG's y grows downwards: 60 % of [60, 80] lies at the bottom.
    assert [scale(value, 60, 80, 300, 20) for value in (60, 70, 80)] == [300, 160, 20]


def test_scale_of_an_empty_range_is_the_middle():
    assert scale(1, 1, 1, 10, 30) == 20


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (61.2, 78.9, [60, 65, 70, 75, 80]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (93.8, 94.3, [93.8, 93.9, 94, 94.1, 94.2, 94.3]),
        (0, 0, [0, 0.2]),
    ],
)
def test_ticks_by_hand(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_ticks_of_rounds_are_whole():
    assert ticks(1, 3, wanted=15, smallest_step=1) == [1, 2, 3]


@given(st.floats(-1e4, 1e4), st.floats(0, 1e4))
def test_ticks_cover_the_range_and_are_few(low, span):
    found = ticks(low, low + span)
    slack = (found[1] - found[0]) * 1e-6
    assert found[0] <= low + slack
    assert found[-1] >= low + span - slack
    assert 2 <= len(found) <= 8
    assert found == sorted(set(found))


def test_element_escapes_attributes_title_and_words():
    hostile = """<script>"'&"""
    drawn = ElementTree.fromstring(label(1, 2, hostile, "tick", title=hostile, data_name=hostile))
    assert drawn.get("data-name") == hostile
    assert drawn.get("class") == "tick"
    (title,) = drawn
    assert title.tag == "title"
    assert title.text == hostile
    assert title.tail == hostile


def test_element_without_content_closes_itself():
    assert element("rect", x=1, css="bar") == '<rect x="1" class="bar"/>'


def test_wide_characters_take_more_room_and_marks_none():
    assert text_width("猫") == pytest.approx(1.05 * TEXT_SIZE)
    assert text_width("e\N{COMBINING ACUTE ACCENT}") == text_width("e")


@given(st.text(max_size=60), st.floats(20, 200))
def test_shortened_names_fit(words, width):
    short = shorten(words, width)
    assert text_width(short) <= width
    assert short == words or short.endswith("…")


def test_labels_are_left_out_until_they_fit():
    # 12 pixels of text on 5-pixel cells: every third.
    assert list(every(10, 5, 12)) == [0, 3, 6, 9]
    assert list(every(3, 20, 12)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("heights", "expected"),
    [
        ([10.0, 40.0], [10.0, 40.0]),
        ([20.0, 20.0], [15.0, 25.0]),
        ([20.0, 10.0, 20.0], [16.667, 6.667, 26.667]),  # all three touch, so they keep their mean
    ],
)
def test_labels_are_pushed_apart_as_little_as_will_do(heights, expected):
    moved = apart(heights, 10)
    assert sorted(moved) == pytest.approx(sorted(expected), abs=1e-3)
    assert sum(moved) == pytest.approx(sum(heights))
    assert all(later - earlier >= 10 - 1e-9 for earlier, later in zip(sorted(moved), sorted(moved)[1:], strict=False))
