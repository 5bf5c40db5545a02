"""The loss curve of the demo, as text and as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

from unicrond.core.state.state import ClusterState
from unicrond.display.loss_plot import LossCurve, svg, text_plot
from unicrond.local.demo import waiting_for

MARKS = ((25, "SIGKILL of worker a.1"), (75, "node & its workers"))
CURVE = LossCurve(
    "a <b>", ((0, 5.0), (50, 3.0), (100, 1.0)), ((25, "SIGKILL of worker a.1"), (75, "node & its workers"))
)


def test_text_plot_has_points_marks_and_axes() -> None:
    lines = text_plot(CURVE, width=41, height=5)
    assert lines == [
        "loss of a <b>",
        "  5.00 *         |                   |",
        "                 |                   |",
        "                 |         *         |",
        "                 |                   |",
        "  1.00           |                   |         *",
        "                 1                   2",
        "       iteration                             100",
        "       1 at iteration 25: SIGKILL of worker a.1",
        "       2 at iteration 75: node & its workers",
    ]


def test_svg_is_well_formed_and_puts_curves_on_the_same_axes() -> None:
    calm = LossCurve("calm", ((0, 5.0), (100, 1.0)))
    root = ElementTree.fromstring(svg([CURVE, calm]))
    space = "{http://www.w3.org/2000/svg}"
    panels = root.findall(f"{space}g")
    texts = [{element.text for element in panel.iter(f"{space}text")} for panel in panels]
    assert {"a <b>", "node & its workers"} <= texts[0] and "calm" in texts[1]
    ends = [panel.findall(f"{space}path")[-1].attrib["d"].rpartition("L")[2] for panel in panels]
    assert ends[0] == ends[1], "iteration 100 with loss 1.0"


def test_curve_of_one_point_is_drawn() -> None:
    assert "*" in "".join(text_plot(LossCurve("a", ((0, 1.0),))))
    assert svg([LossCurve("a", ((0, 1.0),))]).startswith("<svg")


def test_demo_says_which_nodes_it_waits_for() -> None:
    assert waiting_for(ClusterState(), 4).startswith("0 of 4 nodes are up")
    assert waiting_for(ClusterState(), 0) == ""
