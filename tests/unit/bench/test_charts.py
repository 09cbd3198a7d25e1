import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from dsv4_cluster.bench.charts import Chart, Series, nice_ticks, number, render

FINITE = st.floats(-1e6, 1e6)


@given(FINITE, st.floats(1e-3, 1e6))
def test_ticks_cover_the_range_in_equal_steps(low, span):
    ticks = nice_ticks(low, low + span)

    assert ticks[0] <= low + 1e-6 * span and ticks[-1] >= low + span * (1 - 1e-6)
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(set(ticks))


def test_ticks_are_round():
    assert nice_ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert nice_ticks(0, 7) == [0, 2, 4, 6, 8]
    assert nice_ticks(3, 3) == [3, 4, 5, 6]


def test_numbers_keep_three_digits():
    values = (0, 0.012345, 1.5, 12.345, 123.45, 12345.6, -2.5)

    assert [number(value) for value in values] == ["0", "0.0123", "1.5", "12.3", "123", "12,346", "-2.5"]


@given(st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=8), st.text("a<>&\"'", max_size=8))
def test_a_plot_is_well_formed_whatever_its_labels_and_values(points, label):
    series = Series(label=label, points=tuple(sorted(points)), has_markers=True, is_area=True)

    figure = ET.fromstring(render(Chart(title=label, x_label=label, y_label=label, series=(series, series))))

    assert figure.find("figcaption").text in (label, None)
    assert len(figure.findall(".//circle")) == 2 * len(points)


def test_points_lie_where_their_values_are():
    line = Series(label="", points=((0.0, 0.0), (10.0, 5.0), (5.0, 10.0)), has_markers=True)

    figure = ET.fromstring(render(Chart(title="", x_label="", y_label="", series=(line,))))

    (x0, y0), (x1, y1), (x2, y2) = [(float(c.get("cx")), float(c.get("cy"))) for c in figure.findall(".//circle")]
    assert abs(x2 - (x0 + x1) / 2) < 0.2 and x0 < x1
    assert abs(y1 - (y0 + y2) / 2) < 0.2 and y2 < y0


def test_a_chart_without_points_is_left_out():
    assert render(Chart(title="t", x_label="x", y_label="y", series=(Series(label="s", points=()),))) == ""
