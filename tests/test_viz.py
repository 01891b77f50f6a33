"What the pictures of minivllm.viz promise: the right boxes, colours and numbers, and one display each"
import base64
import json
import struct
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pytest
from matplotlib.figure import Figure

from minivllm import viz


@pytest.fixture(autouse=True)
def no_display(monkeypatch):
    matplotlib.use("agg")


def texts(fig):
    return [t.get_text() for ax in fig.axes for t in ax.texts]


def rectangles(fig, color=None):
    patches = [p for ax in fig.axes for p in ax.patches]
    return [p for p in patches if color is None or p.get_facecolor()[:3] == matplotlib.colors.to_rgb(color)]


def test_colours_are_stable_distinct_and_follow_the_id():
    colors = [viz.request_color(i) for i in range(9)]
    assert len(set(colors)) == 9
    assert viz.request_color(12) == viz.request_color(3) == viz.request_color("3") == viz.request_color("req-3")
    assert viz.request_color("alpha") == viz.request_color("alpha")
    assert colors[0] == "#0072b2"  # fixed: figures of different notebooks are compared


def test_map_lights_what_it_is_asked_for():
    fig = viz.engine_map("RMSNorm", "model")
    bold = {t.get_text() for t in fig.axes[0].texts if t.get_weight() == "bold"}
    assert bold == {"RMSNorm", "model"}
    assert len(rectangles(fig, viz.LIT)) == 1
    assert len(rectangles(viz.engine_map(), viz.LIT)) == 0


def test_map_names_every_part_in_its_docstring_and_draws_it():
    drawn = texts(viz.engine_map())
    for name in [*viz.BOXES, *viz.FRAMES]:
        assert name in " ".join(viz.engine_map.__doc__.split()) and name in drawn


def test_unknown_part_lists_the_valid_ones():
    with pytest.raises(ValueError, match="'Memory'.*Scheduler.*KV pool"):
        viz.engine_map("Scheduler", "Memory")


def test_boxes_do_not_overlap():
    places = list(viz.BOXES.items())
    for i, (a, (x0, y0, w0, h0)) in enumerate(places):
        for b, (x1, y1, w1, h1) in places[i + 1:]:
            assert x0 + w0 <= x1 or x1 + w1 <= x0 or y0 + h0 <= y1 or y1 + h1 <= y0, (a, b)


def test_contents_of_the_pool():
    contents = viz._pool_contents({0: [5, 2], 1: [5, 3, 4]}, 4, {0: 6, 1: 8})
    assert contents == {5: ([0, 1], 4), 2: ([0], 2), 3: ([1], 4), 4: ([1], 0)}
    assert viz._pool_contents({0: [1]}, 4) == {1: ([0], 4)}


def test_block_tables_show_every_block_and_the_filled_slots():
    fig = viz.draw_block_tables([[1, 3], [1]], 4, [6, 4], num_blocks=6)
    assert [t for t in texts(fig) if t.startswith("block")] == [f"block {i}" for i in range(6)]
    assert "request 0, 6 tokens" in texts(fig)
    assert len(rectangles(fig, viz.FREE)) == 4
    # request 0: two entries in its table, its stripe of block 1, and half of block 3
    mine = [p.get_width() for p in rectangles(fig, viz.request_color(0))]
    assert len(mine) == 4 and sorted(mine[2:])[0] == pytest.approx(max(mine) / 2)


def test_filmstrip_draws_the_pool_once_per_moment():
    fig = viz.filmstrip([("a", {}), ("b", {0: [0]}, {0: 3}), ("c", [[1]], [4])], 4, num_blocks=3)
    assert len(rectangles(fig, viz.FREE)) == 3 + 2 + 2
    assert {"a", "b", "c"} <= set(texts(fig))
    wrapped = viz.filmstrip([("x", {0: [0]})] * 5, 4, per_row=2)
    assert wrapped.get_size_inches()[1] > fig.get_size_inches()[1]


def test_slot_mapping_has_one_arrow_per_stored_token():
    fig = viz.draw_slot_mapping(["a", "b", "c"], [9, 4, -1], 4, owners=[0, 1, 1])
    arrows = [t for t in fig.axes[0].texts if getattr(t, "arrow_patch", None)]
    assert len(arrows) == 2
    assert [t for t in texts(fig) if t.startswith("block")] == ["block 0", "block 1", "block 2"]
    assert "9" in texts(fig) and "-1" not in texts(fig)


def test_slot_mapping_takes_tensors():
    import torch
    assert isinstance(viz.draw_slot_mapping("ab", torch.tensor([0, 1]), 4), Figure)


def test_timeline_stacks_tokens_and_marks_the_preempted():
    steps = [{0: 6}, {0: 1, 1: 5}, {0: 1}, {1: 5}]
    fig = viz.draw_timeline(steps, budget=6, preempted={2: [1]})
    top, below = fig.axes
    heights = {}
    for bar in top.patches:
        x = round(bar.get_x() + bar.get_width() / 2)
        heights[x] = max(heights.get(x, 0), bar.get_y() + bar.get_height())
    assert heights == {0: 6, 1: 6, 2: 1, 3: 5}
    crosses = [line for line in below.lines if line.get_marker() == "x"]
    assert [(c.get_xdata()[0], c.get_ydata()[0]) for c in crosses] == [(2, 1)]
    assert sorted(t.get_text() for t in below.texts) == ["1", "1", "5", "5", "6"]


def test_shards_cover_the_matrix_and_replicate_what_has_few_pieces():
    qkv = dict(name="qkv", shape=(16, 8), dim=0, parts=[("q", 8), ("k", 4, 2), ("v", 4, 2)])
    pieces = viz._shard_pieces(qkv, 4)
    assert [(start, stop) for _, start, stop, _ in pieces] == [
        (0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 12), (12, 14), (14, 16)]
    assert pieces[4] == ("k", 8, 10, [0, 1]) and pieces[5] == ("k", 10, 12, [2, 3])
    norm = viz._shard_pieces(dict(name="norm", shape=(2, 8), dim=None), 4)
    assert norm == [("", 0, 2, [0, 1, 2, 3])]
    row = viz._shard_pieces(dict(name="o", shape=(8, 12), dim=1), 3)
    assert [p[1:] for p in row] == [(0, 4, [0]), (4, 8, [1]), (8, 12, [2])]


def test_each_rank_is_drawn_with_its_share():
    fig = viz.draw_shards([dict(name="w", shape=(8, 4), dim=0)], 2)
    areas = [p.get_width() * p.get_height() for p in rectangles(fig, viz.request_color(1))]
    assert len(areas) == 2 and areas[0] == pytest.approx(areas[1])  # in the checkpoint and on its rank


def test_memory_bar_is_to_scale():
    fig = viz.draw_memory_bar([("a", {"weights": 1e9}), ("b", {"weights": 1e9, "pool": 3e9})], capacity=5e9)
    assert [p.get_width() for p in fig.axes[0].patches] == [1e9, 1e9, 3e9]
    assert {"1 GB", "3 GB", "capacity 5 GB "} <= set(texts(fig))


def test_accesses_show_programs_shared_and_masked_elements():
    def access(program, kind, tensor, elements, masked=()):
        return dict(program=program, kind=kind, tensor=tensor, elements=list(elements), masked=list(masked))

    fig = viz.draw_accesses([
        access(0, "load", "x", [0, 1, 2]), access(0, "store", "y", [0, 1]),
        access(1, "load", "x", [2, 3], [4]), access(1, "store", "y", [2, 3], [4]), access(1, "load", "y", [4]),
    ], {"x": (4,), "y": (2, 3), "z": (2,)})
    assert {"x: read", "y: written and read", "z: not touched", "2×"} <= set(texts(fig))
    assert [len(rectangles(fig, viz.request_color(program))) for program in (0, 1)] == [2 + 2, 1 + 3]
    assert len(rectangles(fig, "white")) == 1  # beyond the end of x; within y the mask covers an element of the next row
    assert len(rectangles(fig)) == 4 + 1 + 6 + 2


def test_table():
    table = viz.show_table([{"a": 1 / 3, "b": "x|y"}, {"b": None, "c": 2}])
    assert (table.header, table.rows) == (["a", "b", "c"], [["0.333", "x|y", ""], ["", "", "2"]])
    assert "x\\|y" in table._repr_markdown_() and table._repr_markdown_().count("\n") == 3
    assert repr(table).splitlines()[0].split() == ["a", "b", "c"]
    assert viz.show_table([{"a": 1, "b": 2}], {"b": "B"}).header == ["B"]
    assert repr(viz.show_table([])) is not None


NBS = Path(__file__).parents[1] / "nbs"
PNG = b"\x89PNG\r\n"


def recorder():
    "A drawing of one bar as high as the step, and the steps that it was asked for"
    asked = []

    def draw(step):
        asked.append(step)
        fig, ax = viz.new_figure(2, 1)
        ax.bar([0], [step])
        return fig
    return draw, asked


def shown(value):
    "What Jupyter makes of a cell's value, by form"
    from IPython.core.formatters import DisplayFormatter
    formatter = DisplayFormatter()
    return formatter.format(value)[0]


def test_small_multiples_draw_the_steps_asked_for():
    draw, asked = recorder()
    fig = viz.small_multiples(draw, [1, 5, 7], per_row=2)
    assert asked == [1, 5, 7] and [len(ax.images) for ax in fig.axes] == [1, 1, 1, 0]
    assert fig.get_size_inches()[1] == pytest.approx(9 / 2 * 2 * 1 / 2)  # two rows, in the shape of the drawing


def test_slider_draws_the_step_it_stands_at():
    widgets = pytest.importorskip("ipywidgets")
    draw, asked = recorder()
    steps = viz.steps_slider(draw, 6, viz.new_figure(3, 1)[0])
    slider, image = steps.widget.children
    assert isinstance(slider, widgets.IntSlider) and (slider.min, slider.max, slider.value) == (0, 5, 0)
    assert asked == [0]
    first = bytes(image.value)
    slider.value = 4
    assert asked == [0, 4] and bytes(image.value) != first and bytes(image.value).startswith(PNG)
    slider.value = 0
    assert asked == [0, 4] and bytes(image.value) == first  # drawn once


def test_frontend_chooses_between_slider_and_figure():
    pytest.importorskip("ipywidgets")
    steps = viz.steps_slider(recorder()[0], 3, viz.new_figure(3, 1)[0])
    forms = shown(steps)
    assert set(forms) == {viz.WIDGET_VIEW, "image/png", "text/plain"}
    assert forms[viz.WIDGET_VIEW]["model_id"] == steps.widget.model_id
    png = forms["image/png"]
    png = base64.b64decode(png) if isinstance(png, str) else png
    assert struct.unpack(">2I", png[16:24]) == (300, 100)  # the still figure, not the frame


def test_without_ipywidgets_the_figure_stands_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)  # importing it fails
    draw, asked = recorder()
    steps = viz.steps_slider(draw, 3, viz.new_figure(3, 1)[0])
    assert steps.widget is None and asked == [] and set(shown(steps)) == {"image/png", "text/plain"}


def test_executed_notebook_stores_the_figure_and_no_widget(monkeypatch, tmp_path):
    pytest.importorskip("ipywidgets")
    monkeypatch.syspath_prepend(NBS.parent / "tools")
    import exec_nbs
    monkeypatch.setenv("PYTHONPATH", str(NBS.parent))
    source = """from minivllm.viz import new_figure, small_multiples, steps_slider
def draw(step):
    return new_figure(2, 1)[0]
steps_slider(draw, 3, small_multiples(draw, [0, 2]))"""
    path = tmp_path / "slides.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), path)
    monkeypatch.setattr(exec_nbs.nbdev_clean, "__wrapped__", lambda fname: None)
    exec_nbs.execute(path, frozenset())
    nb = json.loads(path.read_text())
    (output,) = nb["cells"][0]["outputs"]
    assert set(output["data"]) == {"image/png", "text/plain"} and "widgets" not in nb["metadata"]


def test_no_stored_output_is_a_widget():
    # a view leads to a model in a kernel that is gone: `python tools/exec_nbs.py` stores a notebook without it
    views = [path.name for path in sorted(NBS.glob("*.ipynb")) for cell in nbformat.read(path, 4).cells
             for output in cell.get("outputs", []) if viz.WIDGET_VIEW in output.get("data", {})]
    assert views == []


@pytest.mark.parametrize("draw", [
    lambda: viz.small_multiples(lambda step: viz.draw_block_tables({0: [0]}, 4), [0, 1]),
    lambda: viz.engine_map(),
    lambda: viz.draw_block_tables({0: [0]}, 4),
    lambda: viz.filmstrip([("now", {0: [0]})], 4),
    lambda: viz.draw_slot_mapping("a", [0], 4),
    lambda: viz.draw_timeline([{0: 1}]),
    lambda: viz.draw_shards([dict(name="w", shape=(4, 4), dim=1)], 2),
    lambda: viz.draw_memory_bar([("a", {"b": 1})]),
    lambda: viz.draw_accesses([dict(program=(0, 1), kind="load", tensor="x", elements=[1])], {"x": (2, 2), "y": (60,)}),
    lambda: viz.draw_accesses([], {"x": (4,)}),
    lambda: viz.new_figure()[0],
])
def test_figures_are_white_and_left_to_the_caller_to_show(draw):
    plt.close("all")
    fig = draw()
    assert isinstance(fig, Figure) and fig.get_facecolor() == (1, 1, 1, 1)
    assert plt.get_fignums() == []  # pyplot would show it a second time
    fig.canvas.draw()
